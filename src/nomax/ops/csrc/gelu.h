// GELU by itself, as the layers between two linear ones have it: x·Φ(x), or its approximation by a tanh, and the gradient.
#pragma once
#include "activations.h"
#include "layout.h"

namespace nomax {
namespace NOMAX_ISA {

// x·(1 + tanh(√(2/π)·(x + 0.044715·x³)))/2 = x/(1 + exp(-z)), with z = x·(a + b·x²). Where |x| is 9.9, exp(±z) is near
// the ends of single precision, and beyond, the result is x or nothing.
struct GeluTanh {
  NOMAX_INLINE Vec value(Vec x) {
    Vec t = at_most(9.9f, at_least(-9.9f, x));
    return choose(x < -9.9f, Vec{}, x) / (exponential_within(t * (t * t * -0.0713548163f - 1.59576912f)) + 1.0f);
  }
  NOMAX_INLINE void both(Vec x, Vec& h, Vec& d) {
    Vec t = at_most(9.9f, at_least(-9.9f, x)), square = t * t;
    Vec e = exponential_within(t * (square * -0.0713548163f - 1.59576912f)), s = 1.0f / (e + 1.0f);
    s = choose(x < -9.9f, Vec{}, s);
    h = x * s;
    d = s + t * (e * s * s) * (square * 0.214064449f + 1.59576912f);
  }
};

// gelu(x), or with a gradient grad·gelu'(x), which is added to the sums, if there are any.
template <class H, bool Gradient> NOMAX_INLINE Vec gelu_of(Vec x, Vec grad, float* sums) {
  if (!Gradient) return H::value(x);
  Vec h, d;
  H::both(x, h, d);
  d *= grad;
  if (sums) store(sums, load(sums) + d);
  return d;
}

// out = gelu(x + bias), or with a gradient grad·gelu'(x + bias), from a column on, in pieces that stay in the nearest cache.
template <class H, bool Gradient> static void gelu_row(const Elements& e, int64_t start, int64_t first, float* sums) {
  constexpr int64_t PIECE = 32 * W;
  alignas(64) float x[PIECE], grad[PIECE], bias[PIECE];
  for (; first < e.width; first += PIECE) {
    const int64_t some = least(PIECE, e.width - first), whole = some / W * W;
    if (whole < some) store(x + whole, Vec{}), store(grad + whole, Vec{}), store(bias + whole, Vec{});      // behind the end
    read_row(e.x, e.type, start + first, 1, some, x);
    if (Gradient) read_row(e.grad, e.type, start + first, 1, some, grad);
    if (e.bias) read_row(e.bias, Type::float32, first, 1, some, bias);
    for (int64_t i = 0; i < some; i += W)      // the sums are as wide as whole vectors
      store(x + i, gelu_of<H, Gradient>(load(x + i) + (e.bias ? load(bias + i) : Vec{}), Gradient ? load(grad + i) : Vec{},
                                        sums ? sums + first + i : nullptr));
    write_row(x, 1, some, e.out, e.type, start + first, 1);
  }
}

// The whole vectors of a row of float32 or bfloat16 need no pieces; returns where they end.
template <class H, bool Gradient, class T> static int64_t gelu_vectors(const Elements& e, int64_t start, float* sums) {
  const T *x = static_cast<const T*>(e.x) + start, *grad = Gradient ? static_cast<const T*>(e.grad) + start : x;
  T* out = static_cast<T*>(e.out) + start;
  int64_t i = 0;
  for (; i + W <= e.width; i += W)
    store_number(out + i, gelu_of<H, Gradient>(load_number(x + i) + (e.bias ? load(e.bias + i) : Vec{}), load_number(grad + i),
                                               sums ? sums + i : nullptr));
  return i;
}

template <class H, bool Gradient> static void gelu_rows(const Elements& e, const Task& task) {
  for (int64_t row = task.first; row < task.first + task.count; row++) {
    const int64_t start = row * e.width;
    float* sums = task.partial ? task.partial + row % GELU_SUMS * round_up(e.width, W) : nullptr;
    const int64_t done = e.type == Type::float32    ? gelu_vectors<H, Gradient, float>(e, start, sums)
                         : e.type == Type::bfloat16 ? gelu_vectors<H, Gradient, uint16_t>(e, start, sums)
                                                    : 0;
    if (done < e.width) gelu_row<H, Gradient>(e, start, done, sums);
  }
}

template <class H> static void gelu_of_rows(const Elements& e, const Task& task) {
  (e.grad ? gelu_rows<H, true> : gelu_rows<H, false>)(e, task);
}

static void gelu(const Elements& e, const Task& task) { (e.tanh ? gelu_of_rows<GeluTanh> : gelu_of_rows<Gelu>)(e, task); }

}  // namespace NOMAX_ISA
}  // namespace nomax
