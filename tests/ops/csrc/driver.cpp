// The kernels of one instruction set against naive loops in double precision, without torch, so that sanitizers and
// emulators can watch them. Usage: driver [step [first]] runs every step-th case from the first on.
//
// Every input is a small multiple of 1/8 and the scale is a power of two. So one set of inputs is exact in all three
// types, every score is exact too, and no rounding can push a score across the kink of a relu: whatever differs from
// the loops by more than the rounding of weights, sums and results is a bug.
//
// Each tensor is an allocation of its own that ends with its last element, and all that a kernel must not read or has
// yet to write is poisoned: all ones is a NaN in every floating type.
#include "naive.h"

namespace {

// ---- memory as the kernels see it -----------------------------------------------------------------------------------
int64_t size_of(Type type) { return type == Type::float32 ? 4 : type == Type::boolean ? 1 : 2; }

Shape strides(const Shape& shape, Layout layout) {
  const auto [batches, heads, rows, columns] = shape;
  switch (layout) {
    case Layout::contiguous: return {heads * rows * columns, rows * columns, columns, 1};
    case Layout::heads_last: return {heads * rows * columns, columns, heads * columns, 1};
    case Layout::interleaved: return {3 * heads * rows * columns, columns, 3 * heads * columns, 1};      // [B,L,3,H,D]
    case Layout::columns_apart: return {heads * rows * columns, rows * columns, 1, rows};
    case Layout::shifted: return {heads * rows * (columns + 1), rows * (columns + 1), columns + 1, 1};
    case Layout::expanded: break;
  }
  return {};
}

// For numbers that the type can hold exactly.
uint16_t to_float16(double x) {
  if (std::isnan(x)) return 0x7e00;
  const int sign = std::signbit(x) ? 0x8000 : 0, exponent = std::ilogb(x);
  if (x == 0 || std::isinf(x)) return uint16_t(sign | (x == 0 ? 0 : 0x7c00));
  return uint16_t(sign | (exponent + 15) << 10 | int(std::ldexp(std::fabs(x), 10 - exponent) - 1024));
}

double from_float16(uint16_t x) {
  const int exponent = x >> 10 & 31, fraction = x & 1023;
  const double size = std::ldexp(fraction + (exponent ? 1024 : 0), (exponent ? exponent : 1) - 25);
  return (x & 0x8000 ? -1 : 1) * (exponent < 31 ? size : fraction ? NAN : INFINITY);
}

struct Tensor {
  Shape shape, stride;
  Type type;
  int64_t start;                           // shifted: one element late, so that pairs lie at odd addresses
  std::vector<uint8_t> memory;

  Tensor(const Shape& s, Type t, Layout layout)
      : shape(s), stride(strides(s, layout)), type(t), start(layout == Layout::shifted) {
    int64_t last = start;
    for (size_t d = 0; d < 4; d++) last += (shape[d] - 1) * stride[d];
    const bool empty = std::count(shape.begin(), shape.end(), 0);
    memory.assign(size_t(empty ? 0 : (last + 1) * size_of(type)), 0xff);
  }
  Tensor(const Dense& numbers, Type t, Layout layout) : Tensor(numbers.shape, t, layout) { set(numbers); }

  template <class Do> void for_each(const Do& act) const {
    size_t count = 0;
    for (int64_t b = 0; b < shape[0]; b++)
      for (int64_t h = 0; h < shape[1]; h++)
        for (int64_t r = 0; r < shape[2]; r++)
          for (int64_t c = 0; c < shape[3]; c++)
            act(count++, start + b * stride[0] + h * stride[1] + r * stride[2] + c * stride[3]);
  }
  template <class T> T* as() { return reinterpret_cast<T*>(memory.data()); }

