// The cross-entropy of rows of logits with smoothed labels, and its gradient, without a second copy of the logits.
#pragma once
#include "layout.h"

namespace nomax {
namespace NOMAX_ISA {

constexpr int64_t LOGITS = 64 * W;      // read at a time

// Calls with(vector, place, lanes that count) for all logits of a row.
template <class With> NOMAX_INLINE void over_logits(const CrossEntropy& c, int64_t row, const With& with) {
  alignas(64) float buffer[LOGITS] = {};
  for (int64_t first = 0; first < c.classes; first += LOGITS) {
    const int64_t some = least(LOGITS, c.classes - first);
    read_row(c.logits, c.type, row * c.classes + first, 1, some, buffer);
    for (int64_t i = 0; i < some; i += W) with(load(buffer + i), counting() < int32_t(least(W, some - i)));
  }
}

static float largest_lane(Vec x) {
  float most = x[0];
  for (int i = 1; i < W; i++) most = x[i] > most ? x[i] : most;
  return most;
}

// Whether torch.argmax would name the label: it is the first of the largest.
static bool is_first(const CrossEntropy& c, int64_t row, int64_t label, float most) {
  if (number(c.logits, c.type, row * c.classes + label) != most) return false;
  int64_t before = label;
  Vec as_large{};
  over_logits(c, row, [&](Vec x, Int) {
    if (before > 0) as_large += where((x == most) & (counting() < int32_t(least(W, before))), all(1));
    before -= W;
  });
  return total(as_large) == 0;
}

static void entropy_forward(const CrossEntropy& c, const Task& task) {
  constexpr float INFINITE = __builtin_inff();
  for (int64_t row = task.first; row < task.first + task.count; row++) {
    const int64_t label = c.labels[row];
    Vec sums{}, most_of = all(-INFINITE), powers{};
    over_logits(c, row, [&](Vec x, Int there) {
      sums += where(there, x);
      const Vec known = choose(there, x, all(-INFINITE));
      most_of = known > most_of ? known : most_of;
    });
    const float sum = total(sums), most = largest_lane(most_of);
    over_logits(c, row, [&](Vec x, Int there) { powers += where(there, exponential(x - most)); });
    float whole = most + logarithm(all(total(powers)))[0];
    if (most == INFINITE || most == -INFINITE) whole = most;
    if (sum != sum) whole = sum;      // a NaN is in no maximum, but in every sum
    const float nll = whole - number(c.logits, c.type, row * c.classes + label);
    c.whole[row] = whole;
    c.nll[row] = nll;
    c.loss[row] = nll;
    if (c.smoothing != 0)      // zero times a mean that is not finite would not be zero
      c.loss[row] = (1 - c.smoothing) * nll + c.smoothing * (whole - sum / float(c.classes));
    c.right[row] = is_first(c, row, label, most) ? 1.0f : 0.0f;
  }
}

static void entropy_backward(const CrossEntropy& c, const Task& task) {
  alignas(64) float x[LOGITS] = {};
  const float spread = c.smoothing / float(c.classes);
  for (int64_t row = task.first; row < task.first + task.count; row++) {
    const float whole = c.whole[row], grad = c.grad[row];
    const int64_t label = c.labels[row], start = row * c.classes;
    for (int64_t first = 0; first < c.classes; first += LOGITS) {
      const int64_t some = least(LOGITS, c.classes - first);
      read_row(c.logits, c.type, start + first, 1, some, x);
      for (int64_t i = 0; i < some; i += W) store(x + i, exponential(at_most(0, load(x + i) - whole)) - spread);
      if (label >= first && label < first + some) x[label - first] -= 1 - c.smoothing;
      write_row(x, grad, some, c.out, c.type, start + first, 1);
    }
  }
}

}  // namespace NOMAX_ISA
}  // namespace nomax
