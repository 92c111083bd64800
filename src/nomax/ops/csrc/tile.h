// The one product that everything is made of, and the layouts that it reads.
//
//   C[r][n] = Σ_t A(r, t) · B[t][n]        r < R rows, n < N vectors, t < steps
//
// A is broadcast one element at a time, B is read in whole vectors, C stays in registers. An element is four bytes: a
// float, or two neighbouring bfloat16 of the summed dimension (then steps counts pairs and one instruction does both).
// For each output number the order of the sum is the order of t, whatever R, N and the position in the batch: this is
// why a row's result does not depend on its company. Sums over a head's dimensions are cut into chunks that are added up
// afterwards, to keep their rounding error small.
#pragma once
#include "problem.h"
#include "vector.h"

namespace nomax {
namespace NOMAX_ISA {

NOMAX_INLINE constexpr int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
NOMAX_INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
NOMAX_INLINE int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// The size of the pieces if `total` is cut into as few as possible of at most `most_each`, nearly equal, multiples of `unit`.
NOMAX_INLINE int64_t even_piece(int64_t total, int64_t most_each, int64_t unit) {
  const int64_t pieces = most(1, (total + most_each - 1) / most_each);
  return most(unit, round_up((total + pieces - 1) / pieces, unit));
}

struct Float {
  static constexpr int each = 1;        // how many numbers of the summed dimension one element holds
  float x;
};

struct Pair {
  static constexpr int each = 2;
  uint32_t x;
};

NOMAX_INLINE void multiply_add(Vec& sum, Float a, Vec b) { sum += all(a.x) * b; }

// Pairs of bfloat16 in every lane: both products of a pair are added to its lane.
NOMAX_INLINE void multiply_pairs(Vec& sum, Vec a, Vec b) {
#if defined(__AVX512BF16__)
  sum = (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  sum = (Vec)vbfdotq_f32((float32x4_t)sum, vreinterpretq_bf16_f32((float32x4_t)a), vreinterpretq_bf16_f32((float32x4_t)b));
#else
  sum += (Vec)((Bits)a & 0xffff0000u) * (Vec)((Bits)b & 0xffff0000u);
  sum += (Vec)((Bits)a << 16) * (Vec)((Bits)b << 16);
#endif
}

NOMAX_INLINE void multiply_add(Vec& sum, Pair a, Vec b) { multiply_pairs(sum, (Vec)(Bits{} + a.x), b); }

template <class Element> NOMAX_INLINE void multiply_add(Vec& sum, Element a, const Element* b) {
  multiply_add(sum, a, load(reinterpret_cast<const float*>(b)));
}

constexpr int64_t CHUNK = 64;           // a power of x multiplies the error of x: then half of that, see chunk_of

// What becomes of the sums of a tile, row by row or two rows at once.
struct Put {                            // c = sums
  static constexpr bool chunked = true, by_two = false;
  float* c; int64_t stride, chunk;
  void next_panel() { c += PANEL; }
  NOMAX_INLINE void one(const Put& to, int r, int n, Vec x) { store(to.c + r * to.stride + n * W, x); }
};

struct Add {                            // c += sums
  static constexpr bool chunked = false, by_two = false;
  float* c; int64_t stride;
  void next_panel() { c += PANEL; }
  NOMAX_INLINE void one(const Add& to, int r, int n, Vec x) {
    float* place = to.c + r * to.stride + n * W;
    store(place, load(place) + x);
  }
};

NOMAX_INLINE void put_weights(Float* row, int64_t column, Vec x) { store(&row[column].x, x); }
NOMAX_INLINE void put_weights(Pair* row, int64_t column, Vec x) {
  store_bfloat16(reinterpret_cast<uint16_t*>(row) + column, x);
}

NOMAX_INLINE float weight_at(const Float* row, int64_t column) { return row[column].x; }
NOMAX_INLINE float weight_at(const Pair* row, int64_t column) {
  return from_bfloat16(reinterpret_cast<const uint16_t*>(row)[column]);
}

template <class Element> struct PutRelu {      // c = relu(sums), ready to be the A of the next product
  static constexpr bool chunked = true, by_two = false;
  static constexpr int64_t chunk = CHUNK;
  Element* c; int64_t stride;
  void next_panel() { c += PANEL / Element::each; }
  NOMAX_INLINE void one(const PutRelu& to, int r, int n, Vec x) {
    put_weights(to.c + r * to.stride, n * W, at_least(0, x));
  }
};

NOMAX_INLINE int64_t chunk_of(Activation h) {
  return h == Activation::relu2 || h == Activation::cube ? CHUNK / 2 : CHUNK;
}

// A is [rows][stride], or [steps][stride] when Transposed.
template <int R, int N, bool Transposed, class Element, class Finish>
static inline __attribute__((always_inline)) void tile(const Element* a, int64_t a_stride, const Element* b,
                                                       int64_t b_stride, int64_t steps, const Finish& finish) {
  Vec sum[R][N] = {};
  auto add_up = [&](int64_t from, int64_t to) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int64_t t = from; t < to; t++, b += b_stride) {
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const Element x = Transposed ? a[t * a_stride + r] : a[r * a_stride + t];
#pragma GCC unroll 16
        for (int n = 0; n < N; n++) multiply_add(sum[r][n], x, b + n * W);
      }
    }
  };
  if constexpr (Finish::chunked && Element::each == 1) {      // bfloat16 terms are rounder than any sum of them
    // In memory, and said to be there: the compiler would rather keep these in registers and the sums in memory.
    alignas(64) float earlier[R * N * W];
    asm volatile("" : "=m"(earlier));
    int64_t done = 0;
    for (int64_t end; add_up(done, end = least(done + finish.chunk, steps)), end < steps; done = end) {
#pragma GCC unroll 32
      for (int i = 0; i < R * N; i++) {
        Vec& x = sum[i / N][i % N];
        store(earlier + i * W, done ? load(earlier + i * W) + x : x);
        x = Vec{};
      }
      asm volatile("" : "+m"(earlier));
    }
    if (done)
#pragma GCC unroll 32
      for (int i = 0; i < R * N; i++) sum[i / N][i % N] += load(earlier + i * W);
  } else {
    add_up(0, steps);
  }
  if constexpr (Finish::by_two) {
#pragma GCC unroll 8
    for (int r = 0; r < R; r += 2)
#pragma GCC unroll 16
      for (int n = 0; n < N; n++) Finish::two(finish, r, n, sum[r][n], r + 1 < R ? sum[r + 1][n] : Vec{}, r + 1 < R);
  } else {
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
      for (int n = 0; n < N; n++) Finish::one(finish, r, n, sum[r][n]);
  }
}

