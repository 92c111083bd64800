// What the driver tests, the inputs as numbers, and the operation as naive loops in double precision.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "../../../src/nomax/ops/csrc/problem.h"

#define JOIN(a, b) a##b
#define KERNEL_NAME(isa) JOIN(kernel_, isa)


namespace {

using namespace nomax;
using Shape = std::array<int64_t, 4>;      // batch, head, row, column
using enum Activation;

const Kernel& kernel = KERNEL_NAME(NOMAX_ISA);
const bool paired = std::strstr(kernel.name, "_bf16");      // it multiplies bfloat16 two by two
constexpr double FLOAT_SLACK = 0x1p-19;      // 32 roundings: some in an activation, some in a sum of hundreds of terms
constexpr uint64_t SEED = 0x123456789abcdef0;

// ---- what is tested -------------------------------------------------------------------------------------------------
enum class Layout { contiguous, heads_last, interleaved, columns_apart, shifted, expanded };

struct Case {
  std::string name;
  Activation activation = relu;
  int64_t batch = 1, heads = 2, key_heads = 2, queries = 50, keys = 97, dim = 16, value_dim = 16;
  Layout layout = Layout::contiguous;
  std::string mask = {};                   // the dimensions of "bhqk" that it has, or "one" number for all; empty: none
  Type mask_type = Type::boolean;
  std::optional<int64_t> diagonal = {};
  std::vector<int64_t> query_offsets = {}, key_offsets = {};
  float dropout = 0, shift = 0;
  bool statistics = false, row_tensors = false, expanded_grad = false;
  bool strange = false;                    // some values and gradients are NaN, which must reach only who sees them
  int64_t shares = 1;

  bool packed() const { return !query_offsets.empty(); }
  bool linear() const {
    return activation == identity && mask.empty() && !diagonal && !packed() && !dropout && !shift && !row_tensors;
  }
};

const Activation activations[] = {relu, relu2, gelu, softplus, identity, relu6, sigmoid, silu, cube};
const Layout layouts[] = {Layout::contiguous, Layout::heads_last, Layout::interleaved, Layout::columns_apart,
                          Layout::shifted};
const Type types[] = {Type::float32, Type::bfloat16, Type::float16, Type::boolean};
const char* const type_names[] = {"float32", "bfloat16", "float16"};
const char* const masks[] = {"bk", "bhqk", "hqk", "bqk", "k", "hk", "bhk", "bq", "one"};

// Only weights that are never negative have an entropy.
bool never_negative(Activation h) { return h == relu || h == relu2 || h == softplus || h == relu6 || h == sigmoid; }

struct Random {
  uint64_t state;

  int64_t below(int64_t bound) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return int64_t((state >> 33) % uint64_t(bound));
  }
  double eighths() { return double(below(17) - 8) / 8; }
  template <class List> auto one_of(const List& list) { return list[below(int64_t(std::size(list)))]; }
};

// Features meet in ways that nobody would list by hand.
Case random_case(uint64_t seed) {
  const int64_t sizes[] = {1, 5, 12, 33, 50, 97, 129}, dims[] = {1, 7, 8, 16, 24, 33, 48}, groups[] = {1, 1, 2, 3};
  Random random{seed};
  Case c{"random " + std::to_string(seed), random.one_of(activations)};
  c.batch = 1 + random.below(2), c.key_heads = 1 + random.below(2), c.heads = c.key_heads * random.one_of(groups);
  c.queries = random.one_of(sizes), c.keys = random.one_of(sizes);
  c.dim = random.one_of(dims), c.value_dim = random.one_of(dims), c.layout = random.one_of(layouts);
  c.dropout = random.below(2) ? 0.25f : 0, c.shift = float(random.below(2) * random.eighths());
  c.statistics = random.below(2) && never_negative(c.activation), c.row_tensors = random.below(2);
  c.shares = 1 + random.below(2);
  const int64_t kind = random.below(4);
  if (kind == 0) c.mask = random.one_of(masks), c.mask_type = random.one_of(types);
  if (kind == 1) c.diagonal = c.keys - c.queries + random.below(9) - 4;
  if (kind == 2) {
    c.batch = 1, c.query_offsets = c.key_offsets = {0};
    for (auto* offsets : {&c.query_offsets, &c.key_offsets})
      for (int i = 0; i < 3; i++) offsets->push_back(offsets->back() + random.below(2) * random.one_of(sizes));
    c.queries = c.query_offsets.back(), c.keys = c.key_offsets.back();
    if (random.below(2)) c.diagonal = random.below(9) - 4;
  }
  return c;
}

