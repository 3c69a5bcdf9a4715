// Sixteen numbers at a time, on whatever the compiler targets.
//
// A vector here is GCC's and Clang's own vector type of 16 floats: one register with AVX-512, two with AVX2,
// four with SSE or NEON. The only intrinsics in this folder are the two dot products below, of bfloat16 and of int8,
// and each has a plain twin.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX512BF16__) || defined(__AVX512VNNI__)
#include <immintrin.h>
#endif

namespace miniserve {

constexpr int kLanes = 16;

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Bits __attribute__((vector_size(64)));

template <class V>
inline V load_as(const void* p) {  // from any address
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline Floats load(const float* p) { return load_as<Floats>(p); }
inline Ints load(const int32_t* p) { return load_as<Ints>(p); }
inline void store(float* p, Floats v) { std::memcpy(p, &v, sizeof v); }
inline void store(int32_t* p, Ints v) { std::memcpy(p, &v, sizeof v); }
inline Floats to_floats(Floats v) { return v; }
inline Floats to_floats(Ints v) { return __builtin_convertvector(v, Floats); }
inline Floats splat(float x) { return x - Floats{}; }

inline float sum(Floats v) {
  float total = 0;
  for (int i = 0; i < kLanes; ++i) total += v[i];
  return total;
}

inline Floats max(Floats a, Floats b) { return a > b ? a : b; }

inline float max(Floats v) {  // halves, quarters, ...: four steps, not fifteen
  typedef float Eight __attribute__((vector_size(32)));
  typedef float Four __attribute__((vector_size(16)));
  Eight eight[2];
  std::memcpy(eight, &v, sizeof v);
  const Eight best8 = eight[0] > eight[1] ? eight[0] : eight[1];
  Four four[2];
  std::memcpy(four, &best8, sizeof best8);
  const Four best4 = four[0] > four[1] ? four[0] : four[1];
  const float a = best4[0] > best4[1] ? best4[0] : best4[1], b = best4[2] > best4[3] ? best4[2] : best4[3];
  return a > b ? a : b;
}

// e^x within 2 ulp; 0 below -87, so that e^(-inf) = 0 and a masked score costs nothing; e^88 (1.7e38) above 88, where
// the exponent would run out of its bits.
inline Floats exp(Floats x) {
  x = x > 88.0f ? splat(88.0f) : x;
  const Floats log2e = splat(1.44269504f), big = splat(12582912.f);  // 1.5 * 2^23: adding it rounds to a whole number
  Floats n = (x * log2e + big) - big;
  Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;  // ln 2 in two parts
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  Ints exponent = (__builtin_convertvector(n, Ints) + 127) << 23;
  return x < -87.0f ? Floats{} : p * (Floats)exponent;
}

inline Floats tanh(Floats x) {
  Floats clamped = x > 9.0f ? splat(9.0f) : (x < -9.0f ? splat(-9.0f) : x);  // beyond, tanh is 1 in float
  Floats e = exp(2.0f * clamped);
  return (e - 1.0f) / (e + 1.0f);
}

// ---------------------------------------------------------------------------------------------------------------
// How numbers are stored, and how a stored vector meets an activation.
//
// Weights, keys and values lie so that one load gives 16 outputs times `kPack` consecutive inputs:
//
//     Float32   kPack 1   w0 w1 w2 ... w15                     (input k)
//     BFloat16  kPack 2   w0 w0' w1 w1' ... w15 w15'           (inputs k and k + 1, side by side)
//     Int8      kPack 4   w0 w0' w0'' w0''' ... w15'''         (see matmul.h and attention.h for the scales)
//
// `Lhs` is the activations' side: kPack inputs of one row. `dot` adds their products to 16 running sums, always
// in the order of the inputs; so a row's result never depends on which other rows are computed with it.

struct Float32 {
  typedef float Stored, Sum;
  static constexpr int kPack = 1;
  struct Lhs {
    float x;
  };
  typedef Floats Loaded;

  static Stored round(float x) { return x; }
  static float widen(Stored x) { return x; }
  static Lhs lhs(const float* x) { return {x[0]}; }
  static Loaded load(const Stored* p) { return miniserve::load(p); }
  static Floats dot(Floats acc, const Loaded& w, const Lhs& a) { return acc + w * a.x; }
};

struct BFloat16 {
  typedef uint16_t Stored;
  typedef float Sum;
  static constexpr int kPack = 2;

  static Stored round(float x) {  // to nearest, ties to even; NaN stays NaN
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<Stored>((bits >> 16) | 0x40);
    return static_cast<Stored>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
  }
  static float widen(Stored x) {
    uint32_t bits = static_cast<uint32_t>(x) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
  }

#if defined(__AVX512BF16__)
  struct Lhs {
    uint32_t pair;
  };
  typedef __m512bh Loaded;
  static Lhs lhs(const float* x) { return {round(x[0]) | static_cast<uint32_t>(round(x[1])) << 16}; }
  static Loaded load(const Stored* p) { return load_as<Loaded>(p); }
  static Floats dot(Floats acc, const Loaded& w, const Lhs& a) {
    return (Floats)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32(static_cast<int>(a.pair)), w);
  }
#else
  // A bfloat16 is the upper half of a float: one shift, one mask.
  struct Lhs {
    float x[2];
  };
  struct Loaded {
    Floats x[2];
  };
  static Lhs lhs(const float* x) { return {{x[0], x[1]}}; }
  static Loaded load(const Stored* p) {
    Bits pairs = load_as<Bits>(p);
    return {{(Floats)(pairs << 16), (Floats)(pairs & 0xffff0000u)}};
  }
  static Floats dot(Floats acc, const Loaded& w, const Lhs& a) { return (acc + w.x[0] * a.x[0]) + w.x[1] * a.x[1]; }
#endif
};

// Whole numbers from -127 to 127 against activations in float: keys and values in 8 bits. Each byte is widened.
struct WideInt8 {
  typedef int8_t Stored;
  typedef float Sum;
  static constexpr int kPack = 4;
  struct Lhs {
    float x[4];
  };
  struct Loaded {
    Floats x[4];
  };

