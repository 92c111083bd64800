// The operators as torch sees them: attention's checks, outputs, and how its work is cut into tasks; and all their names.
#include "layers.h"

namespace nomax {
namespace {

// ---- tensors to views -------------------------------------------------------------------------------------------------
// A size of 1 is a broadcast dimension: its stride becomes 0.
View view(const Tensor& x, const char* name) {
  STD_TORCH_CHECK(x.dim() == 4 && x.is_cpu(), "nomax: ", name, " must be a 4-D tensor on the CPU");
  auto stride = [&](int64_t d) { return x.size(d) == 1 ? 0 : x.stride(d); };
  return {x.data_ptr(), type_of(x, name), stride(0), stride(1), stride(2), x.stride(3)};
}

void set_rows(View& to, const Optional& x, const Problem& p, const char* name) {
  if (!x) return;
  const int64_t expected[3] = {p.batch, p.heads, p.queries};
  STD_TORCH_CHECK(x->dim() == 3 && x->is_cpu() && x->scalar_type() == ScalarType::Float, "nomax: ", name,
                  " must be a 3-D float32 tensor on the CPU");
  int64_t strides[3];
  for (int d = 0; d < 3; d++) {
    STD_TORCH_CHECK(x->size(d) == 1 || x->size(d) == expected[d], "nomax: ", name, " does not fit the queries");
    strides[d] = x->size(d) == 1 ? 0 : x->stride(d);
  }
  to = {x->data_ptr(), Type::float32, strides[0], strides[1], strides[2], 1};
}

void set_mask(Problem& p, const Optional& mask) {
  if (!mask) return;
  const int64_t expected[4] = {p.batch, p.heads, p.queries, p.keys};
  STD_TORCH_CHECK(mask->dim() == 4 && !p.query_offsets, "nomax: mask must be 4-D, and there is none for packed sequences");
  for (int d = 0; d < 4; d++)
    STD_TORCH_CHECK(mask->size(d) == 1 || mask->size(d) == expected[d], "nomax: mask does not fit the scores");
  p.mask = view(*mask, "mask");
  if (mask->size(3) == 1) p.mask.column = 0;
}

const int64_t* offsets(const Optional& x, int64_t total, const char* name) {
  if (!x) return nullptr;
  STD_TORCH_CHECK(x->dim() == 1 && x->is_cpu() && x->is_contiguous() && x->scalar_type() == ScalarType::Long &&
                      x->size(0) > 0, "nomax: ", name, " must be a contiguous 1-D int64 tensor on the CPU");
  const int64_t* values = static_cast<const int64_t*>(x->data_ptr());
  const int64_t count = x->size(0);
  for (int64_t i = 0; i + 1 < count; i++) STD_TORCH_CHECK(values[i] <= values[i + 1], "nomax: ", name, " must not decrease");
  STD_TORCH_CHECK(values[0] == 0 && values[count - 1] == total, "nomax: ", name, " must start at 0 and end at the total");
  return values;
}

void set_shapes(Problem& p, const Tensor& query, const Tensor& key, const Tensor& value) {
  p.query = view(query, "query");
  p.key = view(key, "key");
  p.value = view(value, "value");
  p.batch = query.size(0); p.heads = query.size(1); p.queries = query.size(2); p.dim = query.size(3);
  p.key_heads = key.size(1); p.keys = key.size(2); p.value_dim = value.size(3);
  STD_TORCH_CHECK(key.size(0) == p.batch && value.size(0) == p.batch && value.size(1) == p.key_heads &&
                      value.size(2) == p.keys && key.size(3) == p.dim, "nomax: shapes of query, key and value do not fit");
  STD_TORCH_CHECK(p.key_heads == 0 ? p.heads == 0 : p.heads % p.key_heads == 0, "nomax: heads must divide into groups");
  STD_TORCH_CHECK(p.query.type != Type::boolean && p.query.type == p.key.type && p.query.type == p.value.type,
                  "nomax: query, key and value must have one floating type");
  // Products of two sizes then fit into 64 bits, and a place among the keys into 32.
  const std::pair<const char*, int64_t> sizes[] = {{"batch size", p.batch}, {"number of heads", p.heads},
      {"number of queries", p.queries}, {"number of keys", p.keys}, {"head dimension", p.dim},
      {"head dimension of the values", p.value_dim}};
  for (const auto& [name, size] : sizes)
    if (size >= int64_t(1) << 31)
      throw std::runtime_error("nomax: the " + std::string(name) + " is " + std::to_string(size) + ", but the CPU " +
                               "kernels take sizes below 2^31. If it is meant, cut the call into several.");
}

void set_phi(Problem& p, int64_t activation, double scale, double gain, double shift) {
  STD_TORCH_CHECK(activation >= 0 && activation <= int64_t(Activation::cube), "nomax: unknown activation ", activation);
  p.activation = Activation(activation);
  p.scale = float(scale);
  p.gain = float(gain);
  p.shift = float(shift);
}

Problem problem(const Tensor& query, const Tensor& key, const Tensor& value, const Optional& mask,
                const Optional& row_gain, const Optional& row_shift, const Optional& seed, const Optional& query_offsets,
                const Optional& key_offsets, int64_t activation, double scale, double gain, double shift,
                std::optional<int64_t> diagonal, double dropout) {
  Problem p;
  set_shapes(p, query, key, value);
  p.query_offsets = offsets(query_offsets, p.queries, "query_offsets");
  p.key_offsets = offsets(key_offsets, p.keys, "key_offsets");
  STD_TORCH_CHECK(!p.query_offsets == !p.key_offsets && (!p.query_offsets || p.batch == 1),
                  "nomax: packed sequences need both offsets and a batch of 1");
  if (p.query_offsets)
    STD_TORCH_CHECK(query_offsets->size(0) == key_offsets->size(0), "nomax: offsets must name the same sequences");
  set_mask(p, mask);
  set_rows(p.row_gain, row_gain, p, "row_gain");
  set_rows(p.row_shift, row_shift, p, "row_shift");
  set_phi(p, activation, scale, gain, shift);
  p.causal = diagonal.has_value();
  p.diagonal = diagonal.value_or(0);
  STD_TORCH_CHECK(!p.causal || !p.mask.data, "nomax: a mask and a diagonal exclude each other");
  p.dropout = dropout;
  if (dropout > 0) {
    STD_TORCH_CHECK(seed && seed->is_cpu() && seed->scalar_type() == ScalarType::Long && seed->numel() == 1,
                    "nomax: dropout needs a seed, one int64 on the CPU");
    p.seed = uint64_t(*static_cast<const int64_t*>(seed->data_ptr()));
  }
  return p;
}

// The plainest one: as many heads of keys as of queries, and nothing else than these.
Problem plain_problem(const Tensor& query, const Tensor& key, const Tensor& value, int64_t activation, double scale,
                      double gain, double shift) {
  Problem p;
  set_shapes(p, query, key, value);
  STD_TORCH_CHECK(p.heads == p.key_heads && p.dim && p.keys, "nomax: not the plainest call");
  set_phi(p, activation, scale, gain, shift);
  return p;
}

struct Length {
  int64_t queries, keys;
};

int64_t sequences(const Problem& p, const Optional& offsets) { return p.query_offsets ? offsets->size(0) - 1 : p.batch; }

Length length(const Problem& p, int64_t sequence) {
  if (!p.query_offsets) return {p.queries, p.keys};
  return {p.query_offsets[sequence + 1] - p.query_offsets[sequence], p.key_offsets[sequence + 1] - p.key_offsets[sequence]};
}

double operations(const Problem& p) { return 2.0 * p.batch * p.heads * p.queries * p.keys * (p.dim + p.value_dim); }

// Rows are independent: cut them finely enough that every thread has several tasks, in multiples of the tile's six.
void add_row_tasks(std::vector<Task>& tasks, int64_t sequence, int64_t head, int64_t rows, int64_t heads_in_all) {
  const int64_t threads = torch::stable::get_num_threads(), wanted = pieces(4 * threads, heads_in_all);
  int64_t size = pieces(pieces(rows, wanted), 6) * 6;
  size = size < 48 ? 48 : size > ROW_BLOCK ? ROW_BLOCK / 6 * 6 : size;
  size = pieces(pieces(rows, pieces(rows, size)), 6) * 6;                      // even pieces
  for (int64_t first = (pieces(rows, size) - 1) * size; first >= 0; first -= size)   // the longest causal rows first
    tasks.push_back({sequence, head, first, rows - first < size ? rows - first : size, nullptr});
}

// ---- operators --------------------------------------------------------------------------------------------------------
std::tuple<Tensor, Tensor> run_forward(Problem& p, const Optional& query_offsets, ScalarType type, bool rows) {
  const Kernel& k = kernel();
  Tensor out = empty("the output", {p.batch, p.heads, p.queries, p.value_dim}, {0, 2, 1, 3}, type);
  Tensor statistics =
      empty("the statistics of rows", {rows ? 2 : 0, p.batch, p.heads, p.queries}, {0, 1, 2, 3}, ScalarType::Float);
  p.out = view(out, "out");
  if (rows) {
    p.row_sum = static_cast<float*>(statistics.data_ptr());
    p.row_log = p.row_sum + statistics.numel() / 2;
  }
  if (out.numel() || statistics.numel()) {
    std::vector<Task> tasks;
    const int64_t count = sequences(p, query_offsets), group = p.heads / p.key_heads;
    const auto forward = [&](const Task& task, void* memory) { k.forward(p, task, memory); };
    const auto run_tasks = [&] {
      run(tasks, k.forward_bytes(p), operations(p), forward);
      tasks.clear();
    };
    for (int64_t s = 0; s < count; s++)
      for (int64_t head = 0; head < p.key_heads; head++) {
        if (const int64_t queries = length(p, s).queries) add_row_tasks(tasks, s, head, group * queries, count * p.key_heads);
        if (int64_t(tasks.size()) >= MANY) run_tasks();
      }
    run_tasks();
  }
  return {out, statistics};
}

std::tuple<Tensor, Tensor> attend(
    Tensor query, Tensor key, Tensor value, Optional mask, Optional row_gain, Optional row_shift, Optional seed,
    Optional query_offsets, Optional key_offsets, int64_t activation, double scale, double gain, double shift,
    std::optional<int64_t> diagonal, double dropout, bool rows) {
  Problem p = problem(query, key, value, mask, row_gain, row_shift, seed, query_offsets, key_offsets, activation, scale,
                      gain, shift, diagonal, dropout);
  return run_forward(p, query_offsets, query.scalar_type(), rows);
}

// The plainest call, which is over before torch has looked at all the arguments of the others.
Tensor attend_plainly(Tensor query, Tensor key, Tensor value, int64_t activation, double scale, double gain, double shift) {
  Problem p = plain_problem(query, key, value, activation, scale, gain, shift);
  return std::get<0>(run_forward(p, {}, query.scalar_type(), false));
}

// A part of a larger problem: it has the coins of the whole, and its results are float32, for others to be added.
std::tuple<Tensor, Tensor> attend_part(
    Tensor query, Tensor key, Tensor value, Optional mask, Optional row_gain, Optional row_shift, Optional seed,
    Optional query_offsets, Optional key_offsets, int64_t activation, double scale, double gain, double shift,
    std::optional<int64_t> diagonal, double dropout, int64_t first_batch, int64_t first_query, int64_t first_key, bool rows) {
  Problem p = problem(query, key, value, mask, row_gain, row_shift, seed, query_offsets, key_offsets, activation, scale,
                      gain, shift, diagonal, dropout);
  p.first_batch = first_batch; p.first_query = first_query; p.first_key = first_key;
  return run_forward(p, query_offsets, ScalarType::Float, rows);
}

// How a backward pass is cut: one task per share of a head's keys. Heads go in waves and rows in parts, so that the shares
// of dQ that wait to be added stay few and small.
struct Cut {
  int64_t wave = MANY, width, share, room = 0;      // heads; floats: of a row, of a share of dQ, of waiting dK and dV
  Memory shares, waiting;

