// The operators as torch sees them: checks, outputs, and how the work is cut into tasks. On torch's stable ABI, so that
// one binary serves every torch from 2.10 on.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#if defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

#include "problem.h"

namespace nomax {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Optional = std::optional<Tensor>;

// ---- which kernel ---------------------------------------------------------------------------------------------------
struct Choice {
  const Kernel* kernel;
  bool usable;
};

#if defined(NOMAX_HAVE_NEON_BF16)
bool multiplies_bfloat16() {
#if defined(__APPLE__)
  int has = 0;
  size_t size = sizeof(has);
  return sysctlbyname("hw.optional.arm.FEAT_BF16", &has, &size, nullptr, 0) == 0 && has;
#elif defined(__linux__)
  return getauxval(AT_HWCAP2) & (1ul << 14);      // HWCAP2_BF16, which older headers do not name
#else
  return false;
#endif
}
#endif

std::vector<Choice> find_kernels() {
  std::vector<Choice> found;      // best first
#if defined(__x86_64__)
  __builtin_cpu_init();
  [[maybe_unused]] const bool avx512 = __builtin_cpu_supports("f16c") && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                       __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  [[maybe_unused]] const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                                     __builtin_cpu_supports("f16c");
#if defined(NOMAX_HAVE_AVX512_BF16)
  found.push_back({&kernel_avx512_bf16, avx512 && __builtin_cpu_supports("avx512bf16")});
#endif
#if defined(NOMAX_HAVE_AVX512)
  found.push_back({&kernel_avx512, avx512});
#endif
#if defined(NOMAX_HAVE_AVX2)
  found.push_back({&kernel_avx2, avx2});
#endif
#elif defined(NOMAX_HAVE_NEON_BF16)
  found.push_back({&kernel_neon_bf16, multiplies_bfloat16()});
#endif
  found.push_back({&kernel_portable, true});
  return found;
}

const Kernel& kernel() {
  static const std::vector<Choice> choices = find_kernels();
  const char* wanted = std::getenv("NOMAX_ISA");
  std::string usable;
  for (const Choice& choice : choices) {
    if (!choice.usable) continue;
    if (!wanted || !*wanted || std::string(wanted) == choice.kernel->name) return *choice.kernel;
    usable += std::string(usable.empty() ? "" : ", ") + choice.kernel->name;
  }
  STD_TORCH_CHECK(false, "NOMAX_ISA is '", wanted, "', but this machine and build can run only: ", usable);
  return kernel_portable;
}

std::string isa() { return kernel().name; }

// All that this machine and build can run, best first.
std::string isas() {
  std::string names;
  for (const Choice& choice : find_kernels())
    if (choice.usable) names += std::string(names.empty() ? "" : ",") + choice.kernel->name;
  return names;
}

// ---- tensors to views -------------------------------------------------------------------------------------------------
Type type_of(const Tensor& x, const char* name) {
  switch (x.scalar_type()) {
    case ScalarType::Float: return Type::float32;
    case ScalarType::BFloat16: return Type::bfloat16;
    case ScalarType::Half: return Type::float16;
    case ScalarType::Bool: return Type::boolean;
    default: STD_TORCH_CHECK(false, "nomax: ", name, " has a type that the CPU kernels do not know"); return Type::float32;
  }
}

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

constexpr const char* FEWER = "Attend to fewer batches, heads or queries at a time.";

constexpr const char* SMALLER =
    "It grows with the head dimension, and in the backward pass with the queries: cut the call into several, or call "
    "torch.set_num_threads with fewer threads.";

// Not STD_TORCH_CHECK, which would put our source file and line before what the user has to read.
[[noreturn]] void refuse(const char* what, int64_t bytes, const char* advice) {
  std::string size = bytes >= TOO_MANY_BYTES ? "2^62 bytes or more" : std::to_string(bytes) + " bytes";
  if (bytes < TOO_MANY_BYTES && bytes >= 1000000000) size += " (" + std::to_string(bytes / 1000000000) + " GB)";
  throw std::runtime_error("nomax: no memory for " + std::string(what) + ", " + size + ". " + advice);
}

// A tensor with its dimensions in memory in this order, the last one innermost.
Tensor empty(const char* what, std::vector<int64_t> sizes, const std::vector<int64_t>& order, ScalarType type) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1, bytes = type == ScalarType::Float ? 4 : 2;
  for (auto d = order.rbegin(); d != order.rend(); ++d) {
    strides[size_t(*d)] = stride;
    stride = product(stride, std::max(sizes[size_t(*d)], int64_t(1)));
  }
  for (int64_t size : sizes) bytes = product(bytes, size);
  AtenTensorHandle handle;
  const int32_t code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
  const auto failed = aoti_torch_empty_strided(int64_t(sizes.size()), sizes.data(), strides.data(), code,
                                               aoti_torch_device_type_cpu(), 0, &handle);
  if (failed) refuse(what, bytes, FEWER);
  return Tensor(handle);
}

