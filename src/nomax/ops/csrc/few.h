// Few query rows, as in decoding: each key and each value is used once or a few times, so reading them is all that takes
// time. Keys are turned in registers rather than copied, and values whose weights are all zero are not read. For each
// output number the terms and their order are those of forward.h, so that a row's result is the same to the bit.
#pragma once
#include "layout.h"

namespace nomax {
namespace NOMAX_ISA {

constexpr int64_t AHEAD = 16;          // values between the one that is read and the one that is asked for
constexpr int64_t KEYS_AHEAD = 6 * W;
// Percent of weights that are not zero, below which the others' values are skipped.
template <class Element> NOMAX_INLINE int64_t sparse(int rows) { return Element::each == 1 ? 70 : rows == 1 ? 38 : 28; }
constexpr uint32_t EVERY = 0xffffffffu, LOW = 0xffffu;
constexpr int64_t MOST_WIDE = 1024;    // numbers of a value that is read where it lies
alignas(64) constexpr uint16_t NOTHING[MOST_WIDE] = {};

template <class Number> NOMAX_INLINE void ask_for(const Number* row, int64_t numbers) {
  for (int64_t n = 0; n < numbers; n += 64 / int64_t(sizeof(Number))) __builtin_prefetch(row + n);
}

NOMAX_INLINE Vec load_bits(const void* place) {      // also from odd addresses
  Vec x;
  memcpy(&x, place, sizeof(x));
  return x;
}

// scores[r][key] = Σ_t A(r, t) · K(key, t) for R rows and W keys, of which `present` are there. Keys are elements, or
// bfloat16 to be multiplied as float32: then two neighbouring numbers are turned as one. Later keys are asked for one by
// one between the products, where waiting costs nothing.
template <int R, class Element, class Stored>
NOMAX_INLINE void turned_products(const Element* a, int64_t a_stride, const Stored* keys, int64_t key_stride,
                                  int64_t present, int64_t steps, int64_t chunk, float* scores, int64_t stride) {
  constexpr int in_one = sizeof(Element) / sizeof(Stored);
  Vec sum[R] = {}, earlier[R] = {};
  for (int64_t t = 0; t < steps; t += in_one * W) {
    Vec block[W];
    const int64_t count = least(in_one * W, steps - t);
    if (count == in_one * W) {
#pragma GCC unroll 16
      for (int r = 0; r < W; r++) block[r] = r < present ? load_bits(keys + r * key_stride + t) : Vec{};
    } else {
      for (int r = 0; r < W; r++) {
        block[r] = Vec{};
        if (r < present) memcpy(&block[r], keys + r * key_stride + t, size_t(count) * sizeof(Stored));
      }
    }
    transpose_block(block);
    if (Element::each == 1 && t && t % chunk == 0) {
      for (int r = 0; r < R; r++) earlier[r] = t == chunk ? sum[r] : earlier[r] + sum[r];
      for (int r = 0; r < R; r++) sum[r] = Vec{};
    }
#pragma GCC unroll 16
    for (int e = 0; e < W; e++) {
      const Element* left = a + t + in_one * e;
      __builtin_prefetch(keys + (KEYS_AHEAD + e) * key_stride + t);
      if (in_one * e >= count) continue;
#pragma GCC unroll 8
      for (int r = 0; r < R; r++)
        multiply_add(sum[r], left[r * a_stride], in_one == 1 ? block[e] : (Vec)((Bits)block[e] << 16));
      if (in_one * e + 1 >= count || in_one == 1) continue;
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) multiply_add(sum[r], left[r * a_stride + 1], (Vec)((Bits)block[e] & 0xffff0000u));
    }
  }
  const bool cut = Element::each == 1 && steps > chunk;
  for (int r = 0; r < R; r++) store(scores + r * stride, cut ? sum[r] + earlier[r] : sum[r]);
}

template <int R, class Element, class Stored>
static void score_keys_of(const Element* a, int64_t a_stride, const Operand<Stored>& keys, int64_t count, int64_t steps,
                          int64_t chunk, float* scores, int64_t stride) {
  for (int64_t j = 0; j < count; j += W)
    turned_products<R>(a, a_stride, keys.data + j * keys.stride, keys.stride, count - j, steps, chunk, scores + j, stride);
}

// scores[r][key] for at most ROWS rows and any number of keys, filled up to whole vectors.
template <class Element, class Stored>
static void score_keys(int rows, const Element* a, int64_t a_stride, const Operand<Stored>& keys, int64_t count,
                       int64_t steps, int64_t chunk, float* scores, int64_t stride) {
  switch (rows) {
    case 1: return score_keys_of<1>(a, a_stride, keys, count, steps, chunk, scores, stride);
    case 2: return score_keys_of<2>(a, a_stride, keys, count, steps, chunk, scores, stride);
    case 3: return score_keys_of<3>(a, a_stride, keys, count, steps, chunk, scores, stride);
    case 4: return score_keys_of<4>(a, a_stride, keys, count, steps, chunk, scores, stride);
    case 5: return score_keys_of<5>(a, a_stride, keys, count, steps, chunk, scores, stride);
    case 6: return score_keys_of<6>(a, a_stride, keys, count, steps, chunk, scores, stride);
  }
}

// 1 where any bit but the sign is set, else 0; without a branch, which no CPU could predict.
NOMAX_INLINE uint32_t is_nonzero(uint32_t bits) { return ((bits & 0x7fffffffu) + 0x7fffffffu) >> 31; }
NOMAX_INLINE uint32_t low_is_nonzero(uint32_t pair) { return ((pair & 0x7fffu) + 0x7fffu) >> 15; }
NOMAX_INLINE uint32_t high_is_nonzero(uint32_t pair) { return low_is_nonzero(pair >> 16); }

NOMAX_INLINE uint32_t bits_of(Float x) { return __builtin_bit_cast(uint32_t, x.x); }
NOMAX_INLINE uint32_t bits_of(Pair x) { return x.x; }

// The bits of all rows, or-ed together.
template <class Element> NOMAX_INLINE uint32_t any_of(int rows, const Element* weights, int64_t stride) {
  uint32_t any = 0;
  for (int r = 0; r < rows; r++) any |= bits_of(weights[r * stride]);
  return any;
}

// Lists the elements of the weights that are not zero in every row, counts the numbers in them that are not, and returns
// how many it lists. The list has room for whole vectors.
template <class Element>
NOMAX_INLINE int64_t list_any(int rows, const Element* weights, int64_t stride, int64_t count, int32_t* list,
                              int64_t& numbers) {
  int64_t kept = 0, t = 0;
#if defined(__AVX512F__)
  for (; t + W <= count; t += W) {
    __m512i any = _mm512_setzero_si512();
    for (int r = 0; r < rows; r++) any = _mm512_or_si512(any, _mm512_loadu_si512(weights + r * stride + t));
    const __mmask16 low = _mm512_test_epi32_mask(any, _mm512_set1_epi32(Element::each == 1 ? 0x7fffffff : 0x7fff));
    const __mmask16 high = Element::each == 1 ? 0 : _mm512_test_epi32_mask(any, _mm512_set1_epi32(0x7fff0000));
    const __m512i places = _mm512_add_epi32((__m512i)counting(), _mm512_set1_epi32(int(t)));
    _mm512_storeu_si512(list + kept, _mm512_maskz_compress_epi32(low | high, places));
    kept += __builtin_popcount(low | high);
    numbers += __builtin_popcount(low) + __builtin_popcount(high);
  }
#endif
  for (; t < count; t++) {
    const uint32_t any = any_of(rows, weights + t, stride);
    const uint32_t low = Element::each == 1 ? is_nonzero(any) : low_is_nonzero(any);
    const uint32_t high = Element::each == 1 ? 0 : high_is_nonzero(any);
    list[kept] = int32_t(t);
    kept += low | high;
    numbers += low + high;
  }
  return kept;
}

// The same, but -1 if so few numbers are zero that reading all values in their order is faster.
template <class Element>
NOMAX_INLINE int64_t list_nonzero(int rows, const Element* weights, int64_t stride, int64_t count, int32_t* list) {
  int64_t numbers = 0;
  const int64_t kept = list_any(rows, weights, stride, count, list, numbers);
  return numbers * 100 < count * Element::each * sparse<Element>(rows) ? kept : -1;
}

// Where the values of a block of keys lie.
struct ValueRows {
  const Source* from;
  int64_t first, count;
  int64_t later = 0;                   // how many the blocks that follow have

