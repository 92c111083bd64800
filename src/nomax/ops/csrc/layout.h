// From a strided tensor of any type to the layouts that the product reads. What already lies right is used in place.
//
//   left        [row][dim]              A of a product that sums over dim
//   right       [row][dim]              B of a product that sums over rows; columns filled up with zeros to whole vectors
//   transposed  [panel][dim][PANEL]     B of a product that sums over dim; PANEL rows to a panel
//
// With pairs, left holds two neighbouring columns in an element and right two neighbouring rows.
#pragma once
#include "tile.h"

namespace nomax {
namespace NOMAX_ISA {

// The rows of one head of a tensor; `index`, if there, picks and orders them.
struct Source {
  const void* data;
  Type type;
  int64_t row, column;
  const int32_t* index;

  int64_t place(int64_t r) const { return (index ? index[r] : r) * row; }
};

NOMAX_INLINE int64_t type_size(Type type) { return type == Type::float32 ? 4 : type == Type::boolean ? 1 : 2; }

NOMAX_INLINE void* at(const View& view, int64_t batch, int64_t head, int64_t row) {
  int64_t place = batch * view.batch + head * view.head + row * view.row;
  return static_cast<char*>(view.data) + place * type_size(view.type);
}

NOMAX_INLINE Source source(const View& view, int64_t batch, int64_t head, int64_t row, const int32_t* index = nullptr) {
  return {at(view, batch, head, row), view.type, view.row, view.column, index};
}

NOMAX_INLINE float number(const void* data, Type type, int64_t place) {
  switch (type) {
    case Type::float32: return static_cast<const float*>(data)[place];
    case Type::bfloat16: return from_bfloat16(static_cast<const uint16_t*>(data)[place]);
    case Type::float16: return from_float16(static_cast<const uint16_t*>(data)[place]);
    case Type::boolean: return static_cast<const uint8_t*>(data)[place] ? 1.0f : 0.0f;
  }
  return 0;
}

// `count` numbers from memory to floats.
static void read_row(const void* data, Type type, int64_t place, int64_t stride, int64_t count, float* to) {
  int64_t c = 0;
  if (stride == 1 && type == Type::float32) {
    const float* from = static_cast<const float*>(data) + place;
    for (; c + W <= count; c += W) store(to + c, load(from + c));
  } else if (stride == 1 && type == Type::bfloat16) {
    const uint16_t* from = static_cast<const uint16_t*>(data) + place;
    for (; c + W <= count; c += W) store(to + c, load_bfloat16(from + c));
  } else if (stride == 1 && type == Type::boolean) {
    const uint8_t* from = static_cast<const uint8_t*>(data) + place;
    for (; c + W <= count; c += W) store(to + c, load_boolean(from + c));
#if defined(__F16C__)
  } else if (stride == 1 && type == Type::float16) {
    const uint16_t* from = static_cast<const uint16_t*>(data) + place;
    for (; c + 8 <= count; c += 8)
      _mm256_storeu_ps(to + c, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + c))));
#elif defined(__aarch64__)
  } else if (stride == 1 && type == Type::float16) {
    const uint16_t* from = static_cast<const uint16_t*>(data) + place;
    for (; c + W <= count; c += W) store(to + c, (Vec)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from + c))));
#endif
  }
  for (; c < count; c++) to[c] = number(data, type, place + c * stride);
}

// `count` floats, times a factor, to memory.
static void write_row(const float* from, float factor, int64_t count, void* data, Type type, int64_t place,
                      int64_t stride) {
  int64_t c = 0;
  if (type == Type::float32) {
    float* to = static_cast<float*>(data) + place;
    if (stride == 1)
      for (; c + W <= count; c += W) store(to + c, load(from + c) * factor);
    for (; c < count; c++) to[c * stride] = from[c] * factor;
  } else if (type == Type::bfloat16) {
    uint16_t* to = static_cast<uint16_t*>(data) + place;
    if (stride == 1)
      for (; c + W <= count; c += W) store_bfloat16(to + c, load(from + c) * factor);
    for (; c < count; c++) to[c * stride] = to_bfloat16(from[c] * factor);
  } else {
    uint16_t* to = static_cast<uint16_t*>(data) + place;
#if defined(__F16C__)
    if (stride == 1)
      for (; c + 8 <= count; c += 8)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + c),
                         _mm256_cvtps_ph(_mm256_mul_ps(_mm256_loadu_ps(from + c), _mm256_set1_ps(factor)),
                                         _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__aarch64__)
    if (stride == 1)
      for (; c + W <= count; c += W)
        vst1_u16(to + c, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)(load(from + c) * factor))));