// Dense, with the dimensions of x in the order that they have there, as torch's own empty_like has it. That one goes
// through the dispatcher, which takes longer than the work of a tiny call.
Tensor empty_like(const char* what, const Tensor& x, ScalarType type) {
  std::vector<int64_t> sizes(size_t(x.dim())), order(size_t(x.dim()));
  for (int64_t d = 0; d < x.dim(); d++) sizes[size_t(d)] = x.size(order[size_t(d)] = d);
  const auto stride = [&](int64_t d) { return x.size(d) == 1 ? 0 : x.stride(d); };
  for (size_t i = 1; i < order.size(); i++)      // few, and mostly in order already
    for (size_t j = i; j && stride(order[j]) && stride(order[j - 1]) && stride(order[j - 1]) < stride(order[j]); j--)
      std::swap(order[j], order[j - 1]);
  return empty(what, sizes, order, type);
}

Tensor empty_like(const char* what, const Tensor& x) { return empty_like(what, x, x.scalar_type()); }

// ---- tasks to threads -------------------------------------------------------------------------------------------------
struct Free {
  void operator()(void* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<void, Free>;

Memory allocate(const char* what, int64_t bytes, const char* advice = FEWER) {
  Memory memory(bytes < TOO_MANY_BYTES ? std::aligned_alloc(64, size_t((bytes + 127) / 64 * 64)) : nullptr);
  if (!memory) refuse(what, bytes, advice);
  return memory;
}

// Floats, all zero.
Memory zeros(const char* what, int64_t count) {
  const int64_t bytes = product(count, int64_t(sizeof(float)));
  Memory memory = allocate(what, bytes);
  std::memset(memory.get(), 0, size_t(bytes));
  return memory;
}

constexpr int64_t MANY = 4096;      // tasks: no list of them grows much longer, however large the batch

// Threads take the next task when they are done with one; which thread does a task changes nothing in its result.
template <class Work> void run(const std::vector<Task>& tasks, int64_t bytes, double operations, const Work& work) {
  const int64_t count = int64_t(tasks.size());
  int64_t workers = operations < 2e5 ? 1 : int64_t(torch::stable::get_num_threads());
  workers = workers < count ? workers : count;
  if (workers <= 1) {
    if (!count) return;
    Memory memory = allocate("the workspace of a thread", bytes, SMALLER);
    for (const Task& task : tasks) work(task, memory.get());
    return;
  }
  std::vector<Memory> memory;
  for (int64_t i = 0; i < workers; i++) memory.push_back(allocate("the workspace of a thread", bytes, SMALLER));
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, workers, 1, [&](int64_t first, int64_t last) {
    for (int64_t worker = first; worker < last; worker++)
      for (int64_t i; (i = next.fetch_add(1)) < count;) work(tasks[size_t(i)], memory[size_t(worker)].get());
  });
}

// The sums of tasks, in their order: the same for any number of threads. There may be hundreds, whose roundings would add up.
void add_up(const std::vector<Task>& tasks, int64_t count, float* sums, int64_t offset = 0) {
  std::vector<double> wide(size_t(count), 0.0);
  for (const Task& task : tasks)
    for (int64_t i = 0; i < count; i++) wide[size_t(i)] += double(task.partial[offset + i]);
  std::copy(wide.begin(), wide.end(), sums);
}

struct Length {
  int64_t queries, keys;
};

int64_t sequences(const Problem& p, const Optional& offsets) { return p.query_offsets ? offsets->size(0) - 1 : p.batch; }

Length length(const Problem& p, int64_t sequence) {
  if (!p.query_offsets) return {p.queries, p.keys};
  return {p.query_offsets[sequence + 1] - p.query_offsets[sequence], p.key_offsets[sequence + 1] - p.key_offsets[sequence]};
}

int64_t pieces(int64_t count, int64_t size) { return (count + size - 1) / size; }

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

// In float32. Which slots make a task never depends on the number of threads.
Tensor look_up(Tensor x, Optional gates, Tensor keys, Tensor values, int64_t activation, double shift) {
  constexpr int64_t PIECE = 1 << 18, LONGEST = 128;      // numbers of a matrix that a task reads; terms of a running sum
  STD_TORCH_CHECK(x.is_cpu() && x.dim() == 2 && x.is_contiguous() && x.size(0) >= 1 && x.size(0) <= MOST_TOKENS,
                  "nomax: look_up takes 1 to 6 contiguous rows on the CPU");
  const Type type = type_of(x, "x");
  STD_TORCH_CHECK(type == Type::float32 || type == Type::bfloat16, "nomax: look_up takes float32 and bfloat16");
  for (const Tensor* each : {&keys, &values, gates ? &*gates : &keys})
    STD_TORCH_CHECK(each->is_cpu() && each->dim() == 2 && each->is_contiguous() && each->size(0) == keys.size(0) &&
                        each->size(1) == x.size(1) && each->scalar_type() == x.scalar_type(),
                    "nomax: the rows of gates, keys and values do not fit x");
  STD_TORCH_CHECK(activation >= 0 && activation <= int64_t(Activation::cube), "nomax: unknown activation ", activation);
  const int64_t tokens = x.size(0), dim = x.size(1), slots = keys.size(0);
  const int64_t piece = std::clamp(PIECE / std::max(dim, int64_t(1)) / 64 * 64, int64_t(64), LONGEST);
  const Kernel& k = kernel();
  const LookUp l{x.data_ptr(), gates ? gates->data_ptr() : nullptr, keys.data_ptr(), values.data_ptr(), type, tokens, dim,
                 std::min(piece, slots), Activation(activation), float(shift)};
  const int64_t stride = 2 * k.width(pieces(dim, 2));      // round_up(dim, SPAN)
  Tensor out = empty("the result of look_up", {tokens, dim}, {0, 1}, ScalarType::Float);
  Memory partial = allocate("the sums of slots", product(pieces(slots, piece), tokens * stride * int64_t(sizeof(float))));
  std::vector<Task> tasks;
  for (int64_t first = 0; first < slots; first += piece)
    tasks.push_back({0, 0, first, std::min(piece, slots - first),
                     static_cast<float*>(partial.get()) + first / piece * tokens * stride});
  run(tasks, k.look_up_bytes(l), 4.0 * double(tokens * keys.numel()),
      [&](const Task& task, void* memory) { k.look_up(l, task, memory); });
  for (int64_t r = 0; r < tokens; r++) add_up(tasks, dim, static_cast<float*>(out.data_ptr()) + r * dim, r * stride);
  return out;
}

// ---- rows of layers between the attentions ------------------------------------------------------------------------------
// At most 256 rows, as their sums run in float32.
int64_t row_piece(int64_t width) { return std::clamp((int64_t(1) << 14) / std::max(int64_t(1), width), int64_t(1), int64_t(256)); }

// Tasks over rows of so many numbers each; `sums` floats for each of them, all zero, if there are any.
std::vector<Task> row_tasks(int64_t rows, int64_t width, float* partial = nullptr, int64_t sums = 0) {
  const int64_t piece = row_piece(width);
  std::vector<Task> tasks;
  for (int64_t first = 0; first < rows; first += piece)
    tasks.push_back({0, 0, first, std::min(piece, rows - first), partial ? partial + first / piece * sums : nullptr});
  return tasks;
}

void gelu_into(const Tensor& x, const Tensor* grad, const Optional& bias, Tensor& out, bool tanh, Tensor* sums = nullptr) {
  STD_TORCH_CHECK(x.is_cpu() && x.dim() == 2 && x.is_contiguous(), "nomax: gelu takes contiguous rows on the CPU");
  STD_TORCH_CHECK(!grad || (grad->is_contiguous() && grad->numel() == x.numel() && grad->scalar_type() == x.scalar_type()),
                  "nomax: the gradient does not fit gelu's input");
  STD_TORCH_CHECK(!bias || (bias->is_contiguous() && bias->numel() == x.size(1) && bias->scalar_type() == ScalarType::Float),
                  "nomax: the bias does not fit gelu's input");
  const int64_t width = x.size(1), rows = width ? x.size(0) : 0;
  const Elements elements{x.data_ptr(), grad ? grad->data_ptr() : nullptr, out.data_ptr(), type_of(x, "x"), width,
                          bias ? static_cast<const float*>(bias->data_ptr()) : nullptr, tanh};
  const Kernel& k = kernel();
  const int64_t stride = k.width(width), four = GELU_SUMS * stride;
  Memory partial;
  if (sums) partial = zeros("the sums of columns", product(pieces(rows, row_piece(width)), four));
  const std::vector<Task> tasks = row_tasks(rows, width, static_cast<float*>(partial.get()), four);
  run(tasks, 0, 20.0 * double(x.numel()), [&](const Task& task, void*) { k.gelu(elements, task); });
  if (!sums) return;
  for (const Task& task : tasks)
    for (int64_t i = 0; i < width; i++)
      for (int64_t turn = 1; turn < GELU_SUMS; turn++) task.partial[i] += task.partial[turn * stride + i];
  add_up(tasks, width, static_cast<float*>(sums->data_ptr()));
}

Tensor gelu(Tensor x, Optional bias, bool tanh) {
  Tensor out = empty_like("the result of gelu", x);
  gelu_into(x, nullptr, bias, out, tanh);
  return out;
}

// The gradient of x, and if wanted that of the bias, which is the sum of its rows: no second pass, nothing rounded.
std::tuple<Tensor, Tensor> gelu_backward(Tensor grad, Tensor x, Optional bias, bool tanh, bool bias_wanted) {
  Tensor out = empty_like("the result of gelu", x);
  Tensor sums = empty("the gradient of the bias", {bias_wanted ? x.size(1) : 0}, {0}, ScalarType::Float);
  gelu_into(x, &grad, bias, out, tanh, bias_wanted ? &sums : nullptr);
  return {out, sums};
}

void gelu_in_place(Tensor x, Optional bias, bool tanh) { gelu_into(x, nullptr, bias, x, tanh); }

ScalarType scalar_type(int64_t type) {
  STD_TORCH_CHECK(type >= 0 && type <= int64_t(Type::float16), "nomax: unknown type ", type);
  return type == int64_t(Type::float32) ? ScalarType::Float : type == int64_t(Type::bfloat16) ? ScalarType::BFloat16 : ScalarType::Half;
}

// type: of the result, as in problem.h.
Tensor dropout(Tensor x, Optional onto, double share, int64_t seed, int64_t type) {
  STD_TORCH_CHECK(x.is_cpu() && x.dim() == 2 && x.is_contiguous(), "nomax: dropout takes contiguous rows on the CPU");
  STD_TORCH_CHECK(!onto || (onto->is_cpu() && onto->dim() == 2 && onto->is_contiguous() && onto->size(0) == x.size(0) &&
                            onto->size(1) == x.size(1)), "nomax: the rows to add dropout's to do not fit");
  Tensor out = empty("the result of dropout", {x.size(0), x.size(1)}, {0, 1}, scalar_type(type));
  const Thinning d{x.data_ptr(), onto ? onto->data_ptr() : nullptr, type_of(x, "x"), onto ? type_of(*onto, "onto") : Type::float32,
                   Type(type), out.data_ptr(), x.size(1), share, uint64_t(seed)};
  const Kernel& k = kernel();
  run(row_tasks(x.size(1) ? x.size(0) : 0, x.size(1)), 0, 8.0 * double(x.numel()), [&](const Task& task, void*) { k.dropout(d, task); });
  return out;
}

// A row of parameters, filled up to whole vectors.
void fill_row(std::vector<float>& to, const Tensor& from, int64_t width, const char* name) {
  STD_TORCH_CHECK(from.is_cpu() && from.is_contiguous() && from.numel() == width && from.scalar_type() == ScalarType::Float,
                  "nomax: ", name, " must be a contiguous float32 row that fits");
  std::memcpy(to.data(), from.data_ptr(), size_t(width) * sizeof(float));
}

struct NormRows {
  Norm norm;
  int64_t rows, stride;
  std::vector<float> weight, bias;