  Cut(const Kernel& k, Problem& p, int64_t heads, Length longest) : width(k.width(p.dim)) {
    constexpr int64_t SHARES = int64_t(5) << 20;    // bytes of the shares of one head
    const int64_t group = p.heads / p.key_heads, threads = torch::stable::get_num_threads();
    p.shares = std::clamp(pieces(longest.keys, 512), int64_t(1), int64_t(16));
    const int64_t row_bytes = product(product(group * p.shares, width), int64_t(sizeof(float)));
    const int64_t parts = pieces(longest.queries, std::max(BIAS_BLOCK, SHARES / std::max(row_bytes, int64_t(1))));
    p.rows = pieces(pieces(longest.queries, parts), BIAS_BLOCK) * BIAS_BLOCK;
    const bool waits = parts > 1 && p.grad_key.type != Type::float32;      // float32 results hold the sums themselves
    if (p.shares > 1 || waits) wave = std::min(heads, pieces(8 * threads, p.shares));
    share = product(group * std::min(p.rows, longest.queries), width);
    if (waits) room = product(keys_of_task(p, longest.keys), width + k.width(p.value_dim));
    if (p.shares > 1) shares = floats("the shares of the query gradient", p, share);
    if (waits) waiting = floats("the sums of the key gradients", p, room);
  }

