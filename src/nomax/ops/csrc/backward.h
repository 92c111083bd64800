// The gradients. Nothing is saved by the forward pass: for a block of rows by a block of keys the scores are computed
// again, and with a_ij = c_i·h(x_ij)·coin_ij and g_ij = c_i·(grad_i·v_j)·coin_ij + (the row statistics' share)
//
//   dS_ij = g_ij · h'(x_ij)     dV_j = Σ_i a_ij·grad_i     dK_j = scale·Σ_i dS_ij·q_i     dQ_i = scale·Σ_j dS_ij·k_j
//
// A task owns some keys of one head and walks over all rows: dK and dV are its own, dQ is summed into its own share, and
// the shares are added in order afterwards. So no result depends on the number of threads. Many rows are walked over in
// parts, so that the shares stay small; between them dK and dV wait as floats.
#pragma once
#include "activations.h"
#include "memory.h"
#include "rows.h"

namespace nomax {
namespace NOMAX_ISA {

constexpr int64_t GRADIENT_ROWS = BIAS_BLOCK, GRADIENT_KEYS = W == 16 ? 192 : 144;

// The gradient that a row's sum, and its sum of h log h, bring to its weights h > 0.
struct OfRows {
  float sum = 0, log = 0;

  OfRows(const Problem& p, int64_t place) {
    if (p.grad_row_sum) sum = p.grad_row_sum[place], log = p.grad_row_log[place];
  }