  NormRows(const Tensor& x, const Tensor& weights, const Optional& biases, double eps) {
    STD_TORCH_CHECK(x.is_cpu() && x.dim() == 3 && x.stride(2) == 1 && x.size(2) <= MOST_NORMED,
                    "nomax: layer_norm takes [outer, inner, width] with neighbouring numbers on the CPU");
    const int64_t width = x.size(2);
    rows = x.size(0) * x.size(1);
    stride = kernel().width(width);
    weight.resize(size_t(stride));
    fill_row(weight, weights, width, "weight");
    if (biases) bias.resize(size_t(stride)), fill_row(bias, *biases, width, "bias");
    norm = {x.data_ptr(), type_of(x, "x"), x.size(1), width, x.stride(0), x.stride(1), weight.data(),
            biases ? bias.data() : nullptr, float(eps), nullptr, nullptr, nullptr, 0, 0, type_of(x, "x")};
  }
};

// type: of the result, as in problem.h.
std::tuple<Tensor, Tensor> layer_norm(Tensor x, Tensor weight, Optional bias, double eps, int64_t type) {
  NormRows r(x, weight, bias, eps);
  Tensor out = empty("the result of layer_norm", {x.size(0), x.size(1), x.size(2)}, {0, 1, 2}, scalar_type(type));
  r.norm.result = Type(type);
  Tensor statistics = empty("the means of rows", {r.rows, 2}, {0, 1}, ScalarType::Float);
  r.norm.out = out.data_ptr();
  r.norm.statistics = static_cast<float*>(statistics.data_ptr());
  const Kernel& k = kernel();
  run(row_tasks(r.rows, x.size(2)), 0, 8.0 * double(x.numel()), [&](const Task& task, void*) { k.norm_forward(r.norm, task); });
  return {out, statistics};
}

// x becomes x + added + added_bias; the result is layer_norm of that.
Tensor add_layer_norm(Tensor x, Tensor added, Optional added_bias, Tensor weight, Optional bias, double eps, int64_t type) {
  NormRows r(x, weight, bias, eps);
  STD_TORCH_CHECK(added.is_cpu() && added.is_contiguous() && added.dim() == 3 && added.size(0) == x.size(0) &&
                      added.size(1) == x.size(1) && added.size(2) == x.size(2), "nomax: the rows to add do not fit layer_norm's input");
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float && x.size(2) == r.stride && added.scalar_type() != ScalarType::Half &&
                      type != int64_t(Type::float16), "nomax: add_layer_norm_ takes float32 rows of whole vectors, and no float16");
  std::vector<float> level(size_t(added_bias ? r.stride : 0));
  if (added_bias) fill_row(level, *added_bias, x.size(2), "added_bias");
  Tensor out = empty("the result of layer_norm", {x.size(0), x.size(1), x.size(2)}, {0, 1, 2}, scalar_type(type));
  r.norm.result = Type(type);
  r.norm.out = out.data_ptr();
  r.norm.sum = x.data_ptr();
  r.norm.added = added.data_ptr();
  r.norm.added_type = type_of(added, "added");
  if (added_bias) r.norm.added_bias = level.data();
  const Kernel& k = kernel();
  if (!x.numel()) return out;
  run(row_tasks(r.rows, x.size(2)), 0, 12.0 * double(x.numel()), [&](const Task& task, void*) { k.norm_forward(r.norm, task); });
  return out;
}

