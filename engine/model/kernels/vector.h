// Vectors of sixteen lanes, and the two element types. Knows no model and no cache.
//
// A word is 32 bits of a row: one float, or two adjacent bfloat16. Everything is laid out and
// counted in words, so that both types run through the same code. The compiler lowers the vectors
// to the registers of the target; where its code is bad, intrinsics are used.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__SSE__)
#include <immintrin.h>
#endif

namespace quire {

constexpr int LANES = 16;
constexpr float LOG2_E = 1.44269504f;

typedef float Vector __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef int32_t Integers __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef int8_t Bytes __attribute__((vector_size(16)));

constexpr Integers LANE_NUMBERS = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// A register of the target holds sixteen lanes or a part of them. Values that must stay in
// registers are declared as parts: the compiler spills a vector that is larger than a register to
// memory.
#if defined(__AVX512F__)
constexpr int PART_BYTES = 64, REGISTERS = 32;
#elif defined(__AVX__)
constexpr int PART_BYTES = 32, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int PART_BYTES = 16, REGISTERS = 32;
#else
constexpr int PART_BYTES = 16, REGISTERS = 16;
#endif
constexpr int PARTS = 64 / PART_BYTES, PART_LANES = LANES / PARTS;

typedef float PartVector __attribute__((vector_size(PART_BYTES)));
typedef uint32_t PartWords __attribute__((vector_size(PART_BYTES)));

template <class V>
inline V load(const void* from) {
  V value;
  std::memcpy(&value, from, sizeof(V));
  return value;
}

template <class V>
inline void store(void* to, const V& value) {
  std::memcpy(to, &value, sizeof(V));
}

inline Vector broadcast(float value) { return value - Vector{}; }

// a * b + c, rounded once where the target has such an instruction. The compiler may choose which
// of two products it adds in this way; where that must be the same one everywhere, call this.
inline PartVector multiply_add(PartVector a, PartVector b, PartVector c) {
#if defined(__AVX512F__)
  return (PartVector)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (PartVector)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

// The first `count` lanes; the others are zero.
inline Vector load_lanes(const float* from, int64_t count) {
  if (count == LANES) return load<Vector>(from);
  Vector value = Vector{};
  for (int64_t lane = 0; lane < count; lane++) value[lane] = from[lane];
  return value;
}

inline void store_lanes(float* to, const Vector& value, int64_t count) {
  if (count == LANES) return store(to, value);
  for (int64_t lane = 0; lane < count; lane++) to[lane] = value[lane];
}

// Stores to an address aligned to a register, past the caches where the target can. Other threads
// see it after finish_streams() and a barrier.
inline void stream(float* to, PartVector value) {
#if defined(__AVX512F__)
  _mm512_stream_ps(to, (__m512)value);
#elif defined(__AVX__)
  _mm256_stream_ps(to, (__m256)value);
#elif defined(__SSE__)
  _mm_stream_ps(to, (__m128)value);
#else
  store(to, value);
#endif
}

inline void finish_streams() {
#if defined(__SSE__)
  _mm_sfence();
#endif
}

// Reduces all lanes in a fixed tree order: the result is the same on every target.
template <class V, class Combine>
inline auto reduce_lanes(V v, const Combine& combine) {
  v = combine(v, __builtin_shuffle(v, LANE_NUMBERS ^ 8));
  v = combine(v, __builtin_shuffle(v, LANE_NUMBERS ^ 4));
  v = combine(v, __builtin_shuffle(v, LANE_NUMBERS ^ 2));
  v = combine(v, __builtin_shuffle(v, LANE_NUMBERS ^ 1));
  return v[0];
}

// The larger of two, lane by lane; `b` where one of them is NaN.
inline Vector maximum(Vector a, Vector b) {
#if defined(__AVX512F__)
  return (Vector)_mm512_maskz_max_ps(0xffff, (__m512)a, (__m512)b);
#else
  // Part by part: the compiler would compare larger vectors lane by lane.
  Vector result;
  for (int part = 0; part < PARTS; part++) {
    const PartVector x = load<PartVector>((const float*)&a + part * PART_LANES);
    const PartVector y = load<PartVector>((const float*)&b + part * PART_LANES);
    const PartVector larger = x > y ? x : y;
    store((float*)&result + part * PART_LANES, larger);
  }
  return result;
#endif
}
inline float sum_of(Vector v) {
  return reduce_lanes(v, [](Vector a, Vector b) { return a + b; });
}
inline float largest_of(Vector v) { return reduce_lanes(v, maximum); }

// Rounds to the nearest integers.
inline Vector round_to_integer(Vector x) {
  const Vector shift = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer.
  return x + shift - shift;
}

// value * 2^n for integer n; the result must not be smaller than the smallest normal number.
inline Vector scaled(Vector value, Vector n) {
#if defined(__AVX512F__)
  // With a full mask: the compiler's header implements the unmasked form with an uninitialised
  // value.
  return (Vector)_mm512_maskz_scalef_ps(0xffff, (__m512)value, (__m512)n);
#else
  return (Vector)((Words)value + ((Words) __builtin_convertvector(n, Integers) << 23));
#endif
}

// 2^(n + fraction) for integer n and |fraction| <= 1/2, within two units in the last place; exact
// where the fraction is 0. The polynomial is the minimax of the relative error with constant
// term 1.
inline Vector exp2(Vector n, Vector fraction) {
  Vector p = broadcast(1.3264714507e-3f);
  p = p * fraction + 9.6715129912e-3f;
  p = p * fraction + 5.5507339537e-2f;
  p = p * fraction + 2.4022242427e-1f;
  p = p * fraction + 6.9314700365e-1f;
  return scaled(p * fraction + 1.0f, n);
}

// 2^x for x up to 127; below -126 the result is the smallest normal number. NaN stays NaN.
inline Vector exp2(Vector x) {
  x = maximum(broadcast(-126.0f), x);
  const Vector n = round_to_integer(x);
  return exp2(n, x - n);
}

// The same with a relative error of 1e-4 at most, for results that are rounded to bfloat16, which
// errs twenty times as much. The minimax polynomial for fractions from 0 to 1.
inline Vector exp2_for_bfloat16(Vector x) {
  x = maximum(broadcast(-126.0f), x);
#if defined(__AVX512DQ__)
  const Vector fraction = (Vector)_mm512_maskz_reduce_ps(0xffff, (__m512)x, _MM_FROUND_TO_NEG_INF);
  const Vector n = x;  // scaled() rounds it down.
#else
  const Vector n = round_to_integer(x - 0.5f), fraction = x - n;
#endif
  Vector p = broadcast(7.7067051e-2f);
  p = p * fraction + 2.2764498e-1f;
  p = p * fraction + 6.9511679e-1f;
  return scaled(p * fraction + 1.0f, n);
}

// e^x for x up to 88; below -87 the result is near the smallest normal number. Range reduction by
// Cody and Waite.
inline Vector exponential(Vector x) {
  x = maximum(broadcast(-87.0f), x);
  const Vector n = round_to_integer(x * LOG2_E);
  const Vector fraction = x - n * 0.693359375f - n * -2.12194440e-4f;
  return exp2(n, fraction * LOG2_E);
}

// Sixteen 8-bit integers as floats.
inline Vector widen_bytes(const int8_t* from) {
#if defined(__AVX512F__)
  const Integers wide = (Integers)_mm512_maskz_cvtepi8_epi32(0xffff, load<__m128i>(from));
#else
  // In two steps: the compiler would widen one lane after the other to four times its size.
  typedef int16_t Shorts __attribute__((vector_size(32)));
  const Integers wide = __builtin_convertvector(
      __builtin_convertvector(load<Bytes>(from), Shorts), Integers);
#endif
  return __builtin_convertvector(wide, Vector);
}

inline Vector absolute(Vector x) { return (Vector)((Words)x & 0x7fffffffu); }

// tanh(x) within four units in the last place; exactly 1 or -1 where float32 has no number in
// between. NaN stays NaN. Near 0 the minimax polynomial of the relative error: elsewhere the
// exponential is accurate, there the difference would lose digits.
inline Vector tanh(Vector x) {
  const Vector magnitude = absolute(x), square = x * x;
  Vector p = broadcast(-5.7049863972e-3f);
  p = p * square + 2.0639086142e-2f;
  p = p * square - 5.3739715368e-2f;
  p = p * square + 1.3331441581e-1f;
  p = p * square - 3.3333280683e-1f;
  const Vector near = x + x * square * p;
  // At 20, and beyond, the result is 1.
  const Vector bounded = magnitude > 20.0f ? broadcast(20.0f) : magnitude;
  const Vector far = 1.0f - 2.0f / (exponential(bounded + bounded) + 1.0f);
  const Vector signed_far = (Vector)((Words)far | ((Words)x & 0x80000000u));
  return magnitude < 0.625f ? near : signed_far;
}

// x * sigmoid(exponent). SiLU if both are the same.
inline Vector times_sigmoid(Vector x, Vector exponent) {
  // Below -80, exponential() would leave the range in which it is accurate; the result is 0 there.
  return x / (1.0f + exponential(-maximum(broadcast(-80.0f), exponent)));
}

// Soft cap: limits x to the range from -cap to cap.
inline Vector capped(Vector x, float cap) { return tanh(x / cap) * cap; }

// An element type. Packed words of the type are multiplied by rows of its type Row, which have one
// RowWord for each word. That takes FACTORS steps: step i adds factor(row word, i) * columns(words,
// i) to an accumulator.
struct Float32 {
  typedef float Element;
  typedef Float32 Row;
  typedef uint32_t RowWord;
  static constexpr int PER_WORD = 1, FACTORS = 1;

  static uint32_t factor(const RowWord& word, int) { return word; }
  static PartWords columns(PartWords words, int) { return words; }
  static PartVector multiply(PartVector sum, uint32_t factor, PartWords columns) {
    float value;
    std::memcpy(&value, &factor, sizeof value);
#if defined(__FMA__) && !defined(__AVX512F__)
    // As assembly, to accumulate in place: the compiler copies accumulators between registers, and
    // no register is free for that.
    asm("vfmadd231ps %1, %2, %0" : "+x"(sum) : "x"((PartVector)columns), "x"(value - PartVector{}));
    return sum;
#else
    return sum + value * (PartVector)columns;
#endif
  }
  static float widen(Element value) { return value; }
  static Vector widen16(const Element* from) { return load<Vector>(from); }
  // Sixteen words from 8-bit integers: the first elements of all words, then the second ones.
  static Words widen_words(const int8_t* from) { return (Words)widen_bytes(from); }
  static Vector exp2_rounded(Vector x) { return exp2(x); }
  static void narrow16(Element* to, Vector value) { store(to, value); }
  static void narrow32(Element* to, Vector first, Vector second) {
    narrow16(to, first);
    narrow16(to + LANES, second);
  }
  static Element narrow(float value) { return value; }
  // Sixteen words: each has the elements of consecutive rows in one column.
  static Words pack_rows(const Element* const* rows, int64_t column, int64_t left) {
    (void)left;
    return load<Words>(rows[0] + column);
  }
  // Words with their second elements set to zero.
  static Words first_elements(Words words) { return words; }
};

struct BFloat16 {
  typedef uint16_t Element;
  static constexpr int PER_WORD = 2;

#if defined(__AVX512BF16__)
  typedef BFloat16 Row;
  typedef uint32_t RowWord;
  static constexpr int FACTORS = 1;

  static uint32_t factor(const RowWord& word, int) { return word; }
  static PartWords columns(PartWords words, int) { return words; }
  static PartVector multiply(PartVector sum, uint32_t factor, PartWords columns) {
    return (PartVector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int)factor),
                                        (__m512bh)(__m512i)columns);
  }
#else
  // Without an instruction for pairs of bfloat16, both operands must be converted to float32. Rows
  // are read again for every strip, so they are kept in float32 and never rounded.
  typedef Float32 Row;
  typedef struct {
    uint32_t of[2];
  } RowWord;
  static constexpr int FACTORS = 2;