  static Stored round(float x) { return static_cast<Stored>(std::nearbyint(x)); }
  static float widen(Stored x) { return x; }
  static Lhs lhs(const float* x) { return {{x[0], x[1], x[2], x[3]}}; }
  static Loaded load(const Stored* p) {
    const Ints quads = load_as<Ints>(p);
    return {{to_floats((quads << 24) >> 24), to_floats((quads << 16) >> 24), to_floats((quads << 8) >> 24),
             to_floats(quads >> 24)}};
  }
  static Floats dot(Floats acc, const Loaded& w, const Lhs& a) {
    for (int i = 0; i < 4; ++i) acc += w.x[i] * a.x[i];
    return acc;
  }
};

// Weights in 8 bits, where activations are whole numbers too (`lhs` gets them as floats), and so are the sums.
#if defined(__AVX512VNNI__)
// The instruction multiplies unsigned by signed bytes. Weights get 128 added as they are loaded (their sign bit
// flipped), and a row's sums start at -128 times the sum of its activations.
struct Int8 {
  typedef int8_t Stored;
  typedef int32_t Sum;
  static constexpr int kPack = 4;
  struct Lhs {
    int8_t x[4];
  };
  typedef Ints Loaded;

  static Stored round(float x) { return WideInt8::round(x); }
  static Lhs lhs(const float* x) { return {{round(x[0]), round(x[1]), round(x[2]), round(x[3])}}; }
  static Sum start(float sum_of_activations) { return -128 * static_cast<Sum>(sum_of_activations); }
  static Loaded load(const Stored* p) { return (Ints)(load_as<Bits>(p) ^ 0x80808080u); }
  static Ints dot(Ints acc, const Loaded& w, const Lhs& a) {
    return (Ints)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(load_as<int32_t>(a.x)));
  }
};
#else
// In floats: sums are exact up to 2^24, and behind that rounded as any float sum.
struct Int8 : WideInt8 {
  static Sum start(float) { return 0; }
};
#endif