// The gradients of x, of the weight and of the bias.
std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(Tensor grad, Tensor x, Tensor weight, Optional bias, Tensor statistics) {
  NormRows r(x, weight, bias, 0);
  const int64_t width = x.size(2);
  STD_TORCH_CHECK(grad.is_cpu() && grad.dim() == 3 && grad.stride(2) == 1 &&
                      grad.size(0) == x.size(0) && grad.size(1) == x.size(1) && grad.size(2) == width,
                  "nomax: the gradient does not fit layer_norm's input");
  STD_TORCH_CHECK(statistics.is_contiguous() && statistics.scalar_type() == ScalarType::Float && statistics.numel() == 2 * r.rows,
                  "nomax: the means do not fit layer_norm's input");
  Tensor out = empty("the gradient of layer_norm", {x.size(0), x.size(1), width}, {0, 1, 2}, x.scalar_type());
  Tensor grad_weight = empty("the gradient of the weight", {width}, {0}, ScalarType::Float);
  Tensor grad_bias = empty("the gradient of the bias", {bias ? width : 0}, {0}, ScalarType::Float);
  r.norm.out = out.data_ptr();
  r.norm.statistics = static_cast<float*>(statistics.data_ptr());
  r.norm.grad = grad.data_ptr();
  r.norm.result = type_of(grad, "grad");
  r.norm.grad_outer_stride = grad.stride(0);
  r.norm.grad_inner_stride = grad.stride(1);
  Memory partial = zeros("the sums of columns", product(pieces(r.rows, row_piece(width)), 2 * r.stride));
  std::vector<Task> tasks = row_tasks(r.rows, width, static_cast<float*>(partial.get()), 2 * r.stride);
  const Kernel& k = kernel();
  run(tasks, 0, 16.0 * double(x.numel()), [&](const Task& task, void*) { k.norm_backward(r.norm, task); });
  add_up(tasks, width, static_cast<float*>(grad_weight.data_ptr()));
  if (bias) add_up(tasks, width, static_cast<float*>(grad_bias.data_ptr()), r.stride);
  return {out, grad_weight, grad_bias};
}

