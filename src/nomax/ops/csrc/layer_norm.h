// LayerNorm of rows, and its gradients. A row stays in the nearest cache between the passes over it.
#pragma once
#include "layout.h"

namespace nomax {
namespace NOMAX_ISA {

// The sum of a vector's lanes, pairwise: rows are short, so that this counts.
#if defined(__has_builtin) && __has_builtin(__builtin_shufflevector)
NOMAX_INLINE float quick_total(Vec x) {
#if defined(__AVX512F__) || defined(NOMAX_EMULATE)
  x += __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  x += __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
  x += __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
#elif defined(__AVX2__)
  x += __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3);
  x += __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5);
#else
  x += __builtin_shufflevector(x, x, 2, 3, 0, 1);
#endif
  return x[0] + x[1];
}
#else
NOMAX_INLINE float quick_total(Vec x) { return total(x); }
#endif

// Where the rows of a task lie, one after the other: [outer, inner] with a stride each, without dividing at every row.
struct Places {
  int64_t inner, outer_stride, inner_stride, outer, at;

  Places(int64_t first, int64_t inner, int64_t outer_stride, int64_t inner_stride)
      : inner(inner), outer_stride(outer_stride), inner_stride(inner_stride), outer(first / inner), at(first % inner) {}
  int64_t next() {
    const int64_t place = outer * outer_stride + at * inner_stride;
    if (++at == inner) at = 0, outer++;
    return place;
  }
};

// Rows of exactly N vectors stay in registers; with N = 0 a row is of any width and goes through a buffer.
template <int N> struct NormRow {
  static constexpr int64_t vectors(int64_t) { return N; }
  Vec x[N];

  NOMAX_INLINE Vec inside(int64_t, int64_t, Vec y) { return y; }
  void read(const void* data, Type type, int64_t place, int64_t) {
    if (type == Type::float32)
      for (int i = 0; i < N; i++) x[i] = load(static_cast<const float*>(data) + place + i * W);
    else
      for (int i = 0; i < N; i++) x[i] = load_bfloat16(static_cast<const uint16_t*>(data) + place + i * W);
  }
  void write(void* data, Type type, int64_t place, int64_t) const {
    if (type == Type::float32)
      for (int i = 0; i < N; i++) store(static_cast<float*>(data) + place + i * W, x[i]);
    else
      for (int i = 0; i < N; i++) store_bfloat16(static_cast<uint16_t*>(data) + place + i * W, x[i]);
  }
};

template <> struct NormRow<0> {
  static int64_t vectors(int64_t width) { return (width + W - 1) / W; }
  Vec x[MOST_NORMED / W + 1];

  // What lies behind the end of the row counts as zero.
  NOMAX_INLINE Vec inside(int64_t i, int64_t width, Vec y) {
    return where(counting() < int32_t(least(W, width - i * W)), y);
  }
  void read(const void* data, Type type, int64_t place, int64_t width) {
    read_row(data, type, place, 1, width, reinterpret_cast<float*>(x));
  }
  void write(void* data, Type type, int64_t place, int64_t width) const {
    write_row(reinterpret_cast<const float*>(x), 1, width, data, type, place, 1);
  }
};

template <int N> static void norm_rows(const Norm& n, const Task& task) {
  using R = NormRow<N>;
  const float share = 1.0f / float(n.width);
  const int64_t vectors = R::vectors(n.width);
  Places places(task.first, n.inner, n.outer_stride, n.inner_stride);
  R row;
  for (int64_t r = task.first; r < task.first + task.count; r++) {
    row.read(n.x, n.type, places.next(), n.width);
    Vec sum{}, squares{};
    for (int64_t i = 0; i < vectors; i++) sum += R::inside(i, n.width, row.x[i]);
    const float mean = quick_total(sum) * share;
    for (int64_t i = 0; i < vectors; i++) {
      row.x[i] = R::inside(i, n.width, row.x[i] - mean);
      squares += row.x[i] * row.x[i];
    }
    const float scale = 1.0f / __builtin_sqrtf(quick_total(squares) * share + n.eps);
    for (int64_t i = 0; i < vectors; i++) {
      row.x[i] *= scale * load(n.weight + i * W);
      if (n.bias) row.x[i] += load(n.bias + i * W);
    }
    row.write(n.out, n.result, r * n.width, n.width);
    n.statistics[2 * r] = mean;
    n.statistics[2 * r + 1] = scale;
  }
}

