// The activations h: each with its value, and with its value and derivative together. The order is that of nomax.phi.
#pragma once
#include "problem.h"
#include "vector.h"

namespace nomax {
namespace NOMAX_ISA {

struct Relu {
  NOMAX_INLINE Vec value(Vec x) { return at_least(0, x); }
  NOMAX_INLINE void both(Vec x, Vec& h, Vec& d) { h = value(x); d = where(x > 0.0f, all(1)); }
};

struct Relu2 {
  NOMAX_INLINE Vec value(Vec x) { Vec r = at_least(0, x); return r * r; }
  NOMAX_INLINE void both(Vec x, Vec& h, Vec& d) { Vec r = at_least(0, x); h = r * r; d = r + r; }
};

// x·Φ(x). With z = |x|/√2, Φ(-|x|) = erfc(z)/2 and erfc(z) = t·P(t)·exp(-z²), t = 1/(1 + 0.4 z): P is a least-squares
// fit of degree 8 with a relative error of 6e-8 on 0 <= z <= 9.
struct Gelu {
  NOMAX_INLINE void parts(Vec x, Vec& cumulative, Vec& bell) {
    Vec z = magnitude(x) * 0.70710678f;
    bell = exponential(x * x * -0.5f);
    Vec t = 1.0f / (z * 0.4f + 1.0f);
    Vec p = all(0.0409079824f);
    p = p * t - 0.138534757f;
    p = p * t + 0.0800535103f;
    p = p * t + 0.0927788846f;
    p = p * t + 0.0761893112f;
    p = p * t + 0.195026147f;
    p = p * t + 0.20143814f;
    p = p * t + 0.226510886f;
    p = p * t + 0.225629957f;
    Vec tail = p * t * bell * 0.5f;
    cumulative = choose(x > 0.0f, 1.0f - tail, tail);
  }
  NOMAX_INLINE Vec value(Vec x) { Vec c, b; parts(x, c, b); return x * c; }
  NOMAX_INLINE void both(Vec x, Vec& h, Vec& d) { Vec c, b; parts(x, c, b); h = x * c; d = c + x * b * 0.39894228f; }
};

struct Sigmoid {
  NOMAX_INLINE Vec value(Vec x) { return 1.0f / (exponential(-x) + 1.0f); }
  NOMAX_INLINE void both(Vec x, Vec& h, Vec& d) { h = value(x); d = h * (1.0f - h); }
};

struct Softplus {
  NOMAX_INLINE Vec value(Vec x) { return at_least(0, x) + logarithm_of_one_plus(exponential(-magnitude(x))); }
  NOMAX_INLINE void both(Vec x, Vec& h, Vec& d) { h = value(x); d = Sigmoid::value(x); }
};

struct Identity {
  NOMAX_INLINE Vec value(Vec x) { return x; }
  NOMAX_INLINE void both(Vec x, Vec& h, Vec& d) { h = x; d = all(1); }
};

struct Relu6 {
  NOMAX_INLINE Vec value(Vec x) { return at_most(6, at_least(0, x)); }
  NOMAX_INLINE void both(Vec x, Vec& h, Vec& d) { h = value(x); d = where((x > 0.0f) & (x < 6.0f), all(1)); }
};

struct Silu {
  NOMAX_INLINE Vec value(Vec x) { return x * Sigmoid::value(x); }
  NOMAX_INLINE void both(Vec x, Vec& h, Vec& d) { Vec s = Sigmoid::value(x); h = x * s; d = s * (x * (1.0f - s) + 1.0f); }
};

struct Cube {
  NOMAX_INLINE Vec value(Vec x) { return x * x * x; }
  NOMAX_INLINE void both(Vec x, Vec& h, Vec& d) { Vec square = x * x; h = square * x; d = square * 3.0f; }
};

// Use<H>::call for the activation that the code names: the one place where a code becomes a type.
template <template <class> class Use> static auto with_activation(Activation code) {
  switch (code) {
    case Activation::relu2: return Use<Relu2>::call;
    case Activation::gelu: return Use<Gelu>::call;
    case Activation::softplus: return Use<Softplus>::call;
    case Activation::identity: return Use<Identity>::call;
    case Activation::relu6: return Use<Relu6>::call;
    case Activation::sigmoid: return Use<Sigmoid>::call;
    case Activation::silu: return Use<Silu>::call;
    case Activation::cube: return Use<Cube>::call;
    default: return Use<Relu>::call;
  }
}

}  // namespace NOMAX_ISA
}  // namespace nomax