  void set(const Dense& numbers) {
    for_each([&](size_t i, int64_t place) { set(place, numbers.values[i]); });
  }
  // What a float mask hides, it hides with minus infinity or with the type's lowest number.
  void set(int64_t place, double x) {
    const bool lowest = std::isinf(x) && place % 2;
    if (type == Type::boolean) as<uint8_t>()[place] = x == 0;
    if (type == Type::float32) as<float>()[place] = lowest ? -0x1.fffffep127f : float(x);
    if (type == Type::float16) as<uint16_t>()[place] = to_float16(lowest ? -65504 : x);
    if (type == Type::bfloat16)
      as<uint16_t>()[place] = uint16_t(__builtin_bit_cast(uint32_t, lowest ? -0x1.fep127f : float(x)) >> 16);
  }
  double get(int64_t place) {
    if (type == Type::float32) return as<float>()[place];
    if (type == Type::float16) return from_float16(as<uint16_t>()[place]);
    return __builtin_bit_cast(float, uint32_t(as<uint16_t>()[place]) << 16);
  }

  // As the binding has it: the stride of a dimension of size 1 is 0, but among the columns only of a mask.
  View view(bool is_mask = false) {
    auto step = [&](size_t d) { return shape[d] == 1 && (d < 3 || is_mask) ? 0 : stride[d]; };
    return {as<char>() + start * size_of(type), type, step(0), step(1), step(2), step(3)};
  }

  // What is wrong with it, or nothing. Poisons each element again, so that what is left was written beside them.
  std::string difference(const char* name, const Totals& want, double slack) {
    const double rounding = type == Type::float32 ? 0x1p-24 : type == Type::bfloat16 ? 0x1p-8 : 0x1p-11;
    const double smallest = type == Type::float16 ? 0x1p-25 : 0;
    std::string text;
    for_each([&](size_t i, int64_t place) {
      const double got = get(place), bound = rounding * std::fabs(want.value[i]) + slack * want.size[i] + smallest;
      const bool right = std::isnan(want.value[i]) ? std::isnan(got) : std::fabs(got - want.value[i]) <= bound;
      if (!right && text.empty())
        text = std::string(name) + " " + std::to_string(i) + " is " + std::to_string(got) + ", should be " +
               std::to_string(want.value[i]) + ", give or take " + std::to_string(bound);
      std::fill_n(memory.begin() + place * size_of(type), size_of(type), 0xff);
    });
    const bool clean = std::all_of(memory.begin(), memory.end(), [](uint8_t byte) { return byte == 0xff; });
    return !text.empty() || clean ? text : std::string(name) + " has company: memory beside its elements was written";
  }
};

// ---- the kernels, called as the binding calls them ------------------------------------------------------------------
template <class Entry> void execute(const Entry& entry, int64_t bytes, const Problem& p, const Task& task) {
  void* const workspace = std::aligned_alloc(64, size_t(bytes));
  entry(p, task, std::memset(workspace, 0xff, size_t(bytes)));
  std::free(workspace);
}

struct Run {
  const Case& c;
  const Inputs& in;
  Type type;
  Tensor query{in.query, type, c.layout}, key{in.key, type, c.layout}, value{in.value, type, c.layout};
  Tensor grad_out{in.grad_out, type, c.expanded_grad ? Layout::expanded : c.layout};
  Tensor mask{in.mask, c.mask_type, c.layout};
  Tensor row_gain = rows(in.row_gain), row_shift = rows(in.row_shift);
  Tensor grad_row_sum = rows(in.grad_row_sum), grad_row_log = rows(in.grad_row_log);
  Tensor out{in.grad_out.shape, type, c.layout == Layout::contiguous ? Layout::heads_last : c.layout};
  Tensor row_sum{in.grad_row_sum.shape, Type::float32, Layout::contiguous}, row_log = row_sum;
  Tensor grad_query{in.query.shape, type, c.layout}, grad_key{in.key.shape, type, c.layout};
  Tensor grad_value{in.value.shape, type, c.layout}, grad_bias = rows(Dense(in.mask.shape));
  Problem p = problem();
  int64_t group = c.heads / c.key_heads;
  // Pairs are rounded to bfloat16 before they are multiplied; everything else happens in float32.
  double slack = FLOAT_SLACK + (paired && type == Type::bfloat16 ? 0x1p-8 : 0);