std::vector<Case> all_cases() {
  std::vector<Case> list;
  for (Activation h : activations) list.push_back({.name = "activation", .activation = h, .shift = 0.125f});

  const int64_t lengths[][2] = {{1, 1}, {1, 7}, {7, 1}, {50, 129}, {97, 50}, {129, 197}, {197, 97}, {1, 197}};
  const int64_t dims[][2] = {{1, 8}, {8, 1}, {16, 48}, {59, 111}, {64, 64}, {80, 59}, {111, 80}, {128, 16}};
  for (size_t i = 0; i < 8; i++)
    for (size_t j : {i, (i + 3) % 8})
      list.push_back({.name = "sizes", .activation = i % 2 ? gelu : relu, .heads = 1, .key_heads = 1,
                      .queries = lengths[i][0], .keys = lengths[i][1], .dim = dims[j][0], .value_dim = dims[j][1]});
  list.push_back({.name = "many keys", .queries = 60, .keys = 401, .dim = 8, .value_dim = 64, .shares = 3});
  list.push_back({.name = "many rows", .heads = 4, .key_heads = 1, .queries = 151, .keys = 20, .dim = 8, .shares = 2});

  for (size_t i = 0; i < std::size(masks); i++)
    for (int64_t group : {1, 2})
      for (Type type : {Type::boolean, types[(i + size_t(group)) % 3]})
        list.push_back({.name = masks[i], .activation = sigmoid, .batch = 2, .heads = 2 * group, .queries = 55,
                        .keys = 130, .dim = 8, .value_dim = 9, .mask = masks[i], .mask_type = type, .shares = group});

  for (int64_t diagonal : {0, 5, -5, 32, -60, 300, -300})
    for (int64_t group : {1, 2})
      list.push_back({.name = "causal", .activation = group == 1 ? relu : silu, .heads = 2 * group, .queries = 97,
                      .keys = 129, .diagonal = diagonal, .shares = group});

  for (std::optional<int64_t> diagonal : {std::optional<int64_t>(), std::optional<int64_t>(0)})
    for (int64_t shares : {1, 2})
      list.push_back({.name = "packed", .activation = softplus, .heads = 4, .queries = 110, .keys = 220,
                      .diagonal = diagonal, .query_offsets = {0, 0, 7, 57, 57, 109, 110},
                      .key_offsets = {0, 3, 3, 132, 132, 219, 220}, .dropout = diagonal ? 0.5f : 0, .shares = shares});

  for (Layout layout : layouts)
    for (int64_t dim : {8, 35, 64})
      list.push_back({.name = "layout", .batch = 2, .dim = dim, .value_dim = dim + dim % 2 * 2, .layout = layout,
                      .mask = dim == 8 ? "bk" : ""});

  for (const char* mask : {"", "bk", "bqk"}) {
    for (float probability : {0.1f, 0.5f, 1.0f})
      list.push_back({.name = "dropout", .batch = 2, .heads = 4, .mask = mask, .dropout = probability});
    for (Activation h : activations)
      if (never_negative(h))
        list.push_back({.name = "statistics", .activation = h, .batch = 2, .mask = mask, .mask_type = Type::float32,
                        .dropout = *mask ? 0.25f : 0, .statistics = true, .row_tensors = *mask == 'b'});
  }
  for (const char* mask : {"", "bhqk", "hqk"})
    for (int64_t dim : {8, 33})
      for (int64_t keys : {35, 197})
        list.push_back({.name = "not finite", .activation = silu, .heads = 4, .queries = 97, .keys = keys, .dim = dim,
                        .value_dim = 41 - dim, .mask = mask, .mask_type = dim == 8 ? Type::boolean : Type::float32,
                        .diagonal = *mask ? std::optional<int64_t>() : keys - 97, .dropout = dim == 8 ? 0 : 0.25f,
                        .strange = true, .shares = keys == 35 ? 1 : 2});
  list.push_back({.name = "gradient of a sum", .activation = silu, .expanded_grad = true});
  list.push_back({.name = "row tensors", .activation = gelu, .heads = 4, .diagonal = 3, .row_tensors = true});

  for (const char* mask : {"", "bq"})
    list.push_back({.name = "no keys", .keys = 0, .mask = mask, .statistics = true});
  for (int64_t keys : {0, 250})
    list.push_back({.name = "linear", .activation = identity, .batch = 2, .heads = 4, .keys = keys, .dim = 59});
  list.push_back({.name = "linear", .activation = identity, .layout = Layout::columns_apart});

  for (uint64_t seed = 0; seed < 60; seed++) list.push_back(random_case(seed));
  return list;
}

