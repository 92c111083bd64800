// One block of memory per thread, cut into aligned pieces. Counting and cutting are the same code, so they agree.
#pragma once
#include "problem.h"

namespace nomax {
namespace NOMAX_ISA {

struct Arena {
  char* base;
  int64_t used = 0;

  template <class T> T* take(int64_t count) {
    T* piece = reinterpret_cast<T*>(base + used);
    used += (count * int64_t(sizeof(T)) + 63) / 64 * 64;
    return piece;
  }
};

template <class Memory> int64_t bytes_of(const Problem& p) {
  Arena arena{nullptr};
  Memory memory(p, arena);
  return arena.used;
}

}  // namespace NOMAX_ISA
}  // namespace nomax