// A strip of R rows and any number of columns (a multiple of W), tile after tile; the next tile's B lies b_panel on.
template <int R, bool Transposed, class Element, class Finish>
static void strip_of(int64_t columns, const Element* a, int64_t a_stride, const Element* b, int64_t b_stride,
                     int64_t b_panel, int64_t steps, Finish finish) {
  if constexpr (R <= 2 && !Finish::chunked) {      // few rows leave registers for more columns, which lie side by side
    constexpr int FEW = 4 / R;
    for (; columns >= FEW * PANEL; columns -= FEW * PANEL, b += FEW * PANEL, finish.c += FEW * PANEL)
      tile<R, FEW * WIDE, Transposed>(a, a_stride, b, b_stride, steps, finish);
  }
  for (; columns >= PANEL; columns -= PANEL, b += b_panel, finish.next_panel())
    tile<R, WIDE, Transposed>(a, a_stride, b, b_stride, steps, finish);
  switch (columns / W) {
    case 1: return tile<R, 1, Transposed>(a, a_stride, b, b_stride, steps, finish);
    case 2: if constexpr (WIDE == 4) return tile<R, 2, Transposed>(a, a_stride, b, b_stride, steps, finish); break;
    case 3: if constexpr (WIDE == 4) return tile<R, 3, Transposed>(a, a_stride, b, b_stride, steps, finish);
  }
}

template <bool Transposed, class Element, class Finish>
NOMAX_INLINE void strip(int64_t rows, int64_t columns, const Element* a, int64_t a_stride, const Element* b,
                        int64_t b_stride, int64_t b_panel, int64_t steps, const Finish& finish) {
  switch (rows) {
    case 1: return strip_of<1, Transposed>(columns, a, a_stride, b, b_stride, b_panel, steps, finish);
    case 2: return strip_of<2, Transposed>(columns, a, a_stride, b, b_stride, b_panel, steps, finish);
    case 3: return strip_of<3, Transposed>(columns, a, a_stride, b, b_stride, b_panel, steps, finish);
    case 4: return strip_of<4, Transposed>(columns, a, a_stride, b, b_stride, b_panel, steps, finish);
    case 5: return strip_of<5, Transposed>(columns, a, a_stride, b, b_stride, b_panel, steps, finish);
    case 6: return strip_of<6, Transposed>(columns, a, a_stride, b, b_stride, b_panel, steps, finish);
  }
}

// Rows go through the tiles in groups of nearly equal size, since a group of one or two cannot fill the pipelines:
// the i-th of the groups of `rows` begins at row group_start(rows, i), a multiple of `unit`.
NOMAX_INLINE int64_t groups(int64_t rows) { return (rows + ROWS - 1) / ROWS; }
NOMAX_INLINE int64_t group_start(int64_t rows, int64_t i, int64_t unit = 1) {
  const int64_t units = (rows + unit - 1) / unit, count = groups(rows), size = units / count, larger = units % count;
  return least(rows, unit * (i * size + least(i, larger)));
}

// C[rows][columns] += A·B for any number of rows and columns (a multiple of W).
template <bool Transposed, class Element>
static void add_product(int64_t rows, int64_t columns, const Element* a, int64_t a_stride, const Element* b,
                        int64_t b_stride, int64_t steps, float* c, int64_t c_stride) {
  for (int64_t i = 0; i < groups(rows); i++) {
    const int64_t r = group_start(rows, i), count = group_start(rows, i + 1) - r;
    strip<Transposed>(count, columns, a + (Transposed ? r : r * a_stride), a_stride, b, b_stride, int64_t(PANEL), steps,
                      Add{c + r * c_stride, c_stride});
  }
}

// C[rows][keys] = A·B for at most ROWS rows, where B is in panels (see `transposed`).
template <class Element, class Finish>
NOMAX_INLINE void panel_products(int rows, int64_t keys, const Element* a, int64_t a_stride, const Element* panels,
                                 int64_t steps, const Finish& finish) {
  strip<false>(rows, round_up(keys, W), a, a_stride, panels, int64_t(PANEL), PANEL * steps, steps, finish);
}

}  // namespace NOMAX_ISA
}  // namespace nomax
