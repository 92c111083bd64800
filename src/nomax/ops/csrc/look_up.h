// A few tokens in a memory of slots: Σ_s h(x·k_s + shift)·v_s, and with a gate Σ_s h(x·g_s + shift)·(x·k_s)·v_s. Every
// row is used a few times at most, so reading rows is all that takes time: the matrix inside h is read once, of the
// others only rows that some token needs. A token's result does not depend on its company, to the bit.
#pragma once
#include "activations.h"
#include "few.h"
#include "memory.h"

namespace nomax {
namespace NOMAX_ISA {

constexpr int64_t RUN = 128;           // slots whose weights are known at a time, and terms of a sum in float32
constexpr int64_t ROWS_AHEAD = 4;      // between the row that is read and the one that is asked for

// Rows are read a span at a time: two vectors of numbers, in bfloat16 the even ones and the odd ones.
constexpr int64_t SPAN = 2 * W;
struct Span { Vec first, second; };
constexpr int TILE = 2 * WIDE;         // spans of sums that fit into registers
// Rows of which a tile stays in the nearest cache while one token after the other uses its own.
template <class Number> constexpr int64_t BLOCK = least(RUN, (1 << 14) / (TILE * SPAN * int64_t(sizeof(Number))));
NOMAX_INLINE Span span(const float* row) { return {load(row), load(row + W)}; }
NOMAX_INLINE Span span(const uint16_t* row) {
  const Bits pairs = (Bits)load_bits(row);
  return {(Vec)(pairs << 16), (Vec)(pairs & 0xffff0000u)};
}
template <class Number> struct Filled {      // the end of a row, with zeros up to a whole span
  alignas(64) Number numbers[SPAN] = {};
  Filled(const Number* row, int64_t count) { memcpy(numbers, row, size_t(count) * sizeof(Number)); }
};
NOMAX_INLINE void in_order(const float*, float*) {}
NOMAX_INLINE void in_order(const uint16_t*, float* sums) {
  float halves[SPAN];
  memcpy(halves, sums, sizeof(halves));
  for (int i = 0; i < SPAN; i++) sums[i] = halves[i / 2 + i % 2 * W];
}

// How tokens meet rows: as floats, or in bfloat16 as they are, where the CPU multiplies pairs.
template <class Token> struct Meeting {
  static constexpr int vectors = 2;
  using Sum = Span;
  template <class Number> NOMAX_INLINE Span read(const Number* row) { return span(row); }
  NOMAX_INLINE void add(Span& sum, const float* token, const Span& row) {
    sum.first += load(token) * row.first;
    sum.second += load(token + W) * row.second;
  }
  NOMAX_INLINE Vec both(const Span& sum) { return sum.first + sum.second; }
  NOMAX_INLINE void keep(float* token, const Span& numbers) {
    store(token, numbers.first);
    store(token + W, numbers.second);
  }
};
template <> struct Meeting<uint16_t> {
  static constexpr int vectors = 1;
  using Sum = Vec;
  NOMAX_INLINE Vec read(const uint16_t* row) { return load_bits(row); }
  NOMAX_INLINE void add(Vec& sum, const uint16_t* token, Vec row) { multiply_pairs(sum, load_bits(token), row); }
  NOMAX_INLINE Vec both(Vec sum) { return sum; }
  NOMAX_INLINE void keep(uint16_t* token, Vec numbers) { memcpy(token, &numbers, sizeof(numbers)); }
};

// The rows of a matrix, or those that a list names.
template <class Number> struct SlotRows {
  const Number* data;
  int64_t dim, count;
  const int32_t* list;

  const Number* row(int64_t i) const { return data + (list ? list[i] : i) * dim; }
};

// sums[r][k] for R tokens and K rows: vectors whose numbers are yet to be added up.
template <int R, int K, class Token, class Number>
NOMAX_INLINE void span_products(const Token* x, int64_t stride, const SlotRows<Number>& rows, int64_t first, Vec* sums) {
  using Meets = Meeting<Token>;
  constexpr int64_t LINE = 64 / int64_t(sizeof(Number));
  const Number *row[K], *ahead[K];
#pragma GCC unroll 4
  for (int k = 0; k < K; k++) {
    row[k] = rows.row(least(first + k, rows.count - 1));
    ahead[k] = rows.row(least(first + k + ROWS_AHEAD, rows.count - 1));
  }
  typename Meets::Sum sum[R][K] = {};
  int64_t c = 0;
  for (; c + SPAN <= rows.dim; c += SPAN)
#pragma GCC unroll 4
    for (int k = 0; k < K; k++) {
#pragma GCC unroll 2
      for (int64_t line = 0; line < SPAN; line += LINE) __builtin_prefetch(ahead[k] + c + line);
      const auto b = Meets::read(row[k] + c);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) Meets::add(sum[r][k], x + r * stride + c, b);
    }
  if (c < rows.dim)
    for (int k = 0; k < K; k++) {
      const Filled<Number> last(row[k] + c, rows.dim - c);
      const auto b = Meets::read(last.numbers);
      for (int r = 0; r < R; r++) Meets::add(sum[r][k], x + r * stride + c, b);
    }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int k = 0; k < K; k++) sums[r * W + k] = Meets::both(sum[r][k]);
}