#endif
    for (; c < count; c++) to[c * stride] = to_float16(from[c] * factor);
  }
}

template <class Element> struct Operand {
  const Element* data;
  int64_t stride;
};

template <class Element> NOMAX_INLINE int64_t elements(int64_t numbers) {
  return (numbers + Element::each - 1) / Element::each;
}

// Rows [first, first + count) as the left operand. The buffer holds count · elements(dim).
static Operand<Float> left(const Source& from, int64_t first, int64_t count, int64_t dim, Float* buffer) {
  if (from.type == Type::float32 && from.column == 1 && !from.index)
    return {static_cast<const Float*>(from.data) + first * from.row, from.row};
  for (int64_t r = 0; r < count; r++)
    read_row(from.data, from.type, from.place(first + r), from.column, dim, &buffer[r * dim].x);
  return {buffer, dim};
}

[[maybe_unused]] static Operand<Pair> left(const Source& from, int64_t first, int64_t count, int64_t dim, Pair* buffer) {
  const int64_t stride = elements<Pair>(dim);
  const uint16_t* data = static_cast<const uint16_t*>(from.data);
  if (from.column == 1 && !from.index && dim % 2 == 0 && from.row % 2 == 0 && reinterpret_cast<uintptr_t>(data) % 4 == 0)
    return {reinterpret_cast<const Pair*>(data + first * from.row), from.row / 2};
  for (int64_t r = 0; r < count; r++) {
    const uint16_t* row = data + from.place(first + r);
    uint16_t* to = reinterpret_cast<uint16_t*>(buffer + r * stride);
    if (from.column == 1)
      memcpy(to, row, size_t(dim) * 2);
    else
      for (int64_t c = 0; c < dim; c++) to[c] = row[c * from.column];
    if (dim % 2) to[dim] = 0;
  }
  return {buffer, stride};
}

// Rows [first, first + count) as the right operand. The buffer holds elements(count) · round_up(dim, W).
static Operand<Float> right(const Source& from, int64_t first, int64_t count, int64_t dim, Float* buffer) {
  if (from.type == Type::float32 && from.column == 1 && !from.index && dim % W == 0)
    return {static_cast<const Float*>(from.data) + first * from.row, from.row};
  const int64_t stride = round_up(dim, W);
  for (int64_t r = 0; r < count; r++) {
    float* to = &buffer[r * stride].x;
    read_row(from.data, from.type, from.place(first + r), from.column, dim, to);
    for (int64_t c = dim; c < stride; c++) to[c] = 0;
  }
  return {buffer, stride};
}

[[maybe_unused]] static Operand<Pair> right(const Source& from, int64_t first, int64_t count, int64_t dim, Pair* buffer) {
  const int64_t stride = round_up(dim, W);
  const uint16_t* data = static_cast<const uint16_t*>(from.data);
  for (int64_t r = 0; r < count; r += 2) {
    const uint16_t* low = data + from.place(first + r);
    const uint16_t* high = r + 1 < count ? data + from.place(first + r + 1) : nullptr;
    Pair* to = buffer + r / 2 * stride;
    int64_t c = 0;
    if (from.column == 1 && high)
      for (; c + W <= dim; c += W) {
        store(reinterpret_cast<float*>(to + c), (Vec)(load_16_bits(low + c) | load_16_bits(high + c) << 16));
      }
    for (; c < dim; c++)
      to[c].x = low[c * from.column] | (high ? uint32_t(high[c * from.column]) << 16 : 0);
    for (; c < stride; c++) to[c].x = 0;
  }
  return {buffer, stride};
}

// The sum of `count` floats (a multiple of W) times zero: not zero if there is a NaN or an infinity among them.
NOMAX_INLINE Vec zeros_of(const float* data, int64_t count) {
  Vec even{}, odd{};
  int64_t i = 0;
  for (; i + 2 * W <= count; i += 2 * W) {
    even += load(data + i) * 0.0f;
    odd += load(data + i + W) * 0.0f;
  }
  if (i < count) even += load(data + i) * 0.0f;
  return even + odd;
}

// The number in row t and column c of a right operand.
NOMAX_INLINE float entry(const Operand<Float>& b, int64_t t, int64_t c) { return b.data[t * b.stride + c].x; }
NOMAX_INLINE float entry(const Operand<Pair>& b, int64_t t, int64_t c) {
  const uint32_t pair = b.data[t / 2 * b.stride + c].x;
  return from_bfloat16(uint16_t(t % 2 ? pair >> 16 : pair));
}

