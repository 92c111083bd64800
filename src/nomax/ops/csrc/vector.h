// Vectors of W floats, written with the compiler's own vector types, and the few functions of them that we need.
// One source serves every instruction set: the width below is the only thing that changes.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define NOMAX_INLINE static inline __attribute__((always_inline))

// bfloat16 in pairs where the CPU multiplies pairs; elsewhere it is computed as float32.
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) || defined(NOMAX_EMULATE)
#define NOMAX_MULTIPLIES_PAIRS
#endif

namespace nomax {
namespace NOMAX_ISA {

#if defined(__AVX512F__) || defined(NOMAX_EMULATE)
constexpr int W = 16, WIDE = 4;     // 32 registers: 6 rows x 4 vectors of sums
#elif defined(__AVX2__)
constexpr int W = 8, WIDE = 2;      // 16 registers: 6 rows x 2 vectors
#elif defined(__aarch64__)
constexpr int W = 4, WIDE = 4;      // NEON: 32 registers, as AVX-512 has
#else
constexpr int W = 4, WIDE = 2;
#endif
constexpr int ROWS = 6;
constexpr int PANEL = W * WIDE;     // how many columns one tile is wide

typedef float Vec __attribute__((vector_size(4 * W)));
typedef int32_t Int __attribute__((vector_size(4 * W)));
typedef uint32_t Bits __attribute__((vector_size(4 * W)));
typedef uint16_t Half __attribute__((vector_size(2 * W)));
typedef uint8_t Bytes __attribute__((vector_size(W)));
typedef float Loose __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef uint16_t LooseHalf __attribute__((vector_size(2 * W), aligned(2), may_alias));
typedef uint8_t LooseBytes __attribute__((vector_size(W), aligned(1), may_alias));

NOMAX_INLINE Vec load(const float* p) { return *reinterpret_cast<const Loose*>(p); }
NOMAX_INLINE void store(float* p, Vec x) { *reinterpret_cast<Loose*>(p) = x; }
NOMAX_INLINE Vec all(float x) { return x - Vec{}; }      // exact for every x, and so a plain broadcast
NOMAX_INLINE Vec choose(Int condition, Vec yes, Vec no) { return condition ? yes : no; }
NOMAX_INLINE Vec where(Int condition, Vec yes) { return (Vec)(condition & (Int)yes); }
// The bound stands first: a NaN in x comes through, as torch has it. That is what one instruction of x86 does, but GCC
// makes three of it.
#if defined(__AVX512F__)
NOMAX_INLINE Vec at_least(float bound, Vec x) { return (Vec)_mm512_max_ps((__m512)all(bound), (__m512)x); }
NOMAX_INLINE Vec at_most(float bound, Vec x) { return (Vec)_mm512_min_ps((__m512)all(bound), (__m512)x); }
#elif defined(__AVX2__) && !defined(NOMAX_EMULATE)
NOMAX_INLINE Vec at_least(float bound, Vec x) { return (Vec)_mm256_max_ps((__m256)all(bound), (__m256)x); }
NOMAX_INLINE Vec at_most(float bound, Vec x) { return (Vec)_mm256_min_ps((__m256)all(bound), (__m256)x); }
#else
NOMAX_INLINE Vec at_least(float bound, Vec x) { Vec b = all(bound); return b > x ? b : x; }
NOMAX_INLINE Vec at_most(float bound, Vec x) { Vec b = all(bound); return b < x ? b : x; }
#endif
NOMAX_INLINE Vec magnitude(Vec x) { return (Vec)((Bits)x & 0x7fffffffu); }

NOMAX_INLINE Int counting() {
  Int x;
  for (int i = 0; i < W; i++) x[i] = i;
  return x;
}

NOMAX_INLINE float total(Vec x) {
  float sum = 0;
  for (int i = 0; i < W; i++) sum += x[i];
  return sum;
}

// One where there is anything, zero elsewhere.
NOMAX_INLINE Vec load_boolean(const uint8_t* p) {
  Bytes bytes = *reinterpret_cast<const LooseBytes*>(p);
  return where(__builtin_convertvector(bytes, Int) != 0, all(1));
}

// ---- half precision ---------------------------------------------------------------------------------------------
NOMAX_INLINE float from_bfloat16(uint16_t x) { return __builtin_bit_cast(float, uint32_t(x) << 16); }

NOMAX_INLINE uint16_t to_bfloat16(float x) {
  uint32_t bits = __builtin_bit_cast(uint32_t, x);
  if (x != x) return 0x7fc0;
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Numbers of 16 bits as those of 32. GCC makes two halves of a conversion that is one instruction.
NOMAX_INLINE Bits load_16_bits(const uint16_t* p) {
#if defined(__AVX512F__)
  return (Bits)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__) && !defined(NOMAX_EMULATE)
  return (Bits)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  return __builtin_convertvector(*reinterpret_cast<const LooseHalf*>(p), Bits);
#endif
}

NOMAX_INLINE Vec load_bfloat16(const uint16_t* p) { return (Vec)(load_16_bits(p) << 16); }

// The sixteen upper bits, rounded to nearest even, left in place: the lower half of each lane is zero.
NOMAX_INLINE Bits rounded_bfloat16(Vec x) {
  Bits bits = (Bits)x;
  Bits even = (bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u;
  Int nan = x != x;
  return ((Bits)nan & 0x7fc00000u) | (~(Bits)nan & even);
}

#if defined(__AVX512BF16__)
NOMAX_INLINE void store_bfloat16(uint16_t* p, Vec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh((__m512)x));
}

// Two vectors as one of pairs, the first in the lower halves.
NOMAX_INLINE Vec pair_up(Vec low, Vec high) {
  const __m512i weave = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5,
                                         20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return (Vec)_mm512_permutexvar_epi16(weave, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
}
#else
NOMAX_INLINE void store_bfloat16(uint16_t* p, Vec x) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16((__m512i)(rounded_bfloat16(x) >> 16)));
#else
  *reinterpret_cast<LooseHalf*>(p) = __builtin_convertvector(rounded_bfloat16(x) >> 16, Half);
#endif
}

NOMAX_INLINE Vec pair_up(Vec low, Vec high) { return (Vec)(rounded_bfloat16(low) >> 16 | rounded_bfloat16(high)); }
#endif

NOMAX_INLINE Vec load_number(const float* x) { return load(x); }
NOMAX_INLINE Vec load_number(const uint16_t* x) { return load_bfloat16(x); }
NOMAX_INLINE void store_number(float* to, Vec x) { store(to, x); }
NOMAX_INLINE void store_number(uint16_t* to, Vec x) { store_bfloat16(to, x); }

NOMAX_INLINE float from_float16(uint16_t x) {
  uint32_t sign = uint32_t(x & 0x8000) << 16, exponent = x >> 10 & 31, fraction = x & 1023;
  if (exponent == 31) return __builtin_bit_cast(float, sign | 0x7f800000 | fraction << 13);
  if (exponent) return __builtin_bit_cast(float, sign | (exponent + 112) << 23 | fraction << 13);
  float tiny = float(fraction) * 0x1p-24f;
  return sign ? -tiny : tiny;
}

NOMAX_INLINE uint16_t to_float16(float x) {
  uint32_t bits = __builtin_bit_cast(uint32_t, x), sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return uint16_t(sign | 0x7e00);
  if (bits >= 0x477ff000) return uint16_t(sign | 0x7c00);                       // rounds to infinity
  if (bits < 0x38800000) {                                                      // subnormal: let the adder round
    float shifted = __builtin_bit_cast(float, bits) + 0.5f;
    return uint16_t(sign | (__builtin_bit_cast(uint32_t, shifted) - 0x3f000000));
  }
  return uint16_t(sign | ((bits + 0xfff + (bits >> 13 & 1)) - 0x38000000) >> 13);
}

// ---- elementary functions, to about two units in the last place -----------------------------------------------------
// e^x for -87 <= x <= 87.
NOMAX_INLINE Vec exponential_within(Vec x) {
  const float shifter = 0x1.8p23f;      // adding it leaves no room for a fraction: the whole part stands in the last bits
  Vec shifted = x * 1.44269504f + shifter;
  Vec n = shifted - shifter;
  Vec r = x - n * 0.693147182f;         // ln 2 to 2e-9: enough, since the smallest results need it the least
  Vec sum = all(0.00138145988f);        // a minimax fit on |r| <= ln(2)/2, with a relative error of 3e-9
  sum = sum * r + 0.00836871658f;
  sum = sum * r + 0.041668389f;
  sum = sum * r + 0.166665211f;
  sum = sum * r + 0.49999994f;
  sum = sum * r + 1.0f;
  sum = sum * r + 1.0f;
  return (Vec)((Int)sum + ((Int)shifted << 23));
}

// e^x for x <= 0, and exactly zero where single precision ends: a product with a large number must not bring it back.
NOMAX_INLINE Vec exponential(Vec x) { return choose(x < -87.0f, Vec{}, exponential_within(x)); }

// For positive x that is not subnormal.
NOMAX_INLINE Vec logarithm_of_normal(Vec x) {
  Int bits = (Int)x;
  Int exponent = (bits - 0x3f3504f3) >> 23;               // so that the mantissa lies in [sqrt(1/2), sqrt(2))
  Vec mantissa = (Vec)(bits - (exponent << 23));
  Vec s = (mantissa - 1.0f) / (mantissa + 1.0f), z = s * s;        // log m = 2 artanh s
  Vec series = all(0.298709393f);                         // a minimax fit, with a relative error of 8e-10
  series = series * z + 0.39977574f;
  series = series * z + 0.666667759f;
  series = series * z + 2.0f;
  return series * s + __builtin_convertvector(exponent, Vec) * 0.693147182f;
}

// For positive x.
NOMAX_INLINE Vec logarithm(Vec x) {
  Int tiny = x < 0x1p-126f;
  return logarithm_of_normal(choose(tiny, x * 0x1p24f, x)) - where(tiny, all(16.6355323f));      // 24 log 2
}

// x log x for x >= 0; what is subnormal adds nothing to a sum of others.
NOMAX_INLINE Vec times_logarithm(Vec x) { return x * logarithm_of_normal(at_least(0x1p-126f, x)); }

// log(1 + x) for 0 <= x <= 1: 2 artanh s with s = x/(2 + x) <= 1/3, a minimax fit with a relative error of 5e-9.
NOMAX_INLINE Vec logarithm_of_one_plus(Vec x) {
  Vec s = x / (x + 2.0f), z = s * s;
  Vec series = all(0.280244619f);
  series = series * z + 0.279991418f;
  series = series * z + 0.400216997f;
  series = series * z + 0.666664124f;
  return (series * z + 2.0f) * s;
}

}  // namespace NOMAX_ISA
}  // namespace nomax