  static Tensor rows(const Dense& numbers) { return Tensor(numbers, Type::float32, Layout::contiguous); }

  Problem problem() {
    Problem made{c.batch, c.heads, c.key_heads, c.queries, c.keys, c.dim, c.value_dim};
    if (c.packed()) made.query_offsets = c.query_offsets.data(), made.key_offsets = c.key_offsets.data();
    made.activation = c.activation, made.scale = in.scale, made.gain = in.gain, made.shift = c.shift;
    made.causal = c.diagonal.has_value(), made.diagonal = c.diagonal.value_or(0);
    made.dropout = c.dropout, made.seed = SEED, made.shares = c.shares;
    made.query = query.view(), made.key = key.view(), made.value = value.view(), made.out = out.view();
    if (in.mask) made.mask = mask.view(true);
    if (in.row_gain) made.row_gain = row_gain.view(), made.row_shift = row_shift.view();
    if (c.statistics) made.row_sum = row_sum.as<float>(), made.row_log = row_log.as<float>();
    made.grad_out = grad_out.view(), made.grad_query = grad_query.view();
    made.grad_key = grad_key.view(), made.grad_value = grad_value.view(), made.grad_bias = grad_bias.as<float>();
    if (c.statistics) made.grad_row_sum = grad_row_sum.as<float>(), made.grad_row_log = grad_row_log.as<float>();
    std::copy(in.mask.shape.begin(), in.mask.shape.end(), made.bias_shape);
    return made;
  }

  void forward(int64_t piece) {
    const int64_t bytes = kernel.forward_bytes(p);
    std::fill(out.memory.begin(), out.memory.end(), 0xff);
    for (const Sequence& s : sequences(c))
      for (int64_t head = 0; head < c.key_heads; head++)
        for (int64_t first = 0, rows = group * s.queries; first < rows; first += piece)
          execute(kernel.forward, bytes, p, {s.index, head, first, std::min(piece, rows - first), nullptr});
  }

  // With several shares, the rows are walked over in parts, too.
  void backward() {
    if (in.mask) grad_key.set(Dense(in.key.shape)), grad_value.set(Dense(in.value.shape));      // some are not visited
    if (c.shares > 1) p.rows = 50;
    for (const Sequence& s : sequences(c))
      for (int64_t head = 0; head < c.key_heads; head++)
        if (!backward(s, head, false)) backward(s, head, true);
  }

  bool backward(const Sequence& s, int64_t head, bool careful) {
    const int64_t width = kernel.width(c.dim), piece = (s.keys + c.shares * 16 - 1) / (c.shares * 16) * 16;
    const int64_t room = type == Type::float32 ? 0 : piece * (width + kernel.width(c.value_dim));
    std::vector<float> waiting(size_t(c.shares * room), NAN);
    bool right = true;
    const auto run = [&](const Problem& p, const Task& task, void* memory) {
      right &= kernel.backward(p, task, memory, careful);
    };
    for (p.first_row = 0; p.first_row == 0 || p.first_row < s.queries; p.first_row += p.rows) {
      const int64_t rows = group * std::min(p.rows, s.queries - p.first_row), share = rows * width;
      std::vector<float> partial(size_t(c.shares > 1 ? c.shares * share : 0), NAN);
      for (int64_t i = 0; i < c.shares; i++)
        execute(run, kernel.backward_bytes(p), p,
                {s.index, head, i * piece, piece, c.shares > 1 ? partial.data() + i * share : nullptr,
                 room ? waiting.data() + i * room : nullptr});
      for (int64_t first = 0; c.shares > 1 && first < rows; first += ROW_BLOCK)
        kernel.reduce(p, {s.index, head, first, std::min(ROW_BLOCK, rows - first), partial.data()});
    }
    p.first_row = 0;
    return right;
  }

