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

// x·Φ(x), with Φ the cumulative normal distribution.
struct Gelu {
  // Φ(x) = 1/2 + x·P(x²)/Q(x²), fitted to an error of 7e-9 up to |x| = √30, from where on it is 0 or 1 in single precision.
  NOMAX_INLINE Vec value(Vec x) {
    Vec bounded = at_most(5.47722558f, at_least(-5.47722558f, x)), u = bounded * bounded;
    Vec p = all(2.29119816e-8f), q = all(1.2019126e-6f);
    p = p * u + 6.34782782e-6f;
    q = q * u + 7.31934924e-5f;
    p = p * u + 0.000167315709f;
    q = q * u + 0.00187592662f;
    p = p * u + 0.00466828467f;
    q = q * u + 0.0285588726f;
    p = p * u + 0.0336985849f;
    q = q * u + 0.251135856f;
    p = p * u + 0.398942232f;
    q = q * u + 1.0f;
    Vec cumulative = bounded * p / q + 0.5f;
    return x * choose(x < -5.47722558f, Vec{}, cumulative);
  }

  // The derivative needs the bell exp(-x²/2) anyway, and with it, z = |x|/√2 and t = 1/(1 + 0.4 z), Φ(-|x|) = t·P(t)·bell/2:
  // P is a least-squares fit of degree 8 with a relative error of 6e-8 on 0 <= z <= 9.
  NOMAX_INLINE void both(Vec x, Vec& h, Vec& d) {
    Vec z = magnitude(x) * 0.70710678f, bell = exponential(x * x * -0.5f);
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
    Vec cumulative = choose(x > 0.0f, 1.0f - tail, tail);
    h = x * cumulative;
    d = cumulative + x * bell * 0.39894228f;
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
