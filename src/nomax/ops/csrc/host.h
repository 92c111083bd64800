// What every operator needs on torch's side: which kernel, new tensors, memory, and how tasks go to threads. On torch's
// stable ABI, so that one binary serves every torch from 2.10 on.
#pragma once
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

// ---- tensors ---------------------------------------------------------------------------------------------------------
Type type_of(const Tensor& x, const char* name) {
  switch (x.scalar_type()) {
    case ScalarType::Float: return Type::float32;
    case ScalarType::BFloat16: return Type::bfloat16;
    case ScalarType::Half: return Type::float16;
    case ScalarType::Bool: return Type::boolean;
    default: STD_TORCH_CHECK(false, "nomax: ", name, " has a type that the CPU kernels do not know"); return Type::float32;
  }
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

int64_t pieces(int64_t count, int64_t size) { return (count + size - 1) / size; }

}  // namespace
}  // namespace nomax