// Rows of whole vectors that are too long for registers: three passes over memory that the first has brought near. With
// something to add, of type A, the first pass leaves the sum in the place of x.
template <class X, class Out, class A> static void norm_whole_rows(const Norm& n, const Task& task) {
  constexpr int SUMS = 4;      // at a time, since each waits for its last addition
  const float share = 1.0f / float(n.width);
  Places places(task.first, n.inner, n.outer_stride, n.inner_stride);
  for (int64_t r = task.first; r < task.first + task.count; r++) {
    const int64_t place = places.next();
    const X* x = static_cast<const X*>(n.x) + place;
    Out* out = static_cast<Out*>(n.out) + r * n.width;
    Vec sum[SUMS]{}, squares[SUMS]{};
    auto first = [&](int64_t i, int lane) {
      Vec y = load_number(x + i);
      if constexpr (sizeof(A) > 1) {
        y += load_number(static_cast<const A*>(n.added) + r * n.width + i) + (n.added_bias ? load(n.added_bias + i) : Vec{});
        store_number(static_cast<X*>(n.sum) + place + i, y);
      }
      sum[lane] += y;
    };
    auto second = [&](int64_t i, int lane, float mean) {
      const Vec y = load_number(x + i) - mean;
      squares[lane] += y * y;
    };
    const int64_t most = n.width / (SUMS * W) * (SUMS * W);
    for (int64_t i = 0; i < most; i += SUMS * W)
      for (int lane = 0; lane < SUMS; lane++) first(i + lane * W, lane);
    for (int64_t i = most; i < n.width; i += W) first(i, 0);
    const float mean = quick_total((sum[0] + sum[1]) + (sum[2] + sum[3])) * share;
    for (int64_t i = 0; i < most; i += SUMS * W)
      for (int lane = 0; lane < SUMS; lane++) second(i + lane * W, lane, mean);
    for (int64_t i = most; i < n.width; i += W) second(i, 0, mean);
    const float scale = 1.0f / __builtin_sqrtf(quick_total((squares[0] + squares[1]) + (squares[2] + squares[3])) * share + n.eps);
    for (int64_t i = 0; i < n.width; i += W)
      store_number(out + i, (load_number(x + i) - mean) * (scale * load(n.weight + i)) + (n.bias ? load(n.bias + i) : Vec{}));
    if (!n.statistics) continue;
    n.statistics[2 * r] = mean;
    n.statistics[2 * r + 1] = scale;
  }
}

struct Nothing {};

template <class X, class A> static void norm_whole(const Norm& n, const Task& task) {
  (n.result == Type::float32 ? norm_whole_rows<X, float, A> : norm_whole_rows<X, uint16_t, A>)(n, task);
}

// With x̂ = (x - mean)·scale and g = grad·weight: (g - mean(g) - x̂·mean(g·x̂))·scale. The task's sums are those of
// grad·x̂ for the weight, and after them those of grad for the bias.
template <int N> static void norm_gradients(const Norm& n, const Task& task) {
  using R = NormRow<N>;
  const float share = 1.0f / float(n.width);
  const int64_t vectors = R::vectors(n.width);
  Places places(task.first, n.inner, n.outer_stride, n.inner_stride);
  Places grad_places(task.first, n.inner, n.grad_outer_stride, n.grad_inner_stride);
  float *to_weight = task.partial, *to_bias = to_weight + vectors * W;
  R row, grad;
  for (int64_t r = task.first; r < task.first + task.count; r++) {
    row.read(n.x, n.type, places.next(), n.width);
    grad.read(n.grad, n.result, grad_places.next(), n.width);
    const float mean = n.statistics[2 * r], scale = n.statistics[2 * r + 1];
    Vec sum{}, products{};
    for (int64_t i = 0; i < vectors; i++) {
      row.x[i] = R::inside(i, n.width, (row.x[i] - mean) * scale);
      const Vec g = R::inside(i, n.width, grad.x[i]);
      store(to_weight + i * W, load(to_weight + i * W) + g * row.x[i]);
      if (n.bias) store(to_bias + i * W, load(to_bias + i * W) + g);
      grad.x[i] = g * load(n.weight + i * W);
      sum += grad.x[i];
      products += grad.x[i] * row.x[i];
    }
    const float level = quick_total(sum) * share, tilt = quick_total(products) * share;
    for (int64_t i = 0; i < vectors; i++) row.x[i] = (grad.x[i] - level - row.x[i] * tilt) * scale;
    row.write(n.out, n.type, r * n.width, n.width);
  }
}

// The number of vectors in a row, where it is one of the usual ones.
NOMAX_INLINE int64_t usual_vectors(const Norm& n) {
  return n.width % W || n.type == Type::float16 || n.result == Type::float16 ? 0 : n.width / W;
}

static void norm_forward(const Norm& n, const Task& task) {
  if (n.added) return (n.added_type == Type::float32 ? norm_whole<float, float> : norm_whole<float, uint16_t>)(n, task);
  switch (usual_vectors(n)) {
    case 0: return norm_rows<0>(n, task);
    case 2: return norm_rows<2>(n, task);
    case 4: return norm_rows<4>(n, task);
    case 8: return norm_rows<8>(n, task);
    default: return (n.type == Type::float32 ? norm_whole<float, Nothing> : norm_whole<uint16_t, Nothing>)(n, task);
  }
}

static void norm_backward(const Norm& n, const Task& task) {
  switch (usual_vectors(n)) {
    case 2: return norm_gradients<2>(n, task);
    case 4: return norm_gradients<4>(n, task);
    case 8: return norm_gradients<8>(n, task);
    default: return norm_gradients<0>(n, task);
  }
}

}  // namespace NOMAX_ISA
}  // namespace nomax