CrossEntropy entropy_of(const Tensor& logits, const Tensor& labels, double smoothing) {
  STD_TORCH_CHECK(logits.is_cpu() && logits.dim() == 2 && logits.is_contiguous() && logits.size(1) > 0,
                  "nomax: cross_entropy takes contiguous rows on the CPU");
  STD_TORCH_CHECK(labels.is_cpu() && labels.is_contiguous() && labels.numel() == logits.size(0) &&
                      labels.scalar_type() == ScalarType::Long, "nomax: cross_entropy needs an int64 label for each row");
  const int64_t* values = static_cast<const int64_t*>(labels.data_ptr());
  for (int64_t i = 0; i < labels.numel(); i++)
    STD_TORCH_CHECK(values[i] >= 0 && values[i] < logits.size(1), "nomax: the label ", values[i], " is none of the ",
                    logits.size(1), " classes");
  return {logits.data_ptr(), type_of(logits, "logits"), logits.size(1), values, float(smoothing),
          nullptr, nullptr, nullptr, nullptr, nullptr, nullptr};
}

// Four numbers of each row: the loss, the loss without smoothing, 1 if the label has the largest logit, log Σ exp.
Tensor cross_entropy(Tensor logits, Tensor labels, double smoothing) {
  CrossEntropy c = entropy_of(logits, labels, smoothing);
  const int64_t rows = logits.size(0);
  Tensor out = empty("the losses", {4, rows}, {0, 1}, ScalarType::Float);
  c.loss = static_cast<float*>(out.data_ptr());
  c.nll = c.loss + rows;
  c.right = c.nll + rows;
  c.whole = c.right + rows;
  const Kernel& k = kernel();
  run(row_tasks(rows, c.classes), 0, 30.0 * double(logits.numel()), [&](const Task& t, void*) { k.entropy_forward(c, t); });
  return out;
}

Tensor cross_entropy_backward(Tensor grad, Tensor logits, Tensor labels, Tensor whole, double smoothing) {
  CrossEntropy c = entropy_of(logits, labels, smoothing);
  for (const Tensor* each : {&grad, &whole})
    STD_TORCH_CHECK(each->is_cpu() && each->is_contiguous() && each->numel() == logits.size(0) &&
                        each->scalar_type() == ScalarType::Float, "nomax: cross_entropy needs a float32 for each row");
  Tensor out = empty_like("the gradient of the logits", logits);
  c.grad = static_cast<const float*>(grad.data_ptr());
  c.whole = static_cast<float*>(whole.data_ptr());
  c.out = out.data_ptr();
  const Kernel& k = kernel();
  run(row_tasks(logits.size(0), c.classes), 0, 30.0 * double(logits.numel()),
      [&](const Task& t, void*) { k.entropy_backward(c, t); });
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