  template <bool Log> NOMAX_INLINE Vec gradient(const OfRows& g, Vec h) {
    if constexpr (Log) return where(h > 0.0f, g.sum + g.log * (logarithm(h) + 1.0f));
    return where(h > 0.0f, all(g.sum));
  }
};

// One row of scores `a` and weight gradients `g` becomes weights and score gradients, zero where this row does not look.
template <class H> struct Differentiate {
  static void call(const Problem& p, const Keys& keys, const Dropout& dropout, const Row& row, int64_t place,
                   int64_t first, int64_t seen, float* a, float* g, const float* bias) {
    const OfRows of_rows(p, place);
    if (row.limit < first + seen || bias || p.dropout > 0)
      return general(p, keys, dropout, row, of_rows, first, seen, a, g, bias);
    if (of_rows.log != 0)
      simple<true, true>(p, row, of_rows, seen, a, g);
    else if (of_rows.sum != 0)
      simple<true, false>(p, row, of_rows, seen, a, g);
    else
      simple<false, false>(p, row, of_rows, seen, a, g);
  }

  // All keys of the block are seen, nothing is added to the scores, and no weight is dropped.
  template <bool Rows, bool Log>
  static void simple(const Problem& p, const Row& row, const OfRows& of_rows, int64_t seen, float* a, float* g) {
    for (int64_t j = 0; j < seen; j += W) {
      Vec h, d, grad = load(g + j) * row.gain;
      H::both(load(a + j) * p.scale + row.shift, h, d);
      if constexpr (Rows) grad += OfRows::gradient<Log>(of_rows, h);
      store(a + j, h * row.gain);
      store(g + j, grad * d);
    }
  }

  static __attribute__((noinline)) void general(const Problem& p, const Keys& keys, const Dropout& dropout,
                                                const Row& row, const OfRows& of_rows, int64_t first, int64_t seen,
                                                float* a, float* g, const float* bias) {
    const int32_t limit = int32_t(least(row.limit, first + seen));
    for (int64_t j = 0; j < seen; j += W) {
      Int visible = counting() + int32_t(first + j) < limit;
      Vec x = load(a + j) * p.scale + row.shift, h, d;
      if (bias) {
        Vec b = load(bias + j);
        x += b;
        visible &= b != HIDDEN;
      }
      H::both(x, h, d);
      h = where(visible, h);
      Vec weight = h * row.gain, grad = load(g + j) * row.gain;
      if (p.dropout > 0) {
        const Int kept = Dropout::kept(dropout, row, keys.original(first + j));
        weight = Dropout::thin(dropout, kept, weight);
        grad = Dropout::thin(dropout, kept, grad);
      }
      if (of_rows.log != 0)
        grad += OfRows::gradient<true>(of_rows, h);
      else if (of_rows.sum != 0)
        grad += OfRows::gradient<false>(of_rows, h);
      store(a + j, weight);
      store(g + j, where(visible, grad * d));
    }
  }
};

// The same for ReLU where every row sees every key, nothing is added to the scores and no weight is dropped: what becomes
// of the sums of a tile of weight gradients, while the scores wait in `a`. With pairs, straight to the layouts that the
// next products read.
template <class Element> struct DifferentiateRelu {
  static constexpr bool chunked = true, by_two = true;
  static constexpr int64_t chunk = CHUNK;
  const Row* rows;
  float scale, *a, *g;                              // [row][GRADIENT_KEYS]
  Element *weight_pairs, *grad_pairs, *grad_rows;   // with pairs only

  void next_panel() {
    a += PANEL, g += PANEL;
    if constexpr (Element::each == 2) weight_pairs += PANEL, grad_pairs += PANEL, grad_rows += PANEL / 2;
  }

  NOMAX_INLINE void both(const DifferentiateRelu& to, int r, int64_t column, Vec& weight, Vec& grad) {
    const Row& row = to.rows[r];
    Vec h, d;
    Relu::both(load(to.a + r * GRADIENT_KEYS + column) * to.scale + row.shift, h, d);
    weight = h * row.gain;
    grad = grad * row.gain * d;
  }

  NOMAX_INLINE void two(const DifferentiateRelu& to, int r, int n, Vec grad, Vec next_grad, bool next) {
    const int64_t column = n * W;
    Vec weight, next_weight{};
    both(to, r, column, weight, grad);
    if (next) both(to, r + 1, column, next_weight, next_grad);
    if constexpr (Element::each == 2) {
      const int64_t pair = r / 2 * GRADIENT_KEYS + column;
      store(reinterpret_cast<float*>(to.weight_pairs + pair), pair_up(weight, next_weight));
      store(reinterpret_cast<float*>(to.grad_pairs + pair), pair_up(grad, next_grad));
      put_weights(to.grad_rows + r * GRADIENT_KEYS / 2, column, grad);
      if (next) put_weights(to.grad_rows + (r + 1) * GRADIENT_KEYS / 2, column, next_grad);
    } else {
      store(to.a + r * GRADIENT_KEYS + column, weight);
      store(to.g + r * GRADIENT_KEYS + column, grad);
      if (!next) return;
      store(to.a + (r + 1) * GRADIENT_KEYS + column, next_weight);
      store(to.g + (r + 1) * GRADIENT_KEYS + column, next_grad);
    }
  }
};

// What a block of keys is needed as, packed once and used by every block of rows.
template <class Element> struct KeyBlock {
  Element *rows, *key_panels, *value_panels, *key_right;      // rows: later a copy of the keys, if one is needed
  Operand<Element> key;
  int64_t first, count;

  KeyBlock(const Problem& p, Arena& arena) {
    const int64_t steps = elements<Element>(p.dim), value_steps = elements<Element>(p.value_dim);
    const int64_t half = elements<Element>(GRADIENT_KEYS), width = round_up(p.dim, W);
    rows = arena.take<Element>(most(GRADIENT_KEYS * most(steps, value_steps), half * width));
    key_panels = arena.take<Element>(GRADIENT_KEYS, steps);
    value_panels = arena.take<Element>(GRADIENT_KEYS, value_steps);
    key_right = arena.take<Element>(half, width);
  }

  void pack(const Problem& p, const Source& keys, const Source& values, int64_t from, int64_t size) {
    first = from;
    count = size;
    transposed(left(keys, from, size, p.dim, rows), size, elements<Element>(p.dim), key_panels);
    transposed(left(values, from, size, p.value_dim, rows), size, elements<Element>(p.value_dim), value_panels);
    key = right(keys, from, size, p.dim, key_right);
  }
};

// A block of rows by a block of keys: weights and score gradients, as floats and in the layouts of the next products.
template <class Element> struct GradientTile {
  Row* rows;
  Element *query_left, *grad_left, *query_right, *grad_right;      // on the left: later copies, if they are needed
  float *weights, *score_grads, *bias;                             // with pairs not of every row, unless `careful`
  Element *weight_pairs, *score_grad_pairs, *score_grad_rows;      // with pairs only
  bool* sees;                                                      // [row][GRADIENT_KEYS], if it is done carefully
  Operand<Element> query, grad;
  int64_t count, seen;                                             // rows; keys that any of them sees
  bool strangers;                                                  // whether some of them do not see all of these
  bool careful = false;                                            // see add_seen_product

  static constexpr bool paired = Element::each == 2;

  GradientTile(const Problem& p, Arena& arena) {
    const int64_t size = GRADIENT_ROWS * GRADIENT_KEYS, half = elements<Element>(GRADIENT_ROWS);
    rows = arena.take<Row>(GRADIENT_ROWS);
    const int64_t width = round_up(p.dim, W), value_width = round_up(p.value_dim, W);
    query_left = arena.take<Element>(most(GRADIENT_ROWS * elements<Element>(p.dim), half * width));
    grad_left = arena.take<Element>(most(GRADIENT_ROWS * elements<Element>(p.value_dim), half * value_width));
    query_right = arena.take<Element>(half, width);
    grad_right = arena.take<Element>(half, value_width);
    weights = arena.take<float>(size);
    score_grads = arena.take<float>(size);
    bias = arena.take<float>(GRADIENT_KEYS + PANEL);
    weight_pairs = arena.take<Element>(paired ? size / 2 : 0);
    score_grad_pairs = arena.take<Element>(paired ? size / 2 : 0);
    score_grad_rows = arena.take<Element>(paired ? size / 2 : 0);
    sees = arena.take<bool>(size);
  }

  // Rows [first, first + size) of a head against the block of keys. False if none of them sees any of these keys.
  bool compute(const Problem& p, const Sequence& s, const Keys& keys, const Dropout& dropout, int64_t head,
               int64_t first, int64_t size, const KeyBlock<Element>& block) {
    count = size;
    seen = 0;
    int64_t near = block.count;
    for (int64_t r = 0; r < count; r++) {
      rows[r] = row(p, s, head, first + r);
      seen = most(seen, least(block.count, rows[r].limit - block.first));
      near = least(near, rows[r].limit - block.first);
    }
    if (seen <= 0) return false;
    strangers = near < seen || keys.mask_by_row || (seen % Element::each && seen < block.count);
    if (careful) memset(sees, 0, sizeof(bool) * GRADIENT_ROWS * GRADIENT_KEYS);
    query = left(source(p.query, s.batch, head, s.query), first, count, p.dim, query_left);
    grad = left(source(p.grad_out, s.batch, head, s.query), first, count, p.value_dim, grad_left);
    const auto differentiate = with_activation<Differentiate>(p.activation);
    const bool plain = p.activation == Activation::relu && !keys.bias && !keys.mask_by_row && p.dropout == 0 &&
                       !p.grad_row_sum && !p.grad_bias && !careful;
    bool any = false;
    for (int64_t group = 0; group < groups(count); group++) {
      const int64_t r = group_start(count, group, Element::each);
      const int tile_rows = int(group_start(count, group + 1, Element::each) - r);
      float *a = weights + r * GRADIENT_KEYS, *g = score_grads + r * GRADIENT_KEYS;
      int64_t reach = 0, nearest = seen;
      for (int i = 0; i < tile_rows; i++) {
        reach = most(reach, least(seen, rows[r + i].limit - block.first));
        nearest = least(nearest, rows[r + i].limit - block.first);
      }
      if (reach <= 0) {
        memset(a, 0, tile_rows * GRADIENT_KEYS * sizeof(float));
        memset(g, 0, tile_rows * GRADIENT_KEYS * sizeof(float));
        pair_rows(r, tile_rows);
        continue;
      }
      const Element* grads = grad.data + r * grad.stride;
      const int64_t value_steps = elements<Element>(p.value_dim);
      panel_products(tile_rows, seen, query.data + r * query.stride, query.stride, block.key_panels,
                     elements<Element>(p.dim), Put{a, GRADIENT_KEYS, chunk_of(p.activation)});
      if (plain && nearest == seen) {
        panel_products(tile_rows, seen, grads, grad.stride, block.value_panels, value_steps,
                       DifferentiateRelu<Element>{rows + r, p.scale, a, g, weight_pairs + r / 2 * GRADIENT_KEYS,
                                                  score_grad_pairs + r / 2 * GRADIENT_KEYS,
                                                  score_grad_rows + r * GRADIENT_KEYS / 2});
        end_pairs(r, tile_rows);
        continue;
      }
      panel_products(tile_rows, seen, grads, grad.stride, block.value_panels, value_steps,
                     Put{g, GRADIENT_KEYS, chunk_of(p.activation)});
      for (int i = 0; i < tile_rows; i++) {
        const Row& row = rows[r + i];
        const float* row_bias = keys.bias ? keys.bias + block.first : nullptr;
        if (keys.mask_by_row) {
          any |= read_bias(p.mask, at(p.mask, s.batch, row.head, row.query), block.first, seen, bias);
          row_bias = bias;
        }
        differentiate(p, keys, dropout, row, (s.batch * p.heads + head) * p.queries + row.query, block.first, seen,
                      a + i * GRADIENT_KEYS, g + i * GRADIENT_KEYS, row_bias);
        if (careful)
          for (int64_t j = 0; j < least(seen, row.limit - block.first); j++)
            sees[(r + i) * GRADIENT_KEYS + j] = !(keys.mask_by_row && bias[j] == HIDDEN);
      }
      pair_rows(r, tile_rows);
    }
    return any || !keys.mask_by_row;
  }

  // Some rows of floats as pairs: of two neighbouring rows, for sums over rows, and of two neighbouring keys.
  void pair_rows(int64_t first, int64_t size) const {
    if constexpr (paired) {
      for (int64_t r = first; r < first + size; r += 2)
        for (int64_t j = 0; j < seen; j += W) {
          const float *a = weights + r * GRADIENT_KEYS + j, *g = score_grads + r * GRADIENT_KEYS + j;
          const bool next = r + 1 < first + size;
          const Vec grad = load(g), next_grad = next ? load(g + GRADIENT_KEYS) : Vec{};
          const int64_t pair = r / 2 * GRADIENT_KEYS + j;
          store(reinterpret_cast<float*>(weight_pairs + pair), pair_up(load(a), next ? load(a + GRADIENT_KEYS) : Vec{}));
          store(reinterpret_cast<float*>(score_grad_pairs + pair), pair_up(grad, next_grad));
          put_weights(score_grad_rows + r * GRADIENT_KEYS / 2, j, grad);
          if (next) put_weights(score_grad_rows + (r + 1) * GRADIENT_KEYS / 2, j, next_grad);
        }
      end_pairs(first, size);
    }
  }

  // Zero is what stands beside the last key that is seen, if it has no other beside it.
  void end_pairs(int64_t first, int64_t size) const {
    if constexpr (paired)
      if (seen % 2)
        for (int64_t r = first; r < first + size; r++)
          reinterpret_cast<uint16_t*>(score_grad_rows + r * GRADIENT_KEYS / 2)[seen] = 0;
  }

  void add_key_gradients(const Problem& p, const Sequence& s, int64_t head, int64_t first, float* grad_key,
                         float* grad_value) {
    const Source queries = source(p.query, s.batch, head, s.query), grads = source(p.grad_out, s.batch, head, s.query);
    const Operand<Element> query = right(queries, first, count, p.dim, query_right);
    const Operand<Element> grad = right(grads, first, count, p.value_dim, grad_right);
    const int64_t width = round_up(p.dim, W), value_width = round_up(p.value_dim, W), steps = elements<Element>(count);
    const Element *a = reinterpret_cast<Element*>(weights), *g = reinterpret_cast<Element*>(score_grads);
    if constexpr (paired) a = weight_pairs, g = score_grad_pairs;
    if (careful && strangers) {
      const auto seen_by = [&](int64_t key, int64_t r) { return sees[r * GRADIENT_KEYS + key]; };
      add_seen_product<true>(
          seen, value_width, a, GRADIENT_KEYS, grad, count, grad_left, grad_value, value_width,
          [&](int64_t key, int64_t r) { return weights[r * GRADIENT_KEYS + key]; }, seen_by);
      add_seen_product<true>(
          seen, width, g, GRADIENT_KEYS, query, count, query_left, grad_key, width,
          [&](int64_t key, int64_t r) { return score_grads[r * GRADIENT_KEYS + key]; }, seen_by);
      return;
    }
    add_product<true>(seen, value_width, a, GRADIENT_KEYS, grad.data, grad.stride, steps, grad_value, value_width);
    add_product<true>(seen, width, g, GRADIENT_KEYS, query.data, query.stride, steps, grad_key, width);
  }

  void add_query_gradient(const Problem& p, const KeyBlock<Element>& block, float* grad_query) {
    const int64_t width = round_up(p.dim, W);
    const Element* g = reinterpret_cast<Element*>(score_grads);
    if constexpr (paired) g = score_grad_rows;
    if (careful && strangers)
      add_seen_product<false>(
          count, width, g, GRADIENT_KEYS / Element::each, block.key, seen, block.rows, grad_query, width,
          [&](int64_t r, int64_t key) { return score_grads[r * GRADIENT_KEYS + key]; },
          [&](int64_t r, int64_t key) { return sees[r * GRADIENT_KEYS + key]; });
    else
      add_product<false>(count, width, g, GRADIENT_KEYS / Element::each, block.key.data, block.key.stride,
                         elements<Element>(seen), grad_query, width);
  }
};

template <class Element> struct BackwardMemory {
  char* keys;
  KeyBlock<Element> block;
  GradientTile<Element> tile;
  float *grad_key, *grad_value, *grad_query;

  BackwardMemory(const Problem& p, Arena& arena)
      : keys(arena.take<char>(p.mask.data ? Keys::bytes(p) : 0)), block(p, arena), tile(p, arena) {
    const int64_t rows = least(p.rows, p.queries) * (p.heads / p.key_heads);
    grad_key = arena.take<float>(GRADIENT_KEYS, round_up(p.dim, W));
    grad_value = arena.take<float>(GRADIENT_KEYS, round_up(p.value_dim, W));
    grad_query = arena.take<float>(p.shares > 1 ? 0 : rows, round_up(p.dim, W));
  }
};

// The gradient of some keys, or of their values, on its way from and to the result; or to where it waits for more rows.
struct KeyGradient {
  const View& result;
  int64_t batch, head, dim, width;
  float *sums, *waiting;               // waiting: [key of the task][width], or null, and then float32 results hold it