  static uint32_t factor(const RowWord& word, int i) { return word.of[i]; }
  static PartWords columns(PartWords words, int i) {
    if (i == 0) return words << 16;
#if defined(__AVX2__) && !defined(__AVX512F__)
    // As assembly, to keep the mask in memory: the compiler would put it in a register that an
    // accumulator needs.
    static const PartWords mask = 0xffff0000u - PartWords{};
    PartWords second;
    asm("vpand %1, %2, %0" : "=x"(second) : "m"(mask), "x"(words));
    return second;
#else
    return words & 0xffff0000u;
#endif
  }
  static PartVector multiply(PartVector sum, uint32_t factor, PartWords columns) {
    return Float32::multiply(sum, factor, columns);
  }
#endif
  static float widen(Element value) {
    const uint32_t bits = (uint32_t)value << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
  }
  static Vector widen16(const Element* from) {
    return (Vector)(__builtin_convertvector(load<Halves>(from), Words) << 16);
  }
  // Exact: bfloat16 has the eight bits of such an integer, so the other half of a float is zero.
  static Words widen_words(const int8_t* from) {
    return (Words)widen_bytes(from) >> 16 | (Words)widen_bytes(from + LANES);
  }
  static Vector exp2_rounded(Vector x) { return exp2_for_bfloat16(x); }
  static void narrow16(Element* to, Vector value) {
#if defined(__AVX512BF16__)
    store(to, _mm512_cvtneps_pbh((__m512)value));
#else
    const Words bits = (Words)value;
    const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    // A NaN keeps its sign and stays NaN: the rounding carry could turn it into infinity.
    const Words quiet = (bits >> 16) | 0x40u;
    store(to, __builtin_convertvector((Words)(value == value ? (Integers)rounded : (Integers)quiet),
                                      Halves));
#endif
  }
  static void narrow32(Element* to, Vector first, Vector second) {
#if defined(__AVX512BF16__)
    store(to, _mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
#else
    narrow16(to, first);
    narrow16(to + LANES, second);
#endif
  }
  static Element narrow(float value) {
    Element lanes[LANES];
    narrow16(lanes, broadcast(value));
    return lanes[0];
  }
  static Words pack_rows(const Element* const* rows, int64_t column, int64_t left) {
    Words words = __builtin_convertvector(load<Halves>(rows[0] + column), Words);
    if (left > 1) words |= __builtin_convertvector(load<Halves>(rows[1] + column), Words) << 16;
    return words;
  }
  static Words first_elements(Words words) { return words & 0xffffu; }
};

}  // namespace quire