struct Sequence { int64_t index, batch, query, queries, key, keys; };

std::vector<Sequence> sequences(const Case& c) {
  std::vector<Sequence> list;
  if (!c.packed())
    for (int64_t b = 0; b < c.batch; b++) list.push_back({b, b, 0, c.queries, 0, c.keys});
  for (size_t i = 0; i + 1 < c.query_offsets.size(); i++) {
    const int64_t q = c.query_offsets[i], k = c.key_offsets[i];
    list.push_back({int64_t(i), 0, q, c.query_offsets[i + 1] - q, k, c.key_offsets[i + 1] - k});
  }
  return list;
}

// ---- the inputs, as numbers -----------------------------------------------------------------------------------------
struct Dense {
  Shape shape{};
  std::vector<double> values;

  Dense() = default;
  explicit Dense(const Shape& s) : shape(s), values(size_t(s[0] * s[1] * s[2] * s[3])) {}
  Dense(const Shape& s, Random& random) : Dense(s) {
    for (double& x : values) x = random.eighths();
  }
  explicit operator bool() const { return !values.empty(); }

  // A dimension of size 1 stands for all.
  size_t place(int64_t b, int64_t h, int64_t r, int64_t c) const {
    const int64_t wanted[] = {b, h, r, c};
    int64_t at = 0;
    for (size_t d = 0; d < 4; d++) at = at * shape[d] + (shape[d] > 1 ? wanted[d] : 0);
    return size_t(at);
  }
  double at(int64_t b, int64_t h, int64_t r, int64_t c = 0) const { return values[place(b, h, r, c)]; }
};

struct Inputs {
  Dense query, key, value, grad_out, mask, row_gain, row_shift, grad_row_sum, grad_row_log;
  float scale, gain;
};

// Minus infinity stands for hidden. Rows 48 to 95 see nothing, so that whole tiles of a mask can be skipped.
Dense random_mask(const Case& c, Random& random) {
  auto size = [&](char name, int64_t full) { return c.mask.find(name) == std::string::npos ? 1 : full; };
  Dense mask({size('b', c.batch), size('h', c.heads), size('q', c.queries), size('k', c.keys)}, random);
  for (size_t i = 0; i < mask.values.size(); i++) {
    const int64_t row = int64_t(i) / mask.shape[3] % mask.shape[2];
    if (c.mask_type == Type::boolean) mask.values[i] = 0;
    if (random.below(4) == 0 || row / 48 == 1) mask.values[i] = -INFINITY;
  }
  return mask;
}