  // j: within the block; kept: within the task; place: within the tensor.
  void resume(int64_t j, int64_t kept, int64_t place) const {
    float* to = sums + j * width;
    if (waiting)
      memcpy(to, waiting + kept * width, width * sizeof(float));
    else
      read_row(at(result, batch, head, place), Type::float32, 0, result.column, dim, to);
  }

  void leave(int64_t j, int64_t kept, int64_t place, bool last, float scale) const {
    const float* from = sums + j * width;
    if (!last && waiting)
      memcpy(waiting + kept * width, from, width * sizeof(float));
    else
      write_row(from, last ? scale : 1.0f, dim, at(result, batch, head, place), result.type, 0, result.column);
  }
};

// The rows of each head of a sequence that are walked over now, as far as there are.
NOMAX_INLINE int64_t rows_now(const Problem& p, const Sequence& s) {
  return most(0, least(p.rows, s.queries - p.first_row));
}

static void write_query_gradient(const Problem& p, const Sequence& s, int64_t head, const float* from, int64_t first,
                                 int64_t count) {
  const int64_t width = round_up(p.dim, W);
  for (int64_t r = 0; r < count; r++)
    write_row(from + r * width, p.scale, p.dim, at(p.grad_query, s.batch, head, s.query + first + r), p.grad_query.type,
              0, p.grad_query.column);
}

// False if a gradient is not finite and may owe that to a row or key that it does not see: see try_forward. Then all rows
// of the head must be walked over again, and carefully.
template <class Element> static bool backward_keys(const Problem& p, const Task& task, void* workspace, bool careful) {
  Arena arena{static_cast<char*>(workspace)};
  BackwardMemory<Element> memory(p, arena);
  const Sequence s = sequence(p, task.sequence);
  const int64_t rows = rows_now(p, s);
  if (rows == 0 && p.first_row > 0) return true;
  const int64_t group = p.heads / p.key_heads, first_head = task.head * group;
  const int64_t width = round_up(p.dim, W), value_width = round_up(p.value_dim, W);
  const Keys keys(p, s, first_head, group, memory.keys);
  const Source key_source = source(p.key, s.batch, task.head, s.key, keys.index);
  const Source value_source = source(p.value, s.batch, task.head, s.key, keys.index);
  const Dropout dropout(p.dropout);
  const bool last = p.first_row + rows >= s.queries;
  const KeyGradient of_keys{p.grad_key, s.batch, task.head, p.dim, width, memory.grad_key, task.waiting};
  const KeyGradient of_values{p.grad_value,      s.batch,           task.head,
                              p.value_dim,       value_width,       memory.grad_value,
                              task.waiting ? task.waiting + task.count * width : nullptr};
  memory.tile.careful = careful;
  bool mixed = false;
  Vec zeros{};

  float* grad_query = task.partial ? task.partial : memory.grad_query;
  memset(grad_query, 0, group * rows * width * sizeof(float));

  const int64_t end = least(keys.count, task.first + task.count);
  const int64_t key_piece = even_piece(end - task.first, GRADIENT_KEYS, W);
  const int64_t row_piece = even_piece(rows, GRADIENT_ROWS, 1);
  for (int64_t k = task.first; k < end; k += key_piece) {
    const int64_t count = least(key_piece, end - k);
    memset(memory.grad_key, 0, count * width * sizeof(float));
    memset(memory.grad_value, 0, count * value_width * sizeof(float));
    for (int64_t j = 0; j < count && p.first_row > 0; j++) {
      const int64_t kept = k + j - task.first, place = s.key + keys.place(k + j);
      of_keys.resume(j, kept, place);
      of_values.resume(j, kept, place);
    }
    const int64_t blind = p.causal ? most(0, k - p.diagonal - p.first_row) / row_piece * row_piece : 0;
    if (blind < rows) memory.block.pack(p, key_source, value_source, k, count);
    if (last && !keys.index) {
      expect_rows(p.grad_key, s.batch, task.head, s.key + k, count, p.dim);
      expect_rows(p.grad_value, s.batch, task.head, s.key + k, count, p.value_dim);
    }
    for (int64_t head = first_head; head < first_head + group; head++)
      for (int64_t r = blind; r < rows; r += row_piece) {
        const int64_t size = least(row_piece, rows - r), row = p.first_row + r;
        if (!task.partial && k + key_piece >= end) expect_rows(p.grad_query, s.batch, head, s.query + row, size, p.dim);
        if (!memory.tile.compute(p, s, keys, dropout, head, row, size, memory.block)) continue;
        memory.tile.add_key_gradients(p, s, head, row, memory.grad_key, memory.grad_value);
        memory.tile.add_query_gradient(p, memory.block, grad_query + ((head - first_head) * rows + r) * width);
        mixed |= memory.tile.strangers;
      }
    if (mixed) zeros += zeros_of(memory.grad_key, count * width) + zeros_of(memory.grad_value, count * value_width);
    for (int64_t j = 0; j < count; j++) {
      const int64_t kept = k + j - task.first, place = s.key + keys.place(k + j);
      of_keys.leave(j, kept, place, last, p.scale);
      of_values.leave(j, kept, place, last, 1);
    }
  }
  if (mixed) zeros += zeros_of(grad_query, group * rows * width);
  if (!task.partial)
    for (int64_t head = 0; head < group; head++)
      write_query_gradient(p, s, first_head + head, grad_query + head * rows * width, p.first_row, rows);
  return careful || total(zeros) == 0;
}

// Adds the shares of rows [first, first + count) of a group's rows now in their order, and writes the sum.
static void reduce_query_gradient(const Problem& p, const Task& task) {
  const Sequence s = sequence(p, task.sequence);
  const int64_t group = p.heads / p.key_heads, width = round_up(p.dim, W), rows = rows_now(p, s), share = group * rows * width;
  for (int64_t part = 1; part < p.shares; part++)
    for (int64_t i = task.first * width; i < (task.first + task.count) * width; i += W)
      store(task.partial + i, load(task.partial + i) + load(task.partial + part * share + i));
  for (int64_t r = task.first; r < task.first + task.count; r++)
    write_query_gradient(p, s, task.head * group + r / rows, task.partial + r * width, p.first_row + r % rows, 1);
}

// The gradient of the mask's numbers, in the mask's own shape: a task owns some of its rows (or, if it has one row for
// all, some of its columns) and adds up every batch, head, row and key that share them, always in the same order, and in
// double precision because they may be many.
template <class Element> struct BiasMemory {
  char* keys;
  KeyBlock<Element> block;
  GradientTile<Element> tile;
  double* sums;

  BiasMemory(const Problem& p, Arena& arena) : keys(arena.take<char>(Keys::bytes(p))), block(p, arena), tile(p, arena) {
    sums = arena.take<double>(GRADIENT_ROWS * GRADIENT_KEYS);
  }
};

template <class Element> static void bias_gradient(const Problem& p, const Task& task, void* workspace) {
  Arena arena{static_cast<char*>(workspace)};
  BiasMemory<Element> memory(p, arena);
  const auto& shape = p.bias_shape;
  const bool by_batch = shape[0] > 1, by_head = shape[1] > 1, by_row = shape[2] > 1, by_key = shape[3] > 1;
  float* to = p.grad_bias + (task.sequence * shape[1] + task.head) * shape[2] * shape[3];
  const int64_t first_row = by_row ? task.first : 0, last_row = by_row ? task.first + task.count : p.queries;
  const int64_t first_key = by_row ? 0 : task.first, last_key = by_row || !by_key ? p.keys : task.first + task.count;
  const Dropout dropout(p.dropout);

  for (int64_t from = first_key; from < last_key; from += GRADIENT_KEYS) {
    const int64_t width = least(GRADIENT_KEYS, last_key - from);
    memset(memory.sums, 0, GRADIENT_ROWS * GRADIENT_KEYS * sizeof(double));
    for (int64_t batch = by_batch ? task.sequence : 0; batch < (by_batch ? task.sequence + 1 : p.batch); batch++)
      for (int64_t head = by_head ? task.head : 0; head < (by_head ? task.head + 1 : p.heads); head++) {
        const Sequence s = sequence(p, batch);
        const Keys keys(p, s, head, 1, memory.keys);
        const int64_t key_head = head / (p.heads / p.key_heads);
        const int64_t k = keys.first_at(from), count = keys.first_at(from + width) - k;
        if (count == 0) continue;
        memory.block.pack(p, source(p.key, s.batch, key_head, s.key, keys.index),
                          source(p.value, s.batch, key_head, s.key, keys.index), k, count);
        for (int64_t r = first_row; r < last_row; r += GRADIENT_ROWS) {
          const int64_t size = least(GRADIENT_ROWS, last_row - r);
          if (!memory.tile.compute(p, s, keys, dropout, head, r, size, memory.block)) continue;
          for (int64_t i = 0; i < size; i++) {
            const float* grads = memory.tile.score_grads + i * GRADIENT_KEYS;
            double* sums = memory.sums + (by_row ? (r - first_row + i) * GRADIENT_KEYS : 0);
            for (int64_t j = 0; j < memory.tile.seen; j++) sums[by_key ? keys.place(k + j) - from : 0] += grads[j];
          }
        }
      }
    for (int64_t i = 0; i < (by_row ? last_row - first_row : 1); i++)
      for (int64_t j = 0; j < (by_key ? width : 1); j++)
        to[(by_row ? first_row + i : 0) * shape[3] + (by_key ? from + j : 0)] += float(memory.sums[i * GRADIENT_KEYS + j]);
  }
}

}  // namespace NOMAX_ISA
}  // namespace nomax