  template <class Number> const Number* row(int64_t key) const {
    return static_cast<const Number*>(from->data) + from->place(first + key);
  }
  // A row of a pair; nothing if it is not wanted.
  const uint16_t* half(int64_t key, uint32_t wanted, int64_t column) const {
    const uintptr_t all = -uintptr_t(wanted), there = reinterpret_cast<uintptr_t>(row<uint16_t>(key) + column);
    return reinterpret_cast<const uint16_t*>((there & all) | (reinterpret_cast<uintptr_t>(NOTHING) & ~all));
  }
};

// Element t of the weights meets one row of values, of Stored numbers, or two; `bits` are those of the weights.
template <class Stored>
NOMAX_INLINE void ask_for_values(const ValueRows& values, Float, int64_t t, uint32_t, int64_t width) {
  ask_for(values.row<Stored>(t), width);
}
template <class Stored>
NOMAX_INLINE void ask_for_values(const ValueRows& values, Pair, int64_t t, uint32_t bits, int64_t width) {
  ask_for(values.half(2 * t, low_is_nonzero(bits), 0), width);
  ask_for(values.half(2 * t + 1, high_is_nonzero(bits), 0), width);
}

template <class Stored, int N>
NOMAX_INLINE void load_values(const ValueRows& values, Float, int64_t t, uint32_t, int64_t column, Vec (&b)[N]) {
  const Stored* row = values.row<Stored>(t) + column;
#pragma GCC unroll 8
  for (int n = 0; n < N; n++) b[n] = load_number(row + n * W);
}
template <class Stored, int N>
NOMAX_INLINE void load_values(const ValueRows& values, Pair, int64_t t, uint32_t bits, int64_t column, Vec (&b)[N]) {
  const uint16_t* even = values.half(2 * t, low_is_nonzero(bits), column);
  const uint16_t* odd = values.half(2 * t + 1, high_is_nonzero(bits), column);
#pragma GCC unroll 8
  for (int n = 0; n < N; n++)
    b[n] = (Vec)(load_16_bits(even + n * W) | load_16_bits(odd + n * W) << 16);
}

// A block of keys whose weights are known. Its values are added while those of the next block are on their way.
template <class Element> struct Weighed {
  int rows = 0;
  const Element* weights = nullptr;
  int64_t stride = 0;
  ValueRows values;
  int64_t width;
  const int32_t* list = nullptr;       // null: every element is taken
  int64_t kept = 0;

  uint32_t bits(int64_t t) const { return any_of(rows, weights + t, stride); }
};

template <class Stored, class Element> NOMAX_INLINE void ask_for_listed_as(const Weighed<Element>& block) {
  for (int64_t i = 0; i < block.kept; i++)
    ask_for_values<Stored>(block.values, Element{}, block.list[i], block.bits(block.list[i]), block.width);
}

template <class Element> NOMAX_INLINE void ask_for_listed(const Weighed<Element>& block) {
  if (!block.list) return;
  if constexpr (Element::each == 1)
    if (block.values.from->type == Type::float32) return ask_for_listed_as<float>(block);
  ask_for_listed_as<uint16_t>(block);
}

template <class Stored, int R, int N, class Element>
NOMAX_INLINE void add_value_tile(const Weighed<Element>& block, int64_t column, float* sums) {
  Vec sum[R][N] = {};
  auto add = [&](int64_t t, uint32_t bits) __attribute__((always_inline)) {
    Vec b[N];
    load_values<Stored>(block.values, Element{}, t, bits, column, b);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int n = 0; n < N; n++) multiply_add(sum[r][n], block.weights[r * block.stride + t], b[n]);
  };
  if (block.list) {
    for (int64_t i = 0; i < block.kept; i++)
      add(block.list[i], any_of(R, block.weights + block.list[i], block.stride));
  } else {
    const int64_t whole = block.values.count / Element::each;
    const int64_t askable = (block.values.count + block.values.later) / Element::each;
    for (int64_t t = 0; t < whole; t++) {
      if (column == 0 && t + AHEAD < askable) ask_for_values<Stored>(block.values, Element{}, t + AHEAD, EVERY, block.width);
      add(t, EVERY);
    }
    if (whole * Element::each < block.values.count) add(whole, LOW);
  }
  for (int r = 0; r < R; r++)
    for (int n = 0; n < N; n++) {
      float* place = sums + r * block.width + column + n * W;
      store(place, load(place) + sum[r][n]);
    }
}

