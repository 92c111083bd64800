// h = identity without a mask: Σ_j (q_i·k_j) v_j = q_i (Σ_j k_j v_jᵀ), so the keys are met once and no row sees them.
#pragma once
#include "memory.h"
#include "rows.h"

namespace nomax {
namespace NOMAX_ISA {

constexpr int64_t LINEAR_BLOCK = 96;

struct LinearMemory {
  Float *left_rows, *right_rows;
  float *state, *sums;

  LinearMemory(const Problem& p, Arena& arena) {
    left_rows = arena.take<Float>(LINEAR_BLOCK, p.dim);
    right_rows = arena.take<Float>(LINEAR_BLOCK, round_up(p.value_dim, W));
    state = arena.take<float>(p.dim, round_up(p.value_dim, W));
    sums = arena.take<float>(LINEAR_BLOCK, round_up(p.value_dim, W));
  }
};

// partial[dim][value_dim] = Σ_j k_j v_jᵀ over the task's keys.
static void linear_keys(const Problem& p, const Task& task, void* workspace) {
  Arena arena{static_cast<char*>(workspace)};
  LinearMemory memory(p, arena);
  const int64_t width = round_up(p.value_dim, W);
  const Source keys = source(p.key, task.sequence, task.head, 0), values = source(p.value, task.sequence, task.head, 0);
  memset(task.partial, 0, p.dim * width * sizeof(float));
  for (int64_t k = task.first; k < task.first + task.count; k += LINEAR_BLOCK) {
    const int64_t count = least(LINEAR_BLOCK, task.first + task.count - k);
    const Operand<Float> key = left(keys, k, count, p.dim, memory.left_rows);
    const Operand<Float> value = right(values, k, count, p.value_dim, memory.right_rows);
    add_product<true>(p.dim, width, key.data, key.stride, value.data, value.stride, count, task.partial, width);
  }
}

// Rows of one query head against the sum of its key head's partial states, which are added in order.
static void linear_queries(const Problem& p, const Task& task, void* workspace) {
  Arena arena{static_cast<char*>(workspace)};
  LinearMemory memory(p, arena);
  const int64_t width = round_up(p.value_dim, W), size = p.dim * width;
  memset(memory.state, 0, size * sizeof(float));
  for (int64_t part = 0; part < p.shares; part++)
    for (int64_t i = 0; i < size; i += W)
      store(memory.state + i, load(memory.state + i) + load(task.partial + part * size + i));
  const Source queries = source(p.query, task.sequence, task.head, 0);
  for (int64_t r = task.first; r < task.first + task.count; r += LINEAR_BLOCK) {
    const int64_t count = least(LINEAR_BLOCK, task.first + task.count - r);
    const Operand<Float> query = left(queries, r, count, p.dim, memory.left_rows);
    memset(memory.sums, 0, count * width * sizeof(float));
    add_product<false>(count, width, query.data, query.stride, reinterpret_cast<Float*>(memory.state), width, p.dim,
                       memory.sums, width);
    for (int64_t i = 0; i < count; i++)
      write_row(memory.sums + i * width, p.scale * p.gain, p.value_dim, at(p.out, task.sequence, task.head, r + i),
                p.out.type, 0, p.out.column);
  }
}

}  // namespace NOMAX_ISA
}  // namespace nomax
