// AVX512-BF16's dot product by other instructions, so that its branch of simd.h runs on CPUs that lack it.

#include <immintrin.h>

static inline __m512 emulated_dpbf16(__m512 acc, __m512bh a, __m512bh b) {
  typedef unsigned Pairs __attribute__((vector_size(64)));
  const Pairs x = (Pairs)a, y = (Pairs)b, upper = 0xffff0000u - Pairs{};
  acc += (__m512)(x & upper) * (__m512)(y & upper);
  return acc + (__m512)(x << 16) * (__m512)(y << 16);
}

#define __AVX512BF16__ 1
#define _mm512_dpbf16_ps emulated_dpbf16