// ---------------------------------------------------------------------------------------------------------------
// The one micro-kernel: rows of activations against groups of 16 outputs.
//
//     out[r][g] (+)= sum over steps of  w[g][step] . a[r][step]        out: (rows, out_stride), 16 floats a group
//
// Matrix products, q.k and p.v are all this. A tile of R rows and G groups keeps its sums in registers: with AVX-512's
// 32 registers 12 x 2 or 6 x 4 of them, with AVX2's 16 half registers 6 x 1 or 3 x 2.

#if defined(__AVX512F__)
constexpr int kMaxRows = 12;
constexpr int groups_for(int rows) { return rows <= 6 ? 4 : 2; }
#else
constexpr int kMaxRows = 6;
constexpr int groups_for(int rows) { return rows <= 1 ? 4 : rows <= 3 ? 2 : 1; }
#endif

// Where the stored side lies: either each group somewhere (weight panels, keys), or the groups side by side and the
// steps in several segments (values, in blocks of a KV cache).
template <class T>
struct Rhs {
  const typename T::Stored* const* w;  // of each group, or of each segment
  const typename T::Stored* const* next;  // what will be read afterwards: fetched while this is computed
  int groups, segments;
  long group_size;  // from one group of a segment to the next; 0: each group has its own pointer
  long step_size, steps;  // of a segment

  const typename T::Stored* at(const typename T::Stored* const* from, int segment, int group) const {
    return group_size ? from[segment] + group * group_size : from[group];
  }
};

// Sums go on from what `out` holds, or are new.
template <class T, int R, int G, bool kAdd>
void dot_tile(const typename T::Lhs* a, long a_stride, const Rhs<T>& rhs, int first_group, typename T::Sum* out,
              long out_stride) {
  decltype(load(out)) acc[R][G];
  for (int r = 0; r < R; ++r)
    for (int g = 0; g < G; ++g)
      if constexpr (kAdd)
        acc[r][g] = load(out + r * out_stride + g * kLanes);
      else
        acc[r][g] = decltype(load(out)){};
  for (int segment = 0; segment < rhs.segments; ++segment, a += rhs.steps) {
    const typename T::Stored *w[G], *next[G];
    for (int g = 0; g < G; ++g) {
      w[g] = rhs.at(rhs.w, segment, first_group + g);
      next[g] = rhs.at(rhs.next, segment, first_group + g);
    }
    for (long step = 0; step < rhs.steps; ++step) {
      typename T::Loaded loaded[G];
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) {
        if (R <= 6) __builtin_prefetch(next[g] + step * rhs.step_size);
        loaded[g] = T::load(w[g] + step * rhs.step_size);
      }
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        const typename T::Lhs lhs = a[r * a_stride + step];
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) acc[r][g] = T::dot(acc[r][g], loaded[g], lhs);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int g = 0; g < G; ++g) store(out + r * out_stride + g * kLanes, acc[r][g]);
}

// Any number of groups, up to kMaxRows rows.
template <class T, bool kAdd, int R = kMaxRows>
void dot_rows(int rows, const typename T::Lhs* a, long a_stride, const Rhs<T>& rhs, typename T::Sum* out,
              long out_stride) {
  if constexpr (R > 1) {
    if (rows < R) return dot_rows<T, kAdd, R - 1>(rows, a, a_stride, rhs, out, out_stride);
  }
  constexpr int G = groups_for(R);
  int g = 0;
  for (; g + G <= rhs.groups; g += G) dot_tile<T, R, G, kAdd>(a, a_stride, rhs, g, out + g * kLanes, out_stride);
  for (; g < rhs.groups; ++g) dot_tile<T, R, 1, kAdd>(a, a_stride, rhs, g, out + g * kLanes, out_stride);
}

}  // namespace miniserve