// products[r][i] = x_r · row i, filled up to whole vectors.
template <int R, class Token, class Number>
static void row_products_of(const Token* x, int64_t stride, const SlotRows<Number>& rows, float* products, int64_t apart) {
  constexpr int ROOM = ROWS * WIDE / (Meeting<Token>::vectors * R), K = ROOM >= 4 ? 4 : ROOM >= 2 ? 2 : 1;
  for (int64_t i = 0; i < rows.count; i += W) {
    Vec sums[R * W] = {};
    for (int k = 0; k < W && i + k < rows.count; k += K) span_products<R, K>(x, stride, rows, i + k, sums + k);
    for (int r = 0; r < R; r++) {
      Vec block[W];
#pragma GCC unroll 16
      for (int k = 0; k < W; k++) block[k] = sums[r * W + k];
      transpose_block(block);
#pragma GCC unroll 16
      for (int half = W / 2; half; half /= 2)
#pragma GCC unroll 8
        for (int k = 0; k < half; k++) block[k] += block[k + half];
      store(products + r * apart + i, block[0]);
    }
  }
}

template <class Token, class Number>
static void row_products(int64_t tokens, const Token* x, int64_t stride, const SlotRows<Number>& rows, float* products,
                         int64_t apart) {
  switch (tokens) {
    case 1: return row_products_of<1>(x, stride, rows, products, apart);
    case 2: return row_products_of<2>(x, stride, rows, products, apart);
    case 3: return row_products_of<3>(x, stride, rows, products, apart);
    case 4: return row_products_of<4>(x, stride, rows, products, apart);
    case 5: return row_products_of<5>(x, stride, rows, products, apart);
    case 6: return row_products_of<6>(x, stride, rows, products, apart);
  }
}

// Rows that are asked for from a column on, one by one, while others are used.
template <class Number> struct Asking {
  SlotRows<Number> rows;
  int64_t next, column;

  const Number* one() { return next < rows.count ? rows.row(next++) + column : nullptr; }
};