  Memory floats(const char* what, const Problem& p, int64_t count) const {
    return allocate(what, product(product(wave * p.shares, count), int64_t(sizeof(float))));
  }

  static int64_t keys_of_task(const Problem& p, int64_t keys) { return pieces(pieces(keys, p.shares), 16) * 16; }
};

// The gradients of some heads, of which the first one of the wave is `first`. Returns those that must be done carefully.
std::vector<int64_t> run_heads(const Kernel& k, Problem& p, const Cut& cut, int64_t first, const std::vector<int64_t>& heads,
                               int64_t longest, bool careful) {
  std::vector<std::atomic<bool>> wrong(heads.size());
  for (p.first_row = 0; p.first_row < longest; p.first_row += p.rows) {
    std::vector<Task> tasks, sums;
    for (const int64_t h : heads) {
      const int64_t sequence = h / p.key_heads, head = h % p.key_heads, slot = (h - first) * p.shares;
      const Length size = length(p, sequence);
      const int64_t rows = p.heads / p.key_heads * std::clamp(size.queries - p.first_row, int64_t(0), p.rows);
      const int64_t keys = Cut::keys_of_task(p, size.keys);
      float* partial = cut.shares ? static_cast<float*>(cut.shares.get()) + slot * cut.share : nullptr;
      float* waiting = cut.waiting ? static_cast<float*>(cut.waiting.get()) + slot * cut.room : nullptr;
      for (int64_t i = 0; i < p.shares; i++)
        tasks.push_back({sequence, head, i * keys, keys, partial ? partial + i * rows * cut.width : nullptr,
                         waiting ? waiting + i * cut.room : nullptr});
      for (int64_t row = 0; partial && row < rows; row += ROW_BLOCK)
        sums.push_back({sequence, head, row, std::min(ROW_BLOCK, rows - row), partial});
    }
    run(tasks, k.backward_bytes(p), 2 * operations(p), [&](const Task& task, void* memory) {
      const int64_t index = (&task - tasks.data()) / p.shares;
      if (!k.backward(p, task, memory, careful)) wrong[size_t(index)] = true;
    });
    run(sums, 0, operations(p), [&](const Task& task, void*) { k.reduce(p, task); });
  }
  std::vector<int64_t> again;
  for (size_t i = 0; i < heads.size(); i++)
    if (wrong[i]) again.push_back(heads[i]);
  return again;
}

void run_backward(const Kernel& k, Problem& p, int64_t count) {
  Length longest = p.query_offsets ? Length{0, 0} : Length{p.queries, p.keys};
  for (int64_t s = 0; p.query_offsets && s < count; s++) {
    longest.queries = std::max(longest.queries, length(p, s).queries);
    longest.keys = std::max(longest.keys, length(p, s).keys);
  }
  const int64_t all = count * p.key_heads;
  const Cut cut(k, p, all, longest);
  for (int64_t first = 0; first < all; first += cut.wave) {
    std::vector<int64_t> heads(size_t(std::min(cut.wave, all - first)));
    std::iota(heads.begin(), heads.end(), first);
    heads = run_heads(k, p, cut, first, heads, longest.queries, false);
    if (!heads.empty()) run_heads(k, p, cut, first, heads, longest.queries, true);
  }
}

void run_bias(const Kernel& k, Problem& p) {
  std::vector<Task> tasks;
  const auto& shape = p.bias_shape;
  const int64_t cut = shape[2] > 1 ? shape[2] : shape[3];      // its rows, or its columns if one row serves all
  for (int64_t b = 0; b < shape[0]; b++)
    for (int64_t h = 0; h < shape[1]; h++)
      for (int64_t first = 0; first < cut; first += BIAS_BLOCK)
        tasks.push_back({b, h, first, std::min(BIAS_BLOCK, cut - first), nullptr});
  run(tasks, k.bias_bytes(p), operations(p), [&](const Task& task, void* memory) { k.bias(p, task, memory); });
}

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor>;

Gradients run_gradients(Problem& p, const Tensor& grad, const Optional& grad_statistics, const Tensor& query,
                        const Tensor& key, const Tensor& value, const Optional& mask, const Optional& query_offsets,
                        ScalarType type, bool bias) {
  const Kernel& k = kernel();
  p.grad_out = view(grad, "grad");
  STD_TORCH_CHECK(p.grad_out.type == p.query.type && grad.size(0) == p.batch && grad.size(1) == p.heads &&
                      grad.size(2) == p.queries && grad.size(3) == p.value_dim, "nomax: the gradient does not fit the output");
  if (grad_statistics) {
    STD_TORCH_CHECK(grad_statistics->is_contiguous() && grad_statistics->scalar_type() == ScalarType::Float &&
                        grad_statistics->numel() == 2 * p.batch * p.heads * p.queries, "nomax: the rows' gradients do not fit");
    p.grad_row_sum = static_cast<const float*>(grad_statistics->data_ptr());
    p.grad_row_log = p.grad_row_sum + grad_statistics->numel() / 2;
  }
  Tensor grad_query = empty_like("the gradient of query", query, type);
  Tensor grad_key = empty_like("the gradient of key", key, type);
  Tensor grad_value = empty_like("the gradient of value", value, type);
  p.grad_query = view(grad_query, "grad_query");
  p.grad_key = view(grad_key, "grad_key");
  p.grad_value = view(grad_value, "grad_value");
  Tensor grad_bias = empty("no gradient", {0}, {0}, ScalarType::Float);
  const bool work = p.batch && p.heads && p.queries && p.keys;
  if (!work) torch::stable::zero_(grad_query);
  if (!work || mask) {                        // hidden keys are never visited
    torch::stable::zero_(grad_key);
    torch::stable::zero_(grad_value);
  }
  if (bias) {
    STD_TORCH_CHECK(mask && p.mask.type != Type::boolean, "nomax: only a float mask has a gradient");
    for (int d = 0; d < 4; d++) p.bias_shape[d] = mask->size(d);
    const std::vector<int64_t> shape(p.bias_shape, p.bias_shape + 4);
    grad_bias = empty("the gradient of the mask", shape, {0, 1, 2, 3}, ScalarType::Float);
    torch::stable::zero_(grad_bias);
    p.grad_bias = static_cast<float*>(grad_bias.data_ptr());
  }
  if (work) {
    run_backward(k, p, sequences(p, query_offsets));
    if (bias) run_bias(k, p);
  }
  return {grad_query, grad_key, grad_value, grad_bias};
}

Gradients attend_backward(
    Tensor grad, Optional grad_statistics, Tensor query, Tensor key, Tensor value, Optional mask,
    Optional row_gain, Optional row_shift, Optional seed, Optional query_offsets, Optional key_offsets,
    int64_t activation, double scale, double gain, double shift, std::optional<int64_t> diagonal, double dropout,
    bool bias) {
  Problem p = problem(query, key, value, mask, row_gain, row_shift, seed, query_offsets, key_offsets, activation, scale,
                      gain, shift, diagonal, dropout);
  return run_gradients(p, grad, grad_statistics, query, key, value, mask, query_offsets, query.scalar_type(), bias);
}

std::tuple<Tensor, Tensor, Tensor> attend_plainly_gradients(
    Tensor grad, Tensor query, Tensor key, Tensor value, int64_t activation, double scale, double gain, double shift) {
  Problem p = plain_problem(query, key, value, activation, scale, gain, shift);
  auto [grad_query, grad_key, grad_value, none] =
      run_gradients(p, grad, {}, query, key, value, {}, {}, query.scalar_type(), false);
  return {grad_query, grad_key, grad_value};
}

Gradients attend_part_gradients(
    Tensor grad, Optional grad_statistics, Tensor query, Tensor key, Tensor value, Optional mask,
    Optional row_gain, Optional row_shift, Optional seed, Optional query_offsets, Optional key_offsets,
    int64_t activation, double scale, double gain, double shift, std::optional<int64_t> diagonal, double dropout,
    int64_t first_batch, int64_t first_query, int64_t first_key, bool bias) {
  Problem p = problem(query, key, value, mask, row_gain, row_shift, seed, query_offsets, key_offsets, activation, scale,
                      gain, shift, diagonal, dropout);
  p.first_batch = first_batch; p.first_query = first_query; p.first_key = first_key;
  return run_gradients(p, grad, grad_statistics, query, key, value, mask, query_offsets, ScalarType::Float, bias);
}

// gain: one more factor, where it is a number of the graph (a length that torch.compile keeps open) and not of Python.
Tensor attend_linear(Tensor query, Tensor key, Tensor value, double factor, Optional gain) {
  constexpr int64_t PIECE = 1024;
  constexpr int64_t STATES = int64_t(1) << 28;      // bytes of sums at a time: more heads wait
  const Kernel& k = kernel();
  Problem p;
  set_shapes(p, query, key, value);
  Tensor out = empty("the output", {p.batch, p.heads, p.queries, p.value_dim}, {0, 2, 1, 3}, query.scalar_type());
  p.out = view(out, "out");
  p.scale = float(factor);
  if (gain) {
    STD_TORCH_CHECK(gain->is_cpu() && gain->scalar_type() == ScalarType::Float && gain->numel() == 1,
                    "nomax: gain must be one float32 on the CPU");
    p.gain = *static_cast<const float*>(gain->data_ptr());
  }
  if (!out.numel()) return out;
  if (!p.keys) return torch::stable::zero_(out);      // a product with a query that is not finite would not be zero
  p.shares = std::max(int64_t(1), pieces(p.keys, PIECE));
  const int64_t state = product(p.dim, k.width(p.value_dim)), group = p.heads / p.key_heads;
  const int64_t state_bytes = product(product(p.shares, state), int64_t(sizeof(float)));      // of one head
  const int64_t heads = p.batch * p.key_heads, bytes = k.linear_bytes(p);
  const int64_t wave = std::clamp(STATES / std::max(state_bytes, int64_t(1)), int64_t(1), std::min(heads, MANY));
  Memory shares = allocate("the sums of key · value", product(wave, state_bytes));
  const double each = 2.0 * p.batch * p.heads * (p.queries + p.keys) * p.dim * p.value_dim;
  for (int64_t start = 0; start < heads; start += wave) {
    std::vector<Task> keys, queries;
    float* partial = static_cast<float*>(shares.get());
    for (int64_t at = start; at < std::min(heads, start + wave); at++, partial += p.shares * state) {
      const int64_t b = at / p.key_heads, head = at % p.key_heads;
      for (int64_t i = 0; i < p.shares; i++)
        keys.push_back({b, head, i * PIECE, std::min(PIECE, p.keys - i * PIECE), partial + i * state});
      for (int64_t h = head * group; h < (head + 1) * group; h++)
        for (int64_t first = 0; first < p.queries; first += PIECE)
          queries.push_back({b, h, first, std::min(PIECE, p.queries - first), partial});
    }
    run(keys, bytes, each, [&](const Task& task, void* memory) { k.linear_keys(p, task, memory); });
    run(queries, bytes, each, [&](const Task& task, void* memory) { k.linear_queries(p, task, memory); });
  }
  return out;
}

}  // namespace
}  // namespace nomax

