// A few tokens in a memory of slots: Σ_s h(x·k_s + shift)·v_s, and with a gate Σ_s h(x·g_s + shift)·(x·k_s)·v_s. Every
// row is used a few times at most, so reading rows is all that takes time: the matrix inside h is read once, of the
// others only rows that some token needs. A token's result does not depend on its company, to the bit.
#pragma once
#include "activations.h"
#include "few.h"
#include "memory.h"

namespace nomax {
namespace NOMAX_ISA {

// Rows are read a span at a time: two vectors of numbers, in bfloat16 the even ones and the odd ones.
constexpr int64_t SPAN = 2 * W;
struct Span { Vec first, second; };
NOMAX_INLINE Span span(const float* row) { return {load(row), load(row + W)}; }
NOMAX_INLINE Span span(const uint16_t* row) {
  Bits pairs;      // they may lie at odd addresses
  memcpy(&pairs, row, sizeof(pairs));
  return {(Vec)(pairs << 16), (Vec)(pairs & 0xffff0000u)};
}
template <class Number> NOMAX_INLINE Span last_span(const Number* row, int64_t count) {
  alignas(64) Number whole[SPAN] = {};
  memcpy(whole, row, size_t(count) * sizeof(Number));
  return span(whole);
}
NOMAX_INLINE void in_order(const float*, float*) {}
NOMAX_INLINE void in_order(const uint16_t*, float* sums) {
  float halves[SPAN];
  memcpy(halves, sums, sizeof(halves));
  for (int i = 0; i < SPAN; i++) sums[i] = halves[i / 2 + i % 2 * W];
}

// The rows of a matrix, or those that a list names.
template <class Number> struct SlotRows {
  const Number* data;
  int64_t dim, count;
  const int32_t* list;

  const Number* row(int64_t i) const { return data + (list ? list[i] : i) * dim; }
};

constexpr int64_t ROWS_AHEAD = 4;      // between the row that is read and the one that is asked for

// sums[r][k] for R tokens and K rows: vectors whose numbers are yet to be added up.
template <int R, int K, class Number>
NOMAX_INLINE void span_products(const float* x, int64_t stride, const SlotRows<Number>& rows, int64_t first, Vec* sums) {
  constexpr int64_t LINE = 64 / int64_t(sizeof(Number));
  const Number *row[K], *ahead[K];
#pragma GCC unroll 4
  for (int k = 0; k < K; k++) {
    row[k] = rows.row(least(first + k, rows.count - 1));
    ahead[k] = rows.row(least(first + k + ROWS_AHEAD, rows.count - 1));
  }
  Span sum[R][K] = {};
  auto add = [&](int64_t c, int k, const Span& b) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      sum[r][k].first += load(x + r * stride + c) * b.first;
      sum[r][k].second += load(x + r * stride + c + W) * b.second;
    }
  };
  int64_t c = 0;
  for (; c + SPAN <= rows.dim; c += SPAN)
#pragma GCC unroll 4
    for (int k = 0; k < K; k++) {
#pragma GCC unroll 2
      for (int64_t line = 0; line < SPAN; line += LINE) __builtin_prefetch(ahead[k] + c + line);
      add(c, k, span(row[k] + c));
    }
  if (c < rows.dim)
    for (int k = 0; k < K; k++) add(c, k, last_span(row[k] + c, rows.dim - c));
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int k = 0; k < K; k++) sums[r * W + k] = sum[r][k].first + sum[r][k].second;
}