Inputs random_inputs(const Case& c) {
  Random random{uint64_t(c.queries * 1000 + c.keys)};
  const Shape rows = {c.batch, c.heads, c.queries, 1};
  Inputs in;
  in.query = Dense({c.batch, c.heads, c.queries, c.dim}, random);
  in.key = Dense({c.batch, c.key_heads, c.keys, c.dim}, random);
  in.value = Dense({c.batch, c.key_heads, c.keys, c.value_dim}, random);
  in.grad_out = Dense({c.batch, c.heads, c.queries, c.value_dim}, random);
  if (c.expanded_grad) std::fill(in.grad_out.values.begin(), in.grad_out.values.end(), 1);
  if (c.strange) {
    for (size_t i = 3; i < in.value.values.size(); i += size_t(5 * c.value_dim + 1)) in.value.values[i] = NAN;
    for (size_t i = 7; i < in.grad_out.values.size(); i += size_t(9 * c.value_dim + 1)) in.grad_out.values[i] = NAN;
  }
  if (!c.mask.empty()) in.mask = random_mask(c, random);
  if (c.row_tensors) in.row_gain = Dense(rows, random), in.row_shift = Dense({1, c.heads, 1, 1}, random);
  if (c.statistics) in.grad_row_sum = Dense(rows, random), in.grad_row_log = Dense(rows, random);
  // So the scores spread over about ±7, past every kink, and the gradients of a cube still fit a float16.
  in.scale = float(std::exp2(std::round(std::log2(6 / std::sqrt(double(c.dim))))));
  in.gain = 1 / float(c.queries + c.keys);
  return in;
}

// ---- the naive loops ------------------------------------------------------------------------------------------------
// Sums, and the sums of their terms' sizes: a fraction of these is the error of adding up rounded terms in any order.
struct Totals {
  int64_t columns;
  std::vector<double> value, size;

  Totals(size_t rows, int64_t width) : columns(width), value(rows * size_t(width)), size(value) {}
  void add(size_t place, double factor, double factor_size, const double* with) {
    for (size_t i = 0; i < size_t(columns); i++) {
      value[place + i] += factor * with[i];
      size[place + i] += factor_size * std::fabs(with[i]);
    }
  }
};

struct Answer { Totals out, row_sum, row_log, grad_query, grad_key, grad_value, grad_bias; };

struct Weight { double h, derivative; };

Weight activate(Activation h, double x) {
  const double s = 1 / (1 + std::exp(-x)), cumulative = std::erfc(-x / std::sqrt(2.0)) / 2;
  switch (h) {
    case relu: return x > 0 ? Weight{x, 1} : Weight{0, 0};
    case relu2: return x > 0 ? Weight{x * x, 2 * x} : Weight{0, 0};
    case gelu: return {x * cumulative, cumulative + x * std::exp(-x * x / 2) / std::sqrt(2 * M_PI)};
    case softplus: return {std::log1p(std::exp(x)), s};
    case identity: return {x, 1};
    case relu6: return x >= 6 ? Weight{6, 0} : x > 0 ? Weight{x, 1} : Weight{0, 0};
    case sigmoid: return {s, s * (1 - s)};
    case silu: return {x * s, s + x * s * (1 - s)};
    case cube: return {x * x * x, 3 * x * x};
  }
  return {};
}

uint64_t mix(uint64_t x) {
  x = ((x ^ x >> 16) * 0x7feb352d) & 0xffffffff;
  x = ((x ^ x >> 15) * 0x846ca68b) & 0xffffffff;
  return x ^ x >> 16;
}

