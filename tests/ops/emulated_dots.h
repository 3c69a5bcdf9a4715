// The dot products of AVX512-BF16 and AVX512-VNNI by other instructions, so that their branches of simd.h run on CPUs
// that lack them.

#include <immintrin.h>

static inline __m512 emulated_dpbf16(__m512 acc, __m512bh a, __m512bh b) {
  typedef unsigned Pairs __attribute__((vector_size(64)));
  const Pairs x = (Pairs)a, y = (Pairs)b, upper = 0xffff0000u - Pairs{};
  acc += (__m512)(x & upper) * (__m512)(y & upper);
  return acc + (__m512)(x << 16) * (__m512)(y << 16);
}

static inline __m512i emulated_dpbusd(__m512i acc, __m512i a, __m512i b) {
  typedef unsigned Unsigned __attribute__((vector_size(64)));
  typedef int Signed __attribute__((vector_size(64)));
  Signed sums = (Signed)acc;
  for (int byte = 0; byte < 4; ++byte) {
    const Signed x = (Signed)((Unsigned)a >> (8 * byte) & 255), y = (Signed)((Unsigned)b << (24 - 8 * byte)) >> 24;
    sums += x * y;
  }
  return (__m512i)sums;
}

#define __AVX512BF16__ 1
#define __AVX512VNNI__ 1
#define _mm512_dpbf16_ps emulated_dpbf16
#define _mm512_dpbusd_epi32 emulated_dpbusd