  void bias() {
    const int64_t cut = p.bias_shape[2] > 1 ? p.bias_shape[2] : p.bias_shape[3];
    for (int64_t b = 0; b < p.bias_shape[0]; b++)
      for (int64_t head = 0; head < p.bias_shape[1]; head++)
        for (int64_t first = 0; first < cut; first += BIAS_BLOCK)
          execute(kernel.bias, kernel.bias_bytes(p), p, {b, head, first, std::min(BIAS_BLOCK, cut - first), nullptr});
  }

  void linear() {
    constexpr int64_t PIECE = 100;
    p.shares = std::max(int64_t(1), (c.keys + PIECE - 1) / PIECE);
    const int64_t state = c.dim * kernel.width(c.value_dim), bytes = kernel.linear_bytes(p);
    for (int64_t b = 0; b < c.batch; b++)
      for (int64_t head = 0; head < c.heads; head++) {
        std::vector<float> partial(size_t(p.shares * state), NAN);
        for (int64_t i = 0; i < p.shares; i++)
          execute(kernel.linear_keys, bytes, p,
                  {b, head / group, i * PIECE, std::min(PIECE, c.keys - i * PIECE), &partial[size_t(i * state)]});
        for (int64_t first = 0; first < c.queries; first += PIECE)
          execute(kernel.linear_queries, bytes, p,
                  {b, head, first, std::min(PIECE, c.queries - first), partial.data()});
      }
  }

