// One call of the operation as plain numbers and pointers: what the binding fills in and every kernel reads.
// No torch header and no C++ library code here, so that a kernel can be compiled for any instruction set alone.
#pragma once
#include <cstdint>

namespace nomax {

enum class Type : int32_t { float32, bfloat16, float16, boolean };
enum class Activation : int32_t { relu, relu2, gelu, softplus, identity, relu6, sigmoid, silu, cube };

// A tensor seen as [batch, head, row, column]; strides count elements, and a broadcast dimension has stride 0.
struct View {
  void* data = nullptr;
  Type type = Type::float32;
  int64_t batch = 0, head = 0, row = 0, column = 0;
};

struct Problem {
  int64_t batch, heads, key_heads, queries, keys, dim, value_dim;  // queries, keys: totals when sequences are packed
  const int64_t* query_offsets = nullptr;  // packed sequences: sequence b is rows [offsets[b], offsets[b + 1])
  const int64_t* key_offsets = nullptr;

  Activation activation = Activation::relu;
  float scale = 1, gain = 1, shift = 0;
  bool causal = false;
  int64_t diagonal = 0;                    // if causal: query i sees key j when j <= i + diagonal
  double dropout = 0;                      // double, so that the coin falls as in every other backend
  uint64_t seed = 0;
  int64_t first_batch = 0, first_query = 0, first_key = 0;      // where a part begins in the whole, whose coins it has

  View query, key, value, mask, row_gain, row_shift;          // inputs
  View out;                                                   // forward
  float* row_sum = nullptr;                                   // [batch, heads, queries], or null
  float* row_log = nullptr;
  View grad_out;                                              // backward
  const float* grad_row_sum = nullptr;
  const float* grad_row_log = nullptr;
  View grad_query, grad_key, grad_value;
  float* grad_bias = nullptr;                                 // contiguous, in the mask's own (un-expanded) shape
  int64_t bias_shape[4] = {0, 0, 0, 0};
  int64_t shares = 1;                                         // in how many tasks the keys of one head are cut
  int64_t first_row = 0, rows = int64_t(1) << 31;             // of every head: those that a backward task walks over
};

// Numbers of bytes: a product, and a sum rounded up to cache lines, that stay at TOO_MANY_BYTES instead of wrapping.
constexpr int64_t TOO_MANY_BYTES = int64_t(1) << 62;
static inline int64_t product(int64_t a, int64_t b) {
  int64_t c;
  return __builtin_mul_overflow(a, b, &c) || c > TOO_MANY_BYTES ? TOO_MANY_BYTES : c;
}
static inline int64_t added(int64_t used, int64_t bytes) {
  const int64_t sum = used + bytes;      // of two numbers up to 2^62: it holds
  return sum > TOO_MANY_BYTES - 128 ? TOO_MANY_BYTES : (sum + 63) / 64 * 64;
}

constexpr int64_t ROW_BLOCK = 512;     // the most rows that a forward task takes
constexpr int64_t BIAS_BLOCK = 60;     // rows, or keys, of a task of the bias gradient

// A piece of work that one thread does alone. Its result never depends on how many threads there are.
struct Task {
  int64_t sequence, head;      // head: of the keys (forward, backward), or of the bias (bias gradient)
  int64_t first, count;        // rows of the group's queries (forward), or keys (backward)
  float* partial;              // backward: where this task sums its share of the query gradient
  float* waiting = nullptr;    // backward: where dK and dV wait for the next rows, if the results are too coarse for that
};

constexpr int64_t GELU_SUMS = 4;       // sums of columns that rows take turns with: short sums are exact

// Rows of numbers, all one like the other. Without a gradient the values are wanted, else the gradient.
struct Elements {
  const void *x, *grad;
  void* out;                   // may be x itself
  Type type;
  int64_t width;               // of a row
  const float* bias;           // a row that is added to every row of x, or null
  bool tanh;
};

// Dropout of contiguous rows: onto + x/(1 - share) where the coin says keep.
struct Thinning {
  const void *x, *onto;        // onto: null for none
  Type type, onto_type, out_type;
  void* out;
  int64_t width;               // of a row
  double share;
  uint64_t seed;
};

// LayerNorm of rows [outer, inner, width], whose numbers lie next to each other; results are dense.
constexpr int64_t MOST_NORMED = 4096;      // the widest row
struct Norm {
  const void* x;
  Type type;
  int64_t inner, width, outer_stride, inner_stride;
  const float *weight, *bias;      // filled up to whole vectors; without a bias null
  float eps;
  float* statistics;               // mean and 1/deviation of each row
  void* out;                       // the values, or the gradient of x
  const void* grad;                // backward
  int64_t grad_outer_stride, grad_inner_stride;
  Type result;                     // the type of the values and of their gradient
  const void* added = nullptr;     // dense rows to add to x first; the sum takes the place of x, which is `sum`
  Type added_type = Type::float32;
  const float* added_bias = nullptr;
  void* sum = nullptr;
};

// The cross-entropy of contiguous rows of logits.
struct CrossEntropy {
  const void* logits;
  Type type;
  int64_t classes;
  const int64_t* labels;
  float smoothing;
  float* whole;                        // log Σ exp of each row
  float *loss, *nll, *right;           // forward: with smoothing, without, and 1 where the label has the largest logit
  const float* grad;                   // backward: of each row's loss
  void* out;
};

// A few tokens in a memory of slots; all rows are contiguous and `dim` wide.
constexpr int64_t MOST_TOKENS = 6;
struct LookUp {
  const void *x, *gates, *keys, *values;      // [tokens], and [slots] each; gates: or null, and then h is of the keys
  Type type;                   // float32 or bfloat16
  int64_t tokens, dim;
  Activation activation;
  float shift;
};

// The entry points of one instruction set.
struct Kernel {
  const char* name;
  int64_t (*width)(int64_t columns);      // rounded up to whole vectors: the row stride of every partial sum
  int64_t (*forward_bytes)(const Problem&);
  void (*forward)(const Problem&, const Task&, void* workspace);
  int64_t (*backward_bytes)(const Problem&);
  bool (*backward)(const Problem&, const Task&, void* workspace, bool careful);      // false: again, and carefully
  void (*reduce)(const Problem&, const Task&);                      // adds the shares of a query gradient, in order
  int64_t (*bias_bytes)(const Problem&);
  void (*bias)(const Problem&, const Task&, void* workspace);
  int64_t (*linear_bytes)(const Problem&);
  void (*linear_keys)(const Problem&, const Task&, void* workspace);
  void (*linear_queries)(const Problem&, const Task&, void* workspace);
  void (*norm_forward)(const Norm&, const Task&);
  void (*norm_backward)(const Norm&, const Task&);
  void (*entropy_forward)(const CrossEntropy&, const Task&);
  void (*entropy_backward)(const CrossEntropy&, const Task&);
  void (*gelu)(const Elements&, const Task&);      // of some rows; adds the gradient's to task.partial, if there
  void (*dropout)(const Thinning&, const Task&);
  int64_t (*look_up_bytes)(const LookUp&);
  void (*look_up)(const LookUp&, const Task&, void* workspace);
};

extern const Kernel kernel_portable, kernel_avx2, kernel_avx512, kernel_avx512_bf16, kernel_neon_bf16;

}  // namespace nomax