#define NOMAX_ARGUMENTS                                                                                              \
  "Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? row_gain, Tensor? row_shift, Tensor? seed, "        \
  "Tensor? query_offsets, Tensor? key_offsets, int activation, float scale, float gain, float shift, int? diagonal, " \
  "float dropout"

STABLE_TORCH_LIBRARY(nomax, m) {
  m.def("attend(" NOMAX_ARGUMENTS ", bool rows) -> (Tensor, Tensor)");
  m.def("attend_backward(Tensor grad, Tensor? grad_statistics, " NOMAX_ARGUMENTS
        ", bool bias) -> (Tensor, Tensor, Tensor, Tensor)");
  // attend and attend_backward have autograd formulas, which cost Python at every call. These two have none: for calls
  // that need no gradient, and for those whose formula is Python's own (see nomax/ops/cpu.py).
  m.def("attend_forward(" NOMAX_ARGUMENTS ", bool rows) -> (Tensor, Tensor)");
  m.def("attend_gradients(Tensor grad, Tensor? grad_statistics, " NOMAX_ARGUMENTS
        ", bool bias) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def("attend_plainly(Tensor query, Tensor key, Tensor value, int activation, float scale, float gain, float shift) -> Tensor");
  m.def("attend_plainly_gradients(Tensor grad, Tensor query, Tensor key, Tensor value, int activation, float scale, "
        "float gain, float shift) -> (Tensor, Tensor, Tensor)");
  m.def("attend_part(" NOMAX_ARGUMENTS
        ", int first_batch, int first_query, int first_key, bool rows) -> (Tensor, Tensor)");
  m.def("attend_part_gradients(Tensor grad, Tensor? grad_statistics, " NOMAX_ARGUMENTS
        ", int first_batch, int first_query, int first_key, bool bias) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def("attend_linear(Tensor query, Tensor key, Tensor value, float factor, Tensor? gain=None) -> Tensor");
  m.def("look_up(Tensor x, Tensor? gates, Tensor keys, Tensor values, int activation, float shift) -> Tensor");
  m.def("gelu(Tensor x, Tensor? bias, bool tanh) -> Tensor");
  m.def("gelu_(Tensor(a!) x, Tensor? bias, bool tanh) -> ()");
  m.def("gelu_backward(Tensor grad, Tensor x, Tensor? bias, bool tanh, bool bias_wanted) -> (Tensor, Tensor)");
  m.def("dropout(Tensor x, Tensor? onto, float share, int seed, int type) -> Tensor");
  m.def("layer_norm(Tensor x, Tensor weight, Tensor? bias, float eps, int type) -> (Tensor, Tensor)");
  m.def("add_layer_norm_(Tensor(a!) x, Tensor added, Tensor? added_bias, Tensor weight, Tensor? bias, float eps, int type) -> Tensor");
  m.def("layer_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor? bias, Tensor statistics) -> (Tensor, Tensor, Tensor)");
  m.def("cross_entropy(Tensor logits, Tensor labels, float smoothing) -> Tensor");
  m.def("cross_entropy_backward(Tensor grad, Tensor logits, Tensor labels, Tensor whole, float smoothing) -> Tensor");
  m.def("isa() -> str");
  m.def("isas() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(nomax, CPU, m) {
  m.impl("attend", TORCH_BOX(&nomax::attend));
  m.impl("attend_forward", TORCH_BOX(&nomax::attend));
  m.impl("attend_plainly", TORCH_BOX(&nomax::attend_plainly));
  m.impl("attend_plainly_gradients", TORCH_BOX(&nomax::attend_plainly_gradients));
  m.impl("attend_backward", TORCH_BOX(&nomax::attend_backward));
  m.impl("attend_gradients", TORCH_BOX(&nomax::attend_backward));
  m.impl("attend_part", TORCH_BOX(&nomax::attend_part));
  m.impl("attend_part_gradients", TORCH_BOX(&nomax::attend_part_gradients));
  m.impl("attend_linear", TORCH_BOX(&nomax::attend_linear));
  m.impl("look_up", TORCH_BOX(&nomax::look_up));
  m.impl("gelu", TORCH_BOX(&nomax::gelu));
  m.impl("gelu_", TORCH_BOX(&nomax::gelu_in_place));
  m.impl("gelu_backward", TORCH_BOX(&nomax::gelu_backward));
  m.impl("dropout", TORCH_BOX(&nomax::dropout));
  m.impl("layer_norm", TORCH_BOX(&nomax::layer_norm));
  m.impl("add_layer_norm_", TORCH_BOX(&nomax::add_layer_norm));
  m.impl("layer_norm_backward", TORCH_BOX(&nomax::layer_norm_backward));
  m.impl("cross_entropy", TORCH_BOX(&nomax::cross_entropy));
  m.impl("cross_entropy_backward", TORCH_BOX(&nomax::cross_entropy_backward));
}

STABLE_TORCH_LIBRARY_IMPL(nomax, CompositeExplicitAutograd, m) {
  m.impl("isa", TORCH_BOX(&nomax::isa));
  m.impl("isas", TORCH_BOX(&nomax::isas));
}