  // The first thing that is wrong, or nothing.
  std::string check(const Answer& want) {
    std::string text;
    auto note = [&](const std::string& found) { text = text.empty() ? found : text; };
    forward(48);
    const std::vector<uint8_t> cut_finely = out.memory;
    forward(ROW_BLOCK / 6 * 6);
    if (out.memory != cut_finely) note("out depends on how its rows are cut into tasks");
    note(out.difference("out", want.out, slack));
    if (c.statistics) note(row_sum.difference("row_sum", want.row_sum, FLOAT_SLACK));
    if (c.statistics) note(row_log.difference("row_log", want.row_log, FLOAT_SLACK));
    if (c.queries && c.keys) {
      backward();
      note(grad_query.difference("grad_query", want.grad_query, slack));
      note(grad_key.difference("grad_key", want.grad_key, slack));
      note(grad_value.difference("grad_value", want.grad_value, slack));
      if (in.mask && c.mask_type != Type::boolean)
        bias(), note(grad_bias.difference("grad_bias", want.grad_bias, FLOAT_SLACK));
    }
    if (c.linear()) linear(), note(out.difference("linear out", want.out, FLOAT_SLACK));
    return text;
  }
};

// GELU of rows of numbers from -9 to 9, and its gradient, cut into two tasks; in place where no gradient is wanted.
std::string check_gelu(Type type, bool tanh, bool with_bias, int64_t rows, int64_t width) {
  Dense x(Shape{1, 1, rows, width}), grad(x.shape);
  Totals value(size_t(rows), width), slope(size_t(rows), width);
  std::vector<float> bias(size_t(width), 0);
  for (int64_t i = 0; i < rows * width; i++) {
    const double raw = double((i * 37) % 129 - 64) / 8, g = double(i % 9 - 4) / 4, a = std::sqrt(2 / M_PI);
    if (with_bias) bias[size_t(i % width)] = float(i % width % 7) / 8;
    const double t = raw + double(bias[size_t(i % width)]);
    const double inner = std::tanh(a * (t + 0.044715 * t * t * t)), normal = std::erfc(-t / std::sqrt(2.0)) / 2;
    const size_t place = size_t(i);
    x.values[place] = raw;
    grad.values[place] = g;
    value.size[place] = slope.size[place] = 1 + std::fabs(t);
    value.value[place] = tanh ? t * (1 + inner) / 2 : t * normal;
    slope.value[place] =
        g * (tanh ? (1 + inner) / 2 + t * (1 - inner * inner) * a * (1 + 3 * 0.044715 * t * t) / 2
                  : normal + t * std::exp(-t * t / 2) / std::sqrt(2 * M_PI));
  }
  const Tensor gradient(grad, type, Layout::contiguous);
  for (const bool backward : {true, false}) {
    Tensor in(x, type, Layout::contiguous), other(x.shape, type, Layout::contiguous);
    Tensor& out = backward ? other : in;
    const Elements e{in.memory.data(), backward ? gradient.memory.data() : nullptr, out.memory.data(), type, width,
                     with_bias ? bias.data() : nullptr, tanh};
    const int64_t stride = kernel.width(width);
    std::vector<float> sums(size_t(GELU_SUMS * stride), 0);
    kernel.gelu(e, {0, 0, 0, rows / 3, backward ? sums.data() : nullptr});
    kernel.gelu(e, {0, 0, rows / 3, rows - rows / 3, backward ? sums.data() : nullptr});
    const std::string wrong = out.difference(backward ? "gelu gradient" : "gelu", backward ? slope : value, FLOAT_SLACK);
    if (!wrong.empty()) return wrong;
    for (int64_t column = 0; backward && column < width; column++) {
      double sum = 0, size = 0;
      for (int64_t i = column; i < rows * width; i += width) sum += slope.value[size_t(i)], size += slope.size[size_t(i)];
      for (int64_t turn = 0; turn < GELU_SUMS; turn++) sum -= double(sums[size_t(turn * stride + column)]);
      if (!(std::fabs(sum) <= FLOAT_SLACK * size)) return "the bias's gradient";
    }
  }
  return "";
}

// A quarter dropped, and the rest added to float32, cut into two tasks.
std::string check_dropout(Type type, bool with_onto, int64_t width) {
  const int64_t rows = 5;
  Dense x(Shape{1, 1, rows, width}), onto(x.shape);
  Totals want(size_t(rows), width);
  const uint64_t start = mix(mix(SEED & 0xffffffff) ^ SEED >> 32);
  for (int64_t i = 0; i < rows * width; i++) {
    const size_t place = size_t(i);
    x.values[place] = double((i * 37) % 129 - 64) / 8;
    onto.values[place] = double(i % 9 - 4) / 4;
    const uint64_t row = mix(start ^ uint64_t(i / width));
    const uint64_t bits = mix((mix(uint64_t(i % width) ^ row) + mix(row ^ 0x9e3779b9)) & 0xffffffff);
    want.value[place] = (with_onto ? onto.values[place] : 0) + (bits >= uint64_t(1) << 30 ? x.values[place] / 0.75 : 0);
    want.size[place] = 16;
  }
  const Tensor in(x, type, Layout::contiguous), below(onto, Type::float32, Layout::contiguous);
  Tensor out(x.shape, type, Layout::contiguous);
  const Thinning d{in.memory.data(), with_onto ? below.memory.data() : nullptr, type, Type::float32, type,
                   out.memory.data(), width, 0.25, SEED};
  kernel.dropout(d, {0, 0, 0, 2, nullptr});
  kernel.dropout(d, {0, 0, 2, rows - 2, nullptr});
  return out.difference("dropout", want, FLOAT_SLACK);
}

// A memory of 70 slots, cut into two tasks. Slots that no token needs hold NaNs.
std::string check_look_up(Type type, bool gated, int64_t tokens, int64_t dim) {
  constexpr int64_t SLOTS = 70, FIRST = 40;
  constexpr double SHIFT = -1;
  Dense x(Shape{1, 1, tokens, dim}), keys(Shape{1, 1, SLOTS, dim}), gates(keys.shape), values(keys.shape);
  Totals want(size_t(tokens), dim);
  uint32_t state = 1;
  for (Dense* each : {&x, &keys, &gates, &values})
    for (double& number : each->values) number = double(int((state = state * 1664525 + 1013904223) >> 28) - 8) / 8;
  const auto product = [&](const Dense& rows, int64_t r, int64_t s) {
    double sum = 0;
    for (int64_t c = 0; c < dim; c++) sum += x.values[size_t(r * dim + c)] * rows.values[size_t(s * dim + c)];
    return sum;
  };
  for (int64_t s = 0; s < SLOTS; s++) {
    bool needed = false;
    for (int64_t r = 0; r < tokens; r++) {
      const double h = std::max(0.0, product(gated ? gates : keys, r, s) + SHIFT);
      const double weight = gated ? h * product(keys, r, s) : h;
      needed |= h > 0;
      want.add(size_t(r * dim), weight, gated ? h * double(dim) : std::fabs(weight), &values.values[size_t(s * dim)]);
    }
    if (needed) continue;
    std::fill_n(values.values.begin() + s * dim, dim, NAN);
    if (gated) std::fill_n(keys.values.begin() + s * dim, dim, NAN);
  }
  Tensor tx(x, type, Layout::contiguous), tk(keys, type, Layout::contiguous), tg(gates, type, Layout::contiguous);
  Tensor tv(values, type, Layout::contiguous), out(x.shape, Type::float32, Layout::contiguous);
  const LookUp l{tx.memory.data(), gated ? tg.memory.data() : nullptr, tk.memory.data(), tv.memory.data(), type, tokens,
                 dim, Activation::relu, float(SHIFT)};
  const int64_t stride = 2 * kernel.width((dim + 1) / 2), bytes = kernel.look_up_bytes(l);
  std::vector<float> partial(size_t(2 * tokens * stride), NAN);
  for (const bool second : {false, true}) {
    void* const workspace = std::aligned_alloc(64, size_t(bytes));
    kernel.look_up(l, {0, 0, second ? FIRST : 0, second ? SLOTS - FIRST : FIRST, &partial[size_t(second * tokens * stride)]},
                   std::memset(workspace, 0xff, size_t(bytes)));
    std::free(workspace);
  }
  for (int64_t i = 0; i < tokens * dim; i++) {
    const size_t place = size_t(i / dim * stride + i % dim);
    out.as<float>()[i] = partial[place] + partial[place + size_t(tokens * stride)];
  }
  return out.difference("look_up", want, FLOAT_SLACK);
}

// Rows of [3, 2, width] that lie apart from each other; and so do those of the gradient.
std::string check_norm(Type type, Type result, bool with_bias, int64_t width) {
  constexpr int64_t OUTER = 3, INNER = 2, ROWS = OUTER * INNER;
  const int64_t stride = kernel.width(width);
  Dense x(Shape{1, OUTER, INNER + 1, width}), grad(x.shape);
  Totals value(ROWS, width), slope(ROWS, width);
  std::vector<float> weight(size_t(stride), 0), bias(size_t(stride), 0), partial(size_t(2 * stride), 0), statistics(2 * ROWS);
  std::vector<double> to_weight(size_t(width), 0), to_bias(size_t(width), 0), sizes(size_t(width), 0);
  for (size_t i = 0; i < x.values.size(); i++) {
    x.values[i] = double((i * 37) % 129) / 8 - 8;
    grad.values[i] = double(i % 9) / 4 - 1;
  }
  for (int64_t i = 0; i < width; i++) {
    weight[size_t(i)] = float(i % 5 + 1) / 4;
    bias[size_t(i)] = with_bias ? float(i % 7) / 8 : 0;
  }
  for (int64_t row = 0; row < ROWS; row++) {
    const double* from = &x.values[size_t((row / INNER * (INNER + 1) + row % INNER) * width)];
    const double* g = &grad.values[size_t((row / INNER * (INNER + 1) + row % INNER) * width)];
    double mean = 0, square = 0, level = 0, tilt = 0;
    for (int64_t i = 0; i < width; i++) mean += from[i] / double(width);
    for (int64_t i = 0; i < width; i++) square += (from[i] - mean) * (from[i] - mean) / double(width);
    const double scale = 1 / std::sqrt(square + 1e-6);
    const auto normal = [&](int64_t i) { return (from[i] - mean) * scale; };
    for (int64_t i = 0; i < width; i++) {
      level += g[i] * double(weight[size_t(i)]) / double(width);
      tilt += g[i] * double(weight[size_t(i)]) * normal(i) / double(width);
      to_weight[size_t(i)] += g[i] * normal(i);
      to_bias[size_t(i)] += g[i];
      sizes[size_t(i)] += std::fabs(g[i]) * (1 + std::fabs(normal(i)));
    }
    for (int64_t i = 0; i < width; i++) {
      const size_t place = size_t(row * width + i);
      const double weighted = g[i] * double(weight[size_t(i)]);
      value.value[place] = normal(i) * double(weight[size_t(i)]) + double(bias[size_t(i)]);
      value.size[place] = 8 * (1 + scale) * (1 + std::fabs(normal(i)));      // x goes up to 8
      slope.value[place] = (weighted - level - normal(i) * tilt) * scale;
      slope.size[place] = 8 * (1 + scale) * (std::fabs(weighted) + std::fabs(level) + (1 + std::fabs(normal(i))) * (1 + std::fabs(tilt)));
    }
  }
  const Tensor in(x, type, Layout::contiguous), gradient(grad, result, Layout::contiguous);
  Tensor out(Shape{1, 1, ROWS, width}, result, Layout::contiguous), grad_x(out.shape, type, Layout::contiguous);
  Norm n{in.memory.data(), type, INNER, width, (INNER + 1) * width, width, weight.data(), with_bias ? bias.data() : nullptr,
         1e-6f, statistics.data(), out.memory.data(), gradient.memory.data(), (INNER + 1) * width, width,
         result};
  kernel.norm_forward(n, {0, 0, 0, 1, nullptr});
  kernel.norm_forward(n, {0, 0, 1, ROWS - 1, nullptr});
  std::string wrong = out.difference("layer_norm", value, FLOAT_SLACK);
  if (!wrong.empty()) return wrong;
  n.out = grad_x.memory.data();
  kernel.norm_backward(n, {0, 0, 0, 1, partial.data()});
  kernel.norm_backward(n, {0, 0, 1, ROWS - 1, partial.data()});
  wrong = grad_x.difference("layer_norm's gradient", slope, FLOAT_SLACK);
  if (!wrong.empty()) return wrong;
  for (int64_t i = 0; i < width; i++) {
    const double bound = 8 * FLOAT_SLACK * sizes[size_t(i)];
    if (!(std::fabs(double(partial[size_t(i)]) - to_weight[size_t(i)]) <= bound)) return "the weight's gradient";
    if (with_bias && !(std::fabs(double(partial[size_t(stride + i)]) - to_bias[size_t(i)]) <= bound)) return "the bias's gradient";
  }
  return "";
}

// The first row's label is its largest logit, the second's one as large after it, the third's any.
std::string check_entropy(Type type, double smoothing, int64_t classes) {
  constexpr int64_t ROWS = 3;
  Dense x(Shape{1, 1, ROWS, classes});
  Totals slope(ROWS, classes), losses(4, ROWS);
  const std::vector<float> grad{0.5f, 2, -1};
  std::vector<int64_t> labels(ROWS, classes / 2);
  for (size_t i = 0; i < x.values.size(); i++) x.values[i] = double((i * 37) % 129) / 16 - 4;
  x.values[size_t(labels[0])] = x.values[size_t(classes + labels[1])] = x.values[size_t(classes)] = 5;
  for (int64_t row = 0; row < ROWS; row++) {
    const double* from = &x.values[size_t(row * classes)];
    double sum = 0, mean = 0;
    bool right = true;
    for (int64_t i = 0; i < classes; i++) sum += std::exp(from[i]), mean += from[i] / double(classes);
    for (int64_t i = 0; i < classes; i++)
      right = right && (from[i] < from[labels[size_t(row)]] || (from[i] == from[labels[size_t(row)]] && i >= labels[size_t(row)]));
    const double whole = std::log(sum), nll = whole - from[labels[size_t(row)]];
    const double wanted[4] = {(1 - smoothing) * nll + smoothing * (whole - mean), nll, right ? 1.0 : 0.0, whole};
    for (int64_t i = 0; i < 4; i++) losses.value[size_t(i * ROWS + row)] = wanted[i], losses.size[size_t(i * ROWS + row)] = 16;
    for (int64_t i = 0; i < classes; i++) {
      const double share = (i == labels[size_t(row)] ? 1 - smoothing : 0) + smoothing / double(classes);
      slope.value[size_t(row * classes + i)] = double(grad[size_t(row)]) * (std::exp(from[i] - whole) - share);
      slope.size[size_t(row * classes + i)] = 16 * (std::exp(from[i] - whole) + share);
    }
  }
  const Tensor in(x, type, Layout::contiguous);
  Tensor out(x.shape, type, Layout::contiguous), rows(Shape{1, 1, 4, ROWS}, Type::float32, Layout::contiguous);
  float* numbers = reinterpret_cast<float*>(rows.memory.data());
  const CrossEntropy c{in.memory.data(), type, classes, labels.data(), float(smoothing), numbers + 3 * ROWS, numbers,
                       numbers + ROWS, numbers + 2 * ROWS, grad.data(), out.memory.data()};
  kernel.entropy_forward(c, {0, 0, 0, ROWS, nullptr});
  kernel.entropy_backward(c, {0, 0, 0, 1, nullptr});      // it reads what the forward pass wrote
  kernel.entropy_backward(c, {0, 0, 1, ROWS - 1, nullptr});
  const std::string wrong = rows.difference("cross_entropy", losses, FLOAT_SLACK);
  return wrong.empty() ? out.difference("cross_entropy's gradient", slope, FLOAT_SLACK) : wrong;
}

}  // namespace

