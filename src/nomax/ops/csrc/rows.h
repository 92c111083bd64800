// What each query row knows before the keys come: how far it sees, its shift and factor, its mask, its coins; and which
// keys are worth visiting at all.
#pragma once
#include "layout.h"

namespace nomax {
namespace NOMAX_ISA {

constexpr float HIDDEN = -__builtin_inff();      // the bias of a key that may not be seen

struct Row {
  int64_t head, query, position;       // query: row of the tensor; position: row within its sequence
  int64_t limit;                       // sees keys before this one
  float shift, gain;
  uint32_t coin, second_coin;
};

// Asks for the rows of a result, so that writing them later need not wait for memory.
NOMAX_INLINE void expect_rows(const View& to, int64_t batch, int64_t head, int64_t first, int64_t count, int64_t dim) {
  if (to.column != 1) return;
  const int64_t bytes = dim * type_size(to.type);
  for (int64_t r = first; r < first + count; r++) {
    const char* row = static_cast<const char*>(at(to, batch, head, r));
    for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(row + byte, 1);
  }
}

struct Sequence {
  int64_t batch, index;                // of the tensors; of the sequence (they differ when sequences are packed)
  int64_t query, queries, key, keys;   // first row and number of rows
};

NOMAX_INLINE Sequence sequence(const Problem& p, int64_t index) {
  if (!p.query_offsets) return {index, index, 0, p.queries, 0, p.keys};
  int64_t q = p.query_offsets[index], k = p.key_offsets[index];
  return {0, index, q, p.query_offsets[index + 1] - q, k, p.key_offsets[index + 1] - k};
}

NOMAX_INLINE uint32_t mix(uint32_t x) {
  x ^= x >> 16; x *= 0x7feb352du; x ^= x >> 15; x *= 0x846ca68bu; x ^= x >> 16;
  return x;
}

NOMAX_INLINE Bits mix(Bits x) {
  x ^= x >> 16; x *= 0x7feb352du; x ^= x >> 15; x *= 0x846ca68bu; x ^= x >> 16;
  return x;
}

NOMAX_INLINE Row row(const Problem& p, const Sequence& s, int64_t head, int64_t position) {
  Row r;
  r.head = head;
  r.position = position;
  r.query = s.query + position;
  r.limit = p.causal ? most(0, least(s.keys, position + p.diagonal + 1)) : s.keys;
  r.gain = p.row_gain.data ? *static_cast<float*>(at(p.row_gain, s.batch, head, r.query)) : p.gain;
  r.shift = p.row_shift.data ? *static_cast<float*>(at(p.row_shift, s.batch, head, r.query)) : p.shift;
  r.coin = r.second_coin = 0;
  if (p.dropout > 0) {
    r.coin = mix(mix(mix(uint32_t(p.seed)) ^ uint32_t(p.seed >> 32)) ^
                 uint32_t((p.first_batch + s.index) * p.heads + head));
    r.coin = mix(r.coin ^ uint32_t(p.first_query + position));
    r.second_coin = mix(r.coin ^ 0x9e3779b9u);
  }
  return r;
}

struct Dropout {
  uint32_t threshold;
  float factor;

  explicit Dropout(double share) {
    double bound = __builtin_rint(share * 4294967296.0);
    threshold = bound >= 4294967295.0 ? 0xffffffffu : uint32_t(bound);
    factor = share < 1 ? float(1 / (1 - share)) : 0;
  }

  NOMAX_INLINE Int kept(const Dropout& d, const Row& r, Int key) {
    return mix(mix((Bits)key ^ r.coin) + r.second_coin) >= d.threshold;
  }

  // x/(1-p) where the coin says keep, and 0 elsewhere: also for a NaN.
  NOMAX_INLINE Vec thin(const Dropout& d, Int kept, Vec x) { return where(kept, x * d.factor); }
};

// Numbers up to this one hide their key: false, or what is as low as its type can say.
NOMAX_INLINE float hidden_up_to(Type type) {
  switch (type) {
    case Type::boolean: return 0;
    case Type::float32: return -3.40282347e38f;
    case Type::bfloat16: return -3.38953139e38f;
    case Type::float16: return -65504.0f;
  }
  return HIDDEN;
}

// The mask of one row as numbers to add to the scores, HIDDEN where there is nothing to see. True if anything is visible.
static bool read_bias(const View& mask, const void* data, int64_t first, int64_t count, float* bias) {
  read_row(data, mask.type, first * mask.column, mask.column, count, bias);
  const float bound = hidden_up_to(mask.type);
  const bool adds = mask.type != Type::boolean;
  Int seen{};
  int64_t j = 0;
  for (; j + W <= count; j += W) {
    const Vec x = load(bias + j);
    const Int hidden = x <= bound;
    store(bias + j, choose(hidden, all(HIDDEN), adds ? x : Vec{}));
    seen |= ~hidden;
  }
  bool visible = false;
  for (int i = 0; i < W; i++) visible |= seen[i] != 0;
  for (; j < count; j++) {
    const bool hidden = bias[j] <= bound;
    bias[j] = hidden ? HIDDEN : adds ? bias[j] : 0.0f;
    visible |= !hidden;
  }
  return visible;
}

// The keys that a whole head of queries sees. Where the mask is the same for every query (padding), only the visible keys
// are kept, so hidden ones cost nothing and the result is that of the shorter sequence, to the bit.
struct Keys {
  int64_t count;
  const int32_t* index;       // null: keys 0 .. count-1
  const float* bias;          // of the kept keys, or null
  bool mask_by_row;           // the mask differs between queries: it is read tile by tile
  int64_t first_key;          // of the whole, if this is a part

  static int64_t bytes(const Problem& p) { return round_up(p.keys * 4, 64) + round_up((p.keys + PANEL) * 4, 64); }

  Keys(const Problem& p, const Sequence& s, int64_t head, int64_t group, char* memory)
      : count(s.keys), index(nullptr), bias(nullptr), mask_by_row(false), first_key(p.first_key) {
    if (!p.mask.data) return;
    mask_by_row = p.mask.row != 0 || (group > 1 && p.mask.head != 0);
    if (mask_by_row) return;
    int32_t* kept = reinterpret_cast<int32_t*>(memory);
    float* values = reinterpret_cast<float*>(memory + round_up(p.keys * 4, 64));
    read_bias(p.mask, at(p.mask, s.batch, head, 0), 0, s.keys, values);
    bool plain = true;
    count = 0;
    for (int64_t j = 0; j < s.keys; j++) {
      const float value = values[j];
      plain &= value == 0 || value == HIDDEN;
      values[count] = value;      // the next one takes its place if it is hidden
      kept[count] = int32_t(j);
      count += value != HIDDEN;
    }
    if (count < s.keys) index = kept;
    if (!plain) bias = values;
  }

  int64_t place(int64_t kept) const { return index ? index[kept] : kept; }

  // How many kept keys stand before a place.
  int64_t first_at(int64_t place) const {
    if (!index) return least(place, count);
    int64_t kept = 0;
    while (kept < count && index[kept] < place) kept++;
    return kept;
  }

  // The places in the whole sequence of the kept keys first, first + 1, ...: what the coins are thrown for.
  Int original(int64_t first) const {
    Int places = counting() + int32_t(first_key + first);
    if (index)
      for (int i = 0; i < W; i++) places[i] = first + i < count ? int32_t(first_key + index[first + i]) : 0;
    return places;
  }
};

}  // namespace NOMAX_ISA
}  // namespace nomax