// What nomax/ops/dropout.py says.
double dropout_factor(float probability, int64_t lane, int64_t query, int64_t key) {
  if (probability == 0) return 1;
  const uint64_t row = mix(mix(mix(mix(SEED & 0xffffffff) ^ SEED >> 32) ^ uint64_t(lane)) ^ uint64_t(query));
  const uint64_t bits = mix((mix(uint64_t(key) ^ row) + mix(row ^ 0x9e3779b9)) & 0xffffffff);
  return probability < 1 && double(bits) >= std::round(probability * 0x1p32) ? 1 / (1 - double(probability)) : 0;
}

double dot(const double* a, const double* b, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; i++) sum += a[i] * b[i];
  return sum;
}

// All that one query and one key add; `i` and `j` count within their sequence.
void add_pair(const Case& c, const Inputs& in, const Sequence& s, int64_t head, int64_t i, int64_t j, Answer& to) {
  constexpr double LEAST = 0.1;      // a smooth activation is rounded even where it, or its derivative, is near zero
  const int64_t b = s.batch, row = s.query + i, column = s.key + j, key_head = head / (c.heads / c.key_heads);
  const double bias = in.mask ? in.mask.at(b, head, row, column) : 0;
  if (bias == -INFINITY || (c.diagonal && j > i + *c.diagonal)) return;

  const size_t q = in.query.place(b, head, row, 0), g = in.grad_out.place(b, head, row, 0);
  const size_t k = in.key.place(b, key_head, column, 0), v = in.value.place(b, key_head, column, 0);
  const double *query = &in.query.values[q], *key = &in.key.values[k];
  const double *grad = &in.grad_out.values[g], *value = &in.value.values[v], one = 1;
  const double gain = in.row_gain ? in.row_gain.at(b, head, row) : double(in.gain);
  const double shift = in.row_shift ? in.row_shift.at(b, head, row) : double(c.shift);

  const auto [h, derivative] = activate(c.activation, dot(query, key, c.dim) * in.scale + bias + shift);
  const double factor = gain * dropout_factor(c.dropout, s.index * c.heads + head, i, j);
  const double weight = factor * h, weight_size = std::fabs(factor) * (std::fabs(h) + LEAST);
  double slope = factor == 0 ? 0 : factor * dot(grad, value, c.value_dim), slope_size = std::fabs(slope);
  if (c.statistics && h > 0) {
    const size_t place = in.grad_row_sum.place(b, head, row, 0);
    const double log_h = std::log(h), of_sum = in.grad_row_sum.values[place], of_log = in.grad_row_log.values[place];
    to.row_sum.add(place, h, h + LEAST, &one);
    to.row_log.add(place, h * log_h, h * (1 + std::fabs(log_h)) + LEAST, &one);
    slope += of_sum + of_log * (log_h + 1);
    slope_size += std::fabs(of_sum) + std::fabs(of_log) * (std::fabs(log_h) + 1);
  }
  const double score = slope * derivative, score_size = slope_size * (std::fabs(derivative) + LEAST);
  to.out.add(g, weight, weight_size, value);
  to.grad_value.add(v, weight, weight_size, grad);
  to.grad_query.add(q, score * in.scale, score_size * in.scale, key);
  to.grad_key.add(k, score * in.scale, score_size * in.scale, query);
  if (in.mask) to.grad_bias.add(in.mask.place(b, head, row, column), score, score_size, &one);
}

Answer naive(const Case& c, const Inputs& in) {
  const size_t rows = size_t(c.batch * c.heads * c.queries), key_rows = size_t(c.batch * c.key_heads * c.keys);
  Answer answer{Totals(rows, c.value_dim), Totals(rows, 1), Totals(rows, 1), Totals(rows, c.dim),
                Totals(key_rows, c.dim), Totals(key_rows, c.value_dim), Totals(in.mask.values.size(), 1)};
  for (const Sequence& s : sequences(c))
    for (int64_t head = 0; head < c.heads; head++)
      for (int64_t i = 0; i < s.queries; i++)
        for (int64_t j = 0; j < s.keys; j++) add_pair(c, in, s, head, i, j, answer);
  return answer;
}

}  // namespace