int main(int count, char** arguments) {
  const int step = count > 1 ? std::atoi(arguments[1]) : 1, first = count > 2 ? std::atoi(arguments[2]) : 0;
  const std::vector<Case> cases = all_cases();
  int passed = 0, failed = 0;
  for (size_t i = size_t(first); i < cases.size(); i += size_t(step)) {
    const Inputs in = random_inputs(cases[i]);
    const Answer want = naive(cases[i], in);
    for (Type type : {Type::float32, Type::bfloat16, Type::float16}) {
      const std::string wrong = Run{cases[i], in, type}.check(want);
      (wrong.empty() ? passed : failed)++;
      if (wrong.empty()) continue;
      std::printf("case %zu (%s, %s): %s\n", i, cases[i].name.c_str(), type_names[int(type)], wrong.c_str());
    }
  }
  for (Type type : {Type::float32, Type::bfloat16, Type::float16})
    for (const int64_t width : {1, 7, 16, 257, 1030})
      for (const int way : {0, 1, 2, 3}) {
        const std::string wrong = check_gelu(type, way & 1, way & 2, 4, width);
        (wrong.empty() ? passed : failed)++;
        if (!wrong.empty()) std::printf("gelu %d of %d (%s): %s\n", way, int(width), type_names[int(type)], wrong.c_str());
      }
  for (Type type : {Type::float32, Type::bfloat16, Type::float16})
    for (const int64_t width : {1, 7, 16, 32, 64, 128, 257})
      for (const bool second : {false, true})
        for (const std::string& wrong : {check_norm(type, type, second, width), check_norm(Type::float32, type, second, width),
                                         check_entropy(type, second ? 0.1 : 0, width),
                                         check_dropout(type, second, width)}) {
          (wrong.empty() ? passed : failed)++;
          if (!wrong.empty()) std::printf("rows of %d (%s): %s\n", int(width), type_names[int(type)], wrong.c_str());
        }
  for (Type type : {Type::float32, Type::bfloat16})
    for (const bool gated : {false, true})
      for (const int64_t tokens : {1, 2, 3, 4, 5, 6})
        for (const int64_t dim : {1, 7, 16, 32, 64, 131}) {
          const std::string wrong = check_look_up(type, gated, tokens, dim);
          (wrong.empty() ? passed : failed)++;
          if (!wrong.empty()) std::printf("look_up %d of %d (%s): %s\n", int(tokens), int(dim), type_names[int(type)], wrong.c_str());
        }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed ? 1 : 0;
}
