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

// x·Φ(x), with Φ the cumulative normal distribution: Φ(-t) = exp(-t²/2)·P(t)/Q(t), a minimax fit up to t = 13.2, where
// single precision ends, with a relative error of 5e-9. All coefficients are positive: nothing cancels, and the tail
// keeps its precision.
struct Gelu {
  NOMAX_INLINE void tail(Vec t, Vec& numerator, Vec& denominator) {
    Vec p = all(0.0040116543f), q = all(0.0100555802f);
    q = q * t + 0.100087792f;
    p = p * t + 0.0399262719f;
    q = q * t + 0.463925093f;
    p = p * t + 0.181134269f;
    q = q * t + 1.19376564f;
    p = p * t + 0.435452163f;
    q = q * t + 1.66878927f;
    numerator = p * t + 0.5f;
    denominator = q * t + 1.0f;
  }
  NOMAX_INLINE Vec value(Vec x) {
    Vec t = at_most(14, magnitude(x)), p, q;
    tail(t, p, q);
    return at_least(0, x) - t * exponential(t * t * -0.5f) * (p / q);      // the division does not wait for the exponential
  }
  NOMAX_INLINE void both(Vec x, Vec& h, Vec& d) {
    Vec t = at_most(14, magnitude(x)), p, q, bell = exponential(t * t * -0.5f);
    tail(t, p, q);
    Vec small = bell * (p / q);
    h = at_least(0, x) - t * small;
    d = choose(x > 0.0f, 1.0f - small, small) + x * bell * 0.39894228f;
  }
};

// With e = exp(-|x|) nothing overflows, and both tails keep their precision.
struct Sigmoid {
  NOMAX_INLINE Vec from(Vec x, Vec e) { return choose(x > 0.0f, all(1), e) / (e + 1.0f); }
  NOMAX_INLINE Vec value(Vec x) { return from(x, exponential(-magnitude(x))); }
  NOMAX_INLINE void both(Vec x, Vec& h, Vec& d) {
    Vec e = exponential(-magnitude(x)), r = 1.0f / (e + 1.0f);
    h = choose(x > 0.0f, all(1), e) * r;
    d = e * r * r;
  }
};

struct Softplus {
  NOMAX_INLINE Vec value(Vec x) { return at_least(0, x) + logarithm_of_one_plus(exponential(-magnitude(x))); }
  NOMAX_INLINE void both(Vec x, Vec& h, Vec& d) {
    Vec e = exponential(-magnitude(x));
    h = at_least(0, x) + logarithm_of_one_plus(e);
    d = Sigmoid::from(x, e);
  }
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
  NOMAX_INLINE void both(Vec x, Vec& h, Vec& d) {
    Vec s, slope;
    Sigmoid::both(x, s, slope);
    h = x * s;
    d = s + x * slope;
  }
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
