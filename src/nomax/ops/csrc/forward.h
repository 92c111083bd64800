// o_i = c_i · Σ_j h(q_i·k_j·scale + bias_ij + shift_i) · v_j for a block of query rows, key block by key block.
// The weights of six rows by one key block live in the first-level cache and nowhere else.
#pragma once
#include "activations.h"
#include "few.h"
#include "memory.h"
#include "rows.h"

namespace nomax {
namespace NOMAX_ISA {

constexpr int64_t KEY_BLOCK = 128;

template <class Element> struct ForwardMemory {
  char* keys;
  Row* rows;
  Element *query, *key, *panels, *value, *weights;      // key: later a copy of the values, if one is needed
  float *scores, *bias, *sums, *row_sum, *row_log;
  int32_t* list;                                        // of weights that are not zero

  ForwardMemory(const Problem& p, Arena& arena) {
    const int64_t count = least(ROW_BLOCK, p.queries * (p.heads / p.key_heads)), steps = elements<Element>(p.dim);
    const int64_t block = least(KEY_BLOCK, round_up(p.keys, PANEL));
    keys = arena.take<char>(p.mask.data ? Keys::bytes(p) : 0);
    rows = arena.take<Row>(count);
    query = arena.take<Element>(count, steps);
    key = arena.take<Element>(most(block * steps, elements<Element>(block) * round_up(p.value_dim, W)));
    panels = arena.take<Element>(block, steps);
    value = arena.take<Element>(elements<Element>(block), round_up(p.value_dim, W));
    weights = arena.take<Element>(2 * ROWS * KEY_BLOCK);
    scores = arena.take<float>(ROWS * KEY_BLOCK);
    bias = arena.take<float>(ROWS * KEY_BLOCK);
    sums = arena.take<float>(count, round_up(p.value_dim, W));
    row_sum = arena.take<float>(p.row_sum ? count * W : 0);
    row_log = arena.take<float>(p.row_sum ? count * W : 0);
    list = arena.take<int32_t>(2 * (KEY_BLOCK + W));
  }
};

// The scores of some rows and of the kept keys [first, first + count) become weights.
template <class Element> struct Weighing {
  const Problem& p;
  const Keys& keys;
  Dropout dropout;
  float scale;

  const Row* rows;
  int64_t first, count;
  const float* scores;                 // [rows][KEY_BLOCK]
  const float* bias;                   // [rows][bias_stride], or null
  int64_t bias_stride;
  Element* weights;                    // [rows][KEY_BLOCK numbers]
  float *row_sum, *row_log;            // [rows][W], or null
};

template <class Element> struct Weigh {
  template <class H> struct With {
    static void call(const Weighing<Element>& w, int rows) {
      for (int r = 0; r < rows; r++) {
        const Row& row = w.rows[r];
        const float* scores = w.scores + r * KEY_BLOCK;
        Element* weights = w.weights + r * (KEY_BLOCK / Element::each);
        if (row.limit < w.first + w.count || w.bias || w.p.dropout > 0 || (w.row_sum && w.count % W)) {
          general(w, r, row, scores, weights);
        } else if (w.row_sum) {
          Vec sum{}, log_sum{};
          for (int64_t j = 0; j < w.count; j += W) {
            Vec h = H::value(load(scores + j) * w.scale + row.shift);
            sum += h;
            log_sum += times_logarithm(h);
            put_weights(weights, j, h);
          }
          add_to_rows(w, r, sum, log_sum);
        } else {
          for (int64_t j = 0; j < w.count; j += W)
            put_weights(weights, j, H::value(load(scores + j) * w.scale + row.shift));
        }
      }
    }

    static __attribute__((noinline)) void general(const Weighing<Element>& w, int r, const Row& row, const float* scores,
                                                  Element* weights) {
      const int32_t limit = int32_t(least(row.limit, w.first + w.count));
      const float* bias = w.bias ? w.bias + r * w.bias_stride : nullptr;
      Vec sum{}, log_sum{};
      for (int64_t j = 0; j < w.count; j += W) {
        Int visible = counting() + int32_t(w.first + j) < limit;
        Vec x = load(scores + j) * w.scale + row.shift;
        if (bias) {
          Vec b = load(bias + j);
          x += b;
          visible &= b != HIDDEN;
        }
        Vec h = where(visible, H::value(x));
        if (w.row_sum) {
          sum += h;
          log_sum += times_logarithm(h);
        }
        if (w.p.dropout > 0) {
          const Int kept = Dropout::kept(w.dropout, row, w.keys.original(w.first + j));
          h = Dropout::thin(w.dropout, kept, h);
        }
        put_weights(weights, j, h);
      }
      if (w.row_sum) add_to_rows(w, r, sum, log_sum);
    }

    NOMAX_INLINE void add_to_rows(const Weighing<Element>& w, int r, Vec sum, Vec log_sum) {
      store(w.row_sum + r * W, load(w.row_sum + r * W) + sum);
      store(w.row_log + r * W, load(w.row_log + r * W) + log_sum);
    }
  };
};

// False if a result is not finite and may owe that to a key that its row does not see: then it must be done carefully.
template <class Element> static bool try_forward(const Problem& p, const Task& task, void* workspace, bool careful) {
  Arena arena{static_cast<char*>(workspace)};
  ForwardMemory<Element> memory(p, arena);
  const Sequence s = sequence(p, task.sequence);
  const int64_t group = p.heads / p.key_heads, first_head = task.head * group;
  const int64_t steps = elements<Element>(p.dim), width = round_up(p.value_dim, W);

  const Keys keys(p, s, first_head, group, memory.keys);
  int64_t reach = 0;
  for (int64_t r = 0; r < task.count; r++) {
    const int64_t of_group = task.first + r;
    memory.rows[r] = row(p, s, first_head + of_group / s.queries, of_group % s.queries);
    reach = most(reach, memory.rows[r].limit);
  }
  reach = least(reach, keys.count);

  const bool few = task.count <= ROWS && !careful;
  Operand<Element> query;
  if (memory.rows[0].head == memory.rows[task.count - 1].head) {
    query = left(source(p.query, s.batch, memory.rows[0].head, memory.rows[0].query), 0, task.count, p.dim, memory.query);
  } else {
    query = {memory.query, steps};
    for (int64_t r = 0; r < task.count; r++) {
      const Row& row = memory.rows[r];
      Operand<Element> one = left(source(p.query, s.batch, row.head, row.query), 0, 1, p.dim, memory.query + r * steps);
      if (one.data != memory.query + r * steps) memcpy(memory.query + r * steps, one.data, steps * sizeof(Element));
    }
  }

  memset(memory.sums, 0, task.count * width * sizeof(float));
  if (!few && memory.rows[0].head == memory.rows[task.count - 1].head)
    expect_rows(p.out, s.batch, memory.rows[0].head, memory.rows[0].query, task.count, p.value_dim);
  if (p.row_sum) {
    memset(memory.row_sum, 0, task.count * W * sizeof(float));
    memset(memory.row_log, 0, task.count * W * sizeof(float));
  }

  const Source key_source = source(p.key, s.batch, task.head, s.key, keys.index);
  const Source value_source = source(p.value, s.batch, task.head, s.key, keys.index);
  // relu(x·scale) = scale·relu(x): where nothing is added to the scores, the scale can wait for the finished row.
  const bool nothing_added = p.shift == 0 && !p.row_shift.data && !keys.bias &&
                             (!keys.mask_by_row || p.mask.type == Type::boolean);
  const bool bare = p.activation == Activation::relu && p.scale > 0 && nothing_added && !p.row_sum;
  const bool fused = bare && !keys.mask_by_row && p.dropout == 0;
  Weighing<Element> weighing{p, keys, Dropout(p.dropout), bare ? 1.0f : p.scale, nullptr, 0, 0, memory.scores, nullptr, 0,
                             memory.weights, nullptr, nullptr};
  if (keys.mask_by_row) weighing.bias = memory.bias, weighing.bias_stride = KEY_BLOCK;
  const auto weigh = with_activation<Weigh<Element>::template With>(p.activation);
  const bool listed = few && in_place<Element>(value_source) && p.value_dim % W == 0 && p.value_dim <= MOST_WIDE;
  // Keys in bfloat16 that are multiplied as float32, without a copy of them.
  const bool widened = few && Element::each == 1 && in_place<Element>(key_source) && key_source.type == Type::bfloat16 &&
                       !key_source.index;
  Weighed<Element> before{.values = {&value_source, 0, 0}, .width = width};      // the block whose values are on their way
  int64_t slot = 0;                    // of two, for weights and lists
  bool mixed = false;                  // whether rows met keys that they do not see, for the sake of their group

  for (int64_t k = 0; k < reach; k += KEY_BLOCK) {
    const int64_t block = least(KEY_BLOCK, reach - k);
    const Operand<Element> key = widened ? Operand<Element>{} : left(key_source, k, block, p.dim, memory.key);
    if (!few) transposed(key, block, steps, memory.panels);
    const Operand<Element> value = listed ? Operand<Element>{} : right(value_source, k, block, p.value_dim, memory.value);

    for (int64_t i = 0; i < groups(task.count); i++) {
      const int64_t r = group_start(task.count, i);
      const int count = int(group_start(task.count, i + 1) - r);
      const Row* rows = memory.rows + r;
      int64_t near = reach, far = 0;
      for (int i = 0; i < count; i++) {
        near = least(near, rows[i].limit);
        far = most(far, rows[i].limit);
      }
      const int64_t seen = least(block, far - k);
      if (seen <= 0) continue;
      if (keys.mask_by_row) {
        bool any = false;
        for (int i = 0; i < count; i++)
          any |= read_bias(p.mask, at(p.mask, s.batch, rows[i].head, rows[i].query), k, seen, memory.bias + i * KEY_BLOCK);
        if (!any) continue;
      }
      const Element* left_rows = query.data + r * query.stride;
      constexpr int64_t weights_stride = KEY_BLOCK / Element::each;
      Element* weights = memory.weights + slot * ROWS * KEY_BLOCK;
      const bool bare_rows = fused && near - k >= seen;
      if (few) {
        const auto score = [&](const auto& keys) {
          score_keys(count, left_rows, query.stride, keys, seen, steps, chunk_of(p.activation), memory.scores,
                     KEY_BLOCK);
        };
        if constexpr (Element::each == 1) {
          const uint16_t* rows = static_cast<const uint16_t*>(key_source.data) + k * key_source.row;
          widened ? score(Operand<uint16_t>{rows, key_source.row}) : score(key);
        } else {
          score(key);
        }
        if (bare_rows)
          for (int i = 0; i < count; i++)
            for (int64_t j = 0; j < seen; j += W)
              put_weights(weights + i * weights_stride, j, at_least(0, load(memory.scores + i * KEY_BLOCK + j)));
      } else if (bare_rows) {
        panel_products(count, seen, left_rows, query.stride, memory.panels, steps,
                       PutRelu<Element>{weights, weights_stride});
      } else {
        panel_products(count, seen, left_rows, query.stride, memory.panels, steps,
                       Put{memory.scores, KEY_BLOCK, chunk_of(p.activation)});
      }
      if (!bare_rows) {
        weighing.rows = rows;
        weighing.first = k;
        weighing.count = seen;
        weighing.weights = weights;
        if (keys.bias) weighing.bias = keys.bias + k;
        if (p.row_sum) weighing.row_sum = memory.row_sum + r * W, weighing.row_log = memory.row_log + r * W;
        weigh(weighing, count);
      }
      if (Element::each == 2 && seen % 2)      // the pair that reaches past the last key
        for (int i = 0; i < count; i++) reinterpret_cast<uint16_t*>(weights + i * weights_stride)[seen] = 0;
      const bool strangers = near - k < seen || keys.mask_by_row || (seen % Element::each && seen < block);
      mixed |= strangers;
      if (careful && strangers)
        add_seen_product<false>(
            count, width, weights, weights_stride, value, seen, memory.key, memory.sums + r * width, width,
            [&](int64_t i, int64_t t) { return weight_at(weights + i * weights_stride, t); },
            [&](int64_t i, int64_t t) {
              return k + t < rows[i].limit && !(keys.mask_by_row && memory.bias[i * KEY_BLOCK + t] == HIDDEN);
            });
      else if (listed) {
        int32_t* list = memory.list + slot * (KEY_BLOCK + W);
        const int64_t kept = list_nonzero(count, weights, weights_stride, elements<Element>(seen), list);
        const Weighed<Element> now{count, weights, weights_stride, {&value_source, k, seen, reach - k - seen}, width,
                                   kept < 0 ? nullptr : list, kept};
        ask_for_listed(now);
        add_values(before, memory.sums);
        before = now;
        slot = 1 - slot;
      } else
        add_product<false>(count, width, weights, weights_stride, value.data, value.stride,
                           elements<Element>(seen), memory.sums + r * width, width);
    }
  }
  add_values(before, memory.sums);
  Vec zeros{};
  for (int64_t r = 0; r < task.count; r++) {
    const Row& row = memory.rows[r];
    if (mixed) zeros += zeros_of(memory.sums + r * width, width);
    write_row(memory.sums + r * width, row.gain * (bare ? p.scale : 1.0f), p.value_dim,
              at(p.out, s.batch, row.head, row.query), p.out.type, 0, p.out.column);
    if (p.row_sum) {
      const int64_t place = (s.batch * p.heads + row.head) * p.queries + row.query;
      p.row_sum[place] = total(load(memory.row_sum + r * W));
      p.row_log[place] = total(load(memory.row_log + r * W));
    }
  }
  return careful || total(zeros) == 0;
}

template <class Element> static void forward_rows(const Problem& p, const Task& task, void* workspace) {
  if (!try_forward<Element>(p, task, workspace, false)) try_forward<Element>(p, task, workspace, true);
}

}  // namespace NOMAX_ISA
}  // namespace nomax
