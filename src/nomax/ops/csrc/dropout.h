// Dropout of rows, added to other rows if there are any. Nothing is kept for the backward pass: it is the same function
// of the gradient, with the same coins.
#pragma once
#include "rows.h"

namespace nomax {
namespace NOMAX_ISA {

// A coin is a hash of (seed, row, column), as those of attention are: the same for any number of threads.
static void dropout(const Thinning& d, const Task& task) {
  constexpr int64_t PIECE = 32 * W;
  alignas(64) float x[PIECE] = {}, onto[PIECE] = {};      // once for a task: nobody else writes behind a row's end
  const Dropout thinning(d.share);
  const uint32_t seed = mix(mix(uint32_t(d.seed)) ^ uint32_t(d.seed >> 32));
  for (int64_t row = task.first; row < task.first + task.count; row++) {
    Row coins;
    coins.coin = mix(seed ^ uint32_t(row));
    coins.second_coin = mix(coins.coin ^ 0x9e3779b9u);
    for (int64_t first = 0; first < d.width; first += PIECE) {
      const int64_t some = least(PIECE, d.width - first), place = row * d.width + first;
      read_row(d.x, d.type, place, 1, some, x);
      if (d.onto) read_row(d.onto, d.onto_type, place, 1, some, onto);
      for (int64_t i = 0; i < some; i += W) {
        const Int kept = Dropout::kept(thinning, coins, counting() + int32_t(first + i));
        store(x + i, load(onto + i) + Dropout::thin(thinning, kept, load(x + i)));
      }
      write_row(x, 1, some, d.out, d.out_type, place, 1);
    }
  }
}

}  // namespace NOMAX_ISA
}  // namespace nomax