template <class Stored, int R, class Element> static void add_value_rows(const Weighed<Element>& block, float* sums) {
  int64_t column = 0;
  if constexpr (R == 1)
    for (; column + 2 * PANEL <= block.width; column += 2 * PANEL) add_value_tile<Stored, R, 2 * WIDE>(block, column, sums);
  for (; column + PANEL <= block.width; column += PANEL) add_value_tile<Stored, R, WIDE>(block, column, sums);
  for (; column < block.width; column += W) add_value_tile<Stored, R, 1>(block, column, sums);
}

template <class Stored, class Element> static void add_values_as(const Weighed<Element>& block, float* sums) {
  switch (block.rows) {
    case 1: return add_value_rows<Stored, 1>(block, sums);
    case 2: return add_value_rows<Stored, 2>(block, sums);
    case 3: return add_value_rows<Stored, 3>(block, sums);
    case 4: return add_value_rows<Stored, 4>(block, sums);
    case 5: return add_value_rows<Stored, 5>(block, sums);
    case 6: return add_value_rows<Stored, 6>(block, sums);
  }
}

// sums[r] += Σ weights[r][t] · value[t]
template <class Element> NOMAX_INLINE void add_values(const Weighed<Element>& block, float* sums) {
  if constexpr (Element::each == 1)
    if (block.values.from->type == Type::float32) return add_values_as<float>(block, sums);
  add_values_as<uint16_t>(block, sums);
}

// Whether the rows of keys or values can be read where they lie.
template <class Element> NOMAX_INLINE bool in_place(const Source& from) {
  return from.column == 1 && (from.type == Type::bfloat16 || (from.type == Type::float32 && Element::each == 1));
}

}  // namespace NOMAX_ISA
}  // namespace nomax
