// GELU by itself, as the layers between two linear ones have it: x·Φ(x), or its approximation by a tanh, and the gradient.
#pragma once
#include "activations.h"
#include "layout.h"

namespace nomax {
namespace NOMAX_ISA {

// x·(1 + tanh(√(2/π)·(x + 0.044715·x³)))/2 = x·sigmoid(z), with z = x·(a + b·x²). Beyond 12 the sigmoid is 0 or 1 in
// single precision, and there the square must not overflow.
struct GeluTanh {
  NOMAX_INLINE Vec value(Vec x) {
    Vec t = at_most(12, at_least(-12, x));
    return x * Sigmoid::value(t * (t * t * 0.0713548163f + 1.59576912f));
  }
  NOMAX_INLINE void both(Vec x, Vec& h, Vec& d) {
    Vec t = at_most(12, at_least(-12, x)), square = t * t, s, slope;
    Sigmoid::both(t * (square * 0.0713548163f + 1.59576912f), s, slope);
    h = x * s;
    d = s + t * slope * (square * 0.214064449f + 1.59576912f);
  }
};

// out = gelu(x + bias), or with a gradient grad·gelu'(x + bias), in pieces that stay in the nearest cache.
template <class H, bool Gradient> static void gelu_row(const Elements& e, int64_t start, float* sums) {
  constexpr int64_t PIECE = 32 * W;
  float x[PIECE] = {}, grad[PIECE] = {}, bias[PIECE] = {};
  for (int64_t first = 0; first < e.width; first += PIECE) {
    const int64_t some = least(PIECE, e.width - first);
    read_row(e.x, e.type, start + first, 1, some, x);
    if (Gradient) read_row(e.grad, e.type, start + first, 1, some, grad);
    if (e.bias) read_row(e.bias, Type::float32, first, 1, some, bias);
    for (int64_t i = 0; i < some; i += W) {
      Vec sum = load(x + i) + load(bias + i), h, d;
      if (Gradient) {
        H::both(sum, h, d);
        d *= load(grad + i);
        store(x + i, d);
        if (sums) store(sums + first + i, load(sums + first + i) + d);      // as wide as whole vectors
      } else {
        store(x + i, H::value(sum));
      }
    }
    write_row(x, 1, some, e.out, e.type, start + first, 1);
  }
}

template <class H> static void gelu_rows(const Elements& e, const Task& task) {
  for (int64_t row = task.first; row < task.first + task.count; row++)
    (e.grad ? gelu_row<H, true> : gelu_row<H, false>)(e, row * e.width, task.partial);
}

static void gelu(const Elements& e, const Task& task) { (e.tanh ? gelu_rows<GeluTanh> : gelu_rows<Gelu>)(e, task); }

}  // namespace NOMAX_ISA
}  // namespace nomax
