// The operators of layers beside attention: looking up in a memory, and rows on their own (GELU, dropout, LayerNorm,
// cross-entropy).
#pragma once
#include "host.h"

namespace nomax {
namespace {

// In float32. Which slots make a task never depends on the number of threads.
Tensor look_up(Tensor x, Optional gates, Tensor keys, Tensor values, int64_t activation, double shift) {
  constexpr int64_t PIECE = 1 << 18, FEWEST = 16, UNIT = 128;      // numbers of a matrix in a task; tasks, if there are slots
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
  const int64_t most = std::min(PIECE / std::max(dim, int64_t(1)), slots / FEWEST);
  const int64_t piece = std::max(most / UNIT, int64_t(1)) * UNIT;
  const Kernel& k = kernel();
  const LookUp l{x.data_ptr(), gates ? gates->data_ptr() : nullptr, keys.data_ptr(), values.data_ptr(), type, tokens, dim,
                 Activation(activation), float(shift)};
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