// sums += Σ weight · row over those of the rows that `used` lists, T spans of each from `column` on.
template <int T, class Number>
static void add_spans(const float* weights, const SlotRows<Number>& rows, const int32_t* used, int64_t count,
                            int64_t column, Asking<Number>& asking, float* sums) {
  constexpr int64_t LINE = 64 / int64_t(sizeof(Number));
  Span sum[T];
#pragma GCC unroll 8
  for (int t = 0; t < T; t++) sum[t] = span(sums + column + t * SPAN);
  for (int64_t i = 0; i < count; i++) {
    if (const Number* later = asking.one())
#pragma GCC unroll 16
      for (int64_t line = 0; line < T * SPAN; line += LINE) __builtin_prefetch(later + line);
    const Vec weight = all(weights[used[i]]);
    const Number* row = rows.row(used[i]) + column;
    const bool whole = T > 1 || column + SPAN <= rows.dim;
#pragma GCC unroll 8
    for (int t = 0; t < T; t++) {
      const Span b = whole ? span(row + t * SPAN) : span(Filled<Number>(row, rows.dim - column).numbers);
      sum[t].first += weight * b.first;
      sum[t].second += weight * b.second;
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < T; t++) {
    store(sums + column + t * SPAN, sum[t].first);
    store(sums + column + t * SPAN + W, sum[t].second);
  }
}

template <class H> struct ActivateAll {
  static void call(float* numbers, int64_t count, float shift) {
    for (int64_t i = 0; i < count; i += W) store(numbers + i, H::value(load(numbers + i) + shift));
  }
};

NOMAX_INLINE int64_t list_slots(int64_t tokens, const float* weights, int64_t apart, int64_t count, int32_t* list) {
  int64_t numbers = 0;
  return list_any(int(tokens), reinterpret_cast<const Float*>(weights), apart, count, list, numbers);
}

struct LookUpMemory {
  int64_t stride;                      // of tokens and sums
  float *x, *weights, *keyed, *sums;   // keyed: x·k_s of the slots in the list
  double* totals;
  int32_t *list, *own;                 // slots that some token needs; of a block of them, which each token does

  LookUpMemory(const LookUp& l, Arena& arena) : stride(round_up(l.dim, SPAN)) {
    x = arena.take<float>(l.tokens, stride);
    weights = arena.take<float>(l.tokens, RUN);
    keyed = arena.take<float>(l.gates ? l.tokens : 0, RUN);
    sums = arena.take<float>(l.tokens, stride);
    totals = arena.take<double>(l.tokens, stride);
    list = arena.take<int32_t>(RUN);
    own = arena.take<int32_t>(l.tokens, RUN);
  }
};

static int64_t look_up_bytes(const LookUp& l) {
  Arena arena{nullptr};
  LookUpMemory memory(l, arena);
  return arena.used;
}

// sums[r] += what the slots of a run, from the first one on, add up to.
template <class Token, class Number>
static void look_up_run(const LookUp& l, const LookUpMemory& m, int64_t first, int64_t count, float* sums) {
  const auto rows = [&](const void* matrix, const int32_t* list, int64_t kept) {
    return SlotRows<Number>{static_cast<const Number*>(matrix) + first * l.dim, l.dim, kept, list};
  };
  const Token* const x = reinterpret_cast<const Token*>(m.x);
  row_products(l.tokens, x, m.stride, rows(l.gates ? l.gates : l.keys, nullptr, count), m.weights, RUN);
  const auto activate = with_activation<ActivateAll>(l.activation);
  for (int64_t r = 0; r < l.tokens; r++) activate(m.weights + r * RUN, count, l.shift);

  const int64_t kept = list_slots(l.tokens, m.weights, RUN, count, m.list);
  for (int64_t r = 0; r < l.tokens; r++)
    for (int64_t i = 0; i < kept; i++) m.weights[r * RUN + i] = m.weights[r * RUN + m.list[i]];
  if (l.gates) {
    row_products(l.tokens, x, m.stride, rows(l.keys, m.list, kept), m.keyed, RUN);
    for (int64_t i = 0; i < l.tokens * RUN; i++)
      if (i % RUN < kept && m.weights[i] != 0) m.weights[i] *= m.keyed[i];      // else a NaN of the key would come through
  }
  // Block by block, a few columns at a time, token after token; meanwhile what comes next is asked for.
  for (int64_t from = 0; from < kept; from += BLOCK<Number>) {
    const int64_t end = least(from + BLOCK<Number>, kept), next_end = least(end + BLOCK<Number>, kept);
    int64_t needed[MOST_TOKENS];
    for (int64_t r = 0; r < l.tokens; r++)
      needed[r] = list_slots(1, m.weights + r * RUN + from, RUN, end - from, m.own + r * RUN);
    for (int64_t column = 0, width; column < l.dim; column += width) {
      width = column + TILE * SPAN <= l.dim ? TILE * SPAN : SPAN;
      const bool more = column + width < l.dim;
      Asking<Number> asking{rows(l.values, m.list, more ? end : next_end), more ? from : end, more ? column + width : 0};
      for (int64_t r = 0; r < l.tokens; r++) {
        const auto add = width == SPAN ? add_spans<1, Number> : add_spans<TILE, Number>;
        add(m.weights + r * RUN + from, rows(l.values, m.list + from, end - from), m.own + r * RUN, needed[r], column,
            asking, sums + r * m.stride);
      }
    }
  }
}

template <class Token, class Number> static void look_up_in(const LookUp& l, const Task& task, const LookUpMemory& m) {
  Token* const x = reinterpret_cast<Token*>(m.x);
  for (int64_t r = 0; r < l.tokens; r++) {
    const Number* row = static_cast<const Number*>(l.x) + r * l.dim;
    for (int64_t c = 0; c < l.dim; c += SPAN) {
      const auto numbers = c + SPAN <= l.dim ? Meeting<Token>::read(row + c)
                                             : Meeting<Token>::read(Filled<Number>(row + c, l.dim - c).numbers);
      Meeting<Token>::keep(x + r * m.stride + c, numbers);
    }
  }
  const int64_t numbers = l.tokens * m.stride;
  for (int64_t done = 0; done < task.count; done += RUN) {      // sums of one run are short enough for float32
    float* const sums = done ? m.sums : task.partial;
    memset(sums, 0, size_t(numbers) * sizeof(float));
    look_up_run<Token, Number>(l, m, task.first + done, least(RUN, task.count - done), sums);
    if (task.count > RUN)
      for (int64_t c = 0; c < numbers; c++) m.totals[c] = (done ? m.totals[c] : 0) + double(sums[c]);
  }
  if (task.count > RUN)
    for (int64_t c = 0; c < numbers; c++) task.partial[c] = float(m.totals[c]);
  for (int64_t c = 0; c < numbers; c += SPAN) in_order(static_cast<const Number*>(nullptr), task.partial + c);
}

// What the slots [task.first, task.first + task.count) add up to, in task.partial: [tokens][round_up(dim, SPAN)].
static void look_up(const LookUp& l, const Task& task, void* workspace) {
  Arena arena{static_cast<char*>(workspace)};
  const LookUpMemory memory(l, arena);
  if (l.type == Type::float32) return look_up_in<float, float>(l, task, memory);
#if defined(NOMAX_MULTIPLIES_PAIRS)
  look_up_in<uint16_t, uint16_t>(l, task, memory);
#else
  look_up_in<float, uint16_t>(l, task, memory);
#endif
}

}  // namespace NOMAX_ISA
}  // namespace nomax