// products[r][i] = x_r · row i, filled up to whole vectors.
template <int R, class Number>
static void row_products_of(const float* x, int64_t stride, const SlotRows<Number>& rows, float* products,
                            int64_t apart) {
  constexpr int ROOM = ROWS * WIDE / (2 * R), K = ROOM >= 4 ? 4 : ROOM >= 2 ? 2 : 1;      // sums that fit into registers
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

template <class Number>
static void row_products(int64_t tokens, const float* x, int64_t stride, const SlotRows<Number>& rows, float* products,
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

template <class Number> NOMAX_INLINE void add_row(float weight, const Number* row, int64_t dim, float* sums) {
  auto add = [&](int64_t c, const Span& b) __attribute__((always_inline)) {
    store(sums + c, load(sums + c) + weight * b.first);
    store(sums + c + W, load(sums + c + W) + weight * b.second);
  };
  int64_t c = 0;
#pragma GCC unroll 2
  for (; c + SPAN <= dim; c += SPAN) add(c, span(row + c));
  if (c < dim) add(c, last_span(row + c, dim - c));
}

template <class H> struct ActivateAll {
  static void call(float* numbers, int64_t count, float shift) {
    for (int64_t i = 0; i < count; i += W) store(numbers + i, H::value(load(numbers + i) + shift));
  }
};

struct LookUpMemory {
  int64_t stride, apart;               // of x and the sums; of weights
  float *x, *weights, *keyed;          // keyed: x·k_s of the slots in the list
  int32_t* list;                       // of slots that some token needs

  LookUpMemory(const LookUp& l, Arena& arena) : stride(round_up(l.dim, SPAN)), apart(round_up(l.piece, W)) {
    x = arena.take<float>(l.tokens, stride);
    weights = arena.take<float>(l.tokens, apart);
    keyed = arena.take<float>(l.gates ? l.tokens : 0, apart);
    list = arena.take<int32_t>(apart);
  }
};

static int64_t look_up_bytes(const LookUp& l) {
  Arena arena{nullptr};
  LookUpMemory memory(l, arena);
  return arena.used;
}

template <class Number> static void look_up_in(const LookUp& l, const Task& task, const LookUpMemory& m) {
  for (int64_t r = 0; r < l.tokens; r++) {
    const Number* row = static_cast<const Number*>(l.x) + r * l.dim;
    for (int64_t c = 0; c < l.dim; c += SPAN) {
      const Span numbers = c + SPAN <= l.dim ? span(row + c) : last_span(row + c, l.dim - c);
      store(m.x + r * m.stride + c, numbers.first);
      store(m.x + r * m.stride + c + W, numbers.second);
    }
  }
  const auto rows = [&](const void* matrix, const int32_t* list, int64_t count) {
    return SlotRows<Number>{static_cast<const Number*>(matrix) + task.first * l.dim, l.dim, count, list};
  };
  row_products(l.tokens, m.x, m.stride, rows(l.gates ? l.gates : l.keys, nullptr, task.count), m.weights, m.apart);
  const auto activate = with_activation<ActivateAll>(l.activation);
  for (int64_t r = 0; r < l.tokens; r++) activate(m.weights + r * m.apart, task.count, l.shift);

  int64_t kept = 0;
  for (int64_t s = 0; s < task.count; s++) {
    bool any = false;
    for (int64_t r = 0; r < l.tokens; r++) any |= m.weights[r * m.apart + s] != 0;
    m.list[kept] = int32_t(s);
    kept += any;
  }
  if (l.gates) row_products(l.tokens, m.x, m.stride, rows(l.keys, m.list, kept), m.keyed, m.apart);

  const SlotRows<Number> values = rows(l.values, m.list, kept);
  memset(task.partial, 0, size_t(l.tokens * m.stride) * sizeof(float));
  for (int64_t i = 0; i < kept; i++) {
    if (i + ROWS_AHEAD < kept) ask_for(values.row(i + ROWS_AHEAD), l.dim);
    for (int64_t r = 0; r < l.tokens; r++) {
      const float weight = m.weights[r * m.apart + m.list[i]];
      if (weight != 0)
        add_row(l.gates ? weight * m.keyed[r * m.apart + i] : weight, values.row(i), l.dim, task.partial + r * m.stride);
    }
  }
  for (int64_t c = 0; c < l.tokens * m.stride; c += SPAN) in_order(values.data, task.partial + c);
}

// What the slots [task.first, task.first + task.count) add up to, in task.partial: [tokens][round_up(dim, SPAN)].
static void look_up(const LookUp& l, const Task& task, void* workspace) {
  Arena arena{static_cast<char*>(workspace)};
  const LookUpMemory memory(l, arena);
  l.type == Type::bfloat16 ? look_up_in<uint16_t>(l, task, memory) : look_up_in<float>(l, task, memory);
}

}  // namespace NOMAX_ISA
}  // namespace nomax
