// One block of memory per thread, cut into aligned pieces. Counting and cutting are the same code, so they agree; a
// count that no int64 can hold stays at TOO_MANY_BYTES, which no allocation will grant.
#pragma once
#include "problem.h"
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace nomax {
namespace NOMAX_ISA {

struct Arena {
  char* base;
  int64_t used = 0;

  template <class T> T* take(int64_t rows, int64_t columns = 1) {
    T* piece = base ? reinterpret_cast<T*>(base + used) : nullptr;
    used = added(used, product(product(rows, columns), int64_t(sizeof(T))));
#if defined(__SANITIZE_ADDRESS__)      // a forbidden strip after each piece, so that one cannot run into the next
    if (base) __asan_poison_memory_region(base + used, 64);
    used += 64;
#endif
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