NOMAX_INLINE bool is_finite(float x) { return x - x == 0; }
NOMAX_INLINE Float finite_part(Float x) { return {is_finite(x.x) ? x.x : 0.0f}; }
NOMAX_INLINE Pair finite_part(Pair x) {
  const uint32_t low = x.x & 0xffffu, high = x.x & 0xffff0000u, exponent = 0x7f807f80u;
  return {(~low & exponent & 0xffffu ? low : 0) | (~high & exponent & 0xffff0000u ? high : 0)};
}

// C += A·B where row r of C must not meet row t of B unless sees(r, t). A is zero there, but 0 · NaN is NaN: so the
// product takes zeros for what is not finite, and that is added afterwards, one by one, to those who see it. All other
// numbers come out to the bit as from add_product. `weight(r, t)` is A as a float; `clean` has room for a copy of B.
template <bool Transposed, class Element, class Weight, class Sees>
static __attribute__((noinline)) void add_seen_product(int64_t rows, int64_t columns, const Element* a,
                                                       int64_t a_stride, const Operand<Element>& b, int64_t terms,
                                                       Element* clean, float* c, int64_t c_stride,
                                                       const Weight& weight, const Sees& sees) {
  const int64_t steps = elements<Element>(terms);
  for (int64_t t = 0; t < steps; t++)
    for (int64_t n = 0; n < columns; n++) clean[t * columns + n] = finite_part(b.data[t * b.stride + n]);
  add_product<Transposed>(rows, columns, a, a_stride, clean, columns, steps, c, c_stride);
  for (int64_t t = 0; t < terms; t++)
    for (int64_t n = 0; n < columns; n++) {
      const float x = entry(b, t, n);
      if (is_finite(x)) continue;
      for (int64_t r = 0; r < rows; r++)
        if (sees(r, t)) c[r * c_stride + n] += weight(r, t) * x;
    }
}

// A W x W block in registers: rows become columns by swapping ever larger halves. Of two rows, the first takes the
// second's lower elements, and the second the first's upper ones.
#if defined(__clang__)
template <class T, T... E> struct Lanes {
  template <int Half> NOMAX_INLINE Vec first(Vec a, Vec b) {
    return __builtin_shufflevector(a, b, (E & Half ? E - Half + W : E)...);
  }
  template <int Half> NOMAX_INLINE Vec second(Vec a, Vec b) {
    return __builtin_shufflevector(a, b, (E & Half ? E + W : E + Half)...);
  }
};
template <int Half> NOMAX_INLINE void swap_halves_of(Vec& a, Vec& b) {
  using Every = __make_integer_seq<Lanes, int, W>;
  const Vec first = Every::template first<Half>(a, b);
  b = Every::template second<Half>(a, b);
  a = first;
}
#else
template <int Half> NOMAX_INLINE void swap_halves_of(Vec& a, Vec& b) {
  Int low, high;
  for (int e = 0; e < W; e++) {
    low[e] = e & Half ? e - Half + W : e;
    high[e] = e & Half ? e + W : e + Half;
  }
  const Vec first = __builtin_shuffle(a, b, low);
  b = __builtin_shuffle(a, b, high);
  a = first;
}
#endif

template <int Half> NOMAX_INLINE void swap_halves(Vec (&x)[W]) {
#pragma GCC unroll 16
  for (int r = 0; r < W; r++)
    if (!(r & Half)) swap_halves_of<Half>(x[r], x[r + Half]);
  if constexpr (Half > 1) swap_halves<Half / 2>(x);
}

NOMAX_INLINE void transpose_block(Vec (&x)[W]) { swap_halves<W / 2>(x); }

// Left operand rows as panels; the last one's missing rows are zero up to a whole vector.
// The buffer holds round_up(count, PANEL) · steps.
template <class Element>
static void transposed(const Operand<Element>& rows, int64_t count, int64_t steps, Element* panels) {
  for (int64_t first = 0; first < count; first += W) {
    const float* from = reinterpret_cast<const float*>(rows.data + first * rows.stride);
    float* to = reinterpret_cast<float*>(panels + first / PANEL * PANEL * steps + first % PANEL);
    const int64_t present = least(W, count - first);
    int64_t t = 0;
    for (; t + W <= steps; t += W) {
      Vec block[W];
#pragma GCC unroll 16
      for (int r = 0; r < W; r++) block[r] = r < present ? load(from + r * rows.stride + t) : Vec{};
      transpose_block(block);
#pragma GCC unroll 16
      for (int e = 0; e < W; e++) store(to + (t + e) * PANEL, block[e]);
    }
    for (; t < steps; t++)
      for (int r = 0; r < W; r++) to[t * PANEL + r] = r < present ? from[r * rows.stride + t] : 0.0f;
  }
}

}  // namespace NOMAX_ISA
}  // namespace nomax
