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

// x·Φ(x), with Φ the cumulative normal distribution: Φ(-|x|) = t·P(t)·exp(-x²/2) with t = 1/(1 + 0.4·|x|/√2). P is a
// least-squares fit of degree 8, with a relative error of 6e-8 up to |x| = 12, so that the tail keeps its precision.
struct Gelu {
  NOMAX_INLINE Vec tail(Vec distance, Vec bell) {
    Vec t = 1.0f / (distance * 0.282842712f + 1.0f);
    Vec t2 = t * t, t4 = t2 * t2;
    Vec low = (t * 0.0975130737f + 0.10071907f) * t2 + (t * 0.113255443f + 0.112814979f);
    Vec high = (t * -0.0692673785f + 0.0400267551f) * t2 + (t * 0.0463894423f + 0.0380946556f);
    return ((t4 * 0.0204539912f + high) * t4 + low) * (t * bell);
  }
  NOMAX_INLINE Vec value(Vec x) {
    Vec distance = magnitude(x);
    return at_least(0, x) - distance * tail(distance, exponential(x * x * -0.5f));
  }
  NOMAX_INLINE void both(Vec x, Vec& h, Vec& d) {
    Vec distance = magnitude(x), bell = exponential(x * x * -0.5f), small = tail(distance, bell);
    h = at_least(0, x) - distance * small;
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
