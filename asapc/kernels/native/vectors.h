// Numbers side by side, with the compiler's own vectors: registers, sums across them, exp, log and powers.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <type_traits>
#include <utility>

namespace {

// Registers of how many bytes, and how many rows of a tile two registers wide stay in them.
#if defined(__AVX512F__)
constexpr int kBytes = 64, kRows = 8;
#elif defined(__AVX2__)
constexpr int kBytes = 32, kRows = 6;
#elif defined(__aarch64__)
constexpr int kBytes = 16, kRows = 8;
#else
constexpr int kBytes = 16, kRows = 4;
#endif

template <class T> struct Lanes {
  static constexpr int count = kBytes / sizeof(T);
  typedef T V __attribute__((vector_size(kBytes)));
  typedef T Loose __attribute__((vector_size(kBytes), aligned(sizeof(T)), may_alias));
  typedef std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t> Int;
  typedef Int Bits __attribute__((vector_size(kBytes)));
};
template <class T> using V = typename Lanes<T>::V;
template <class T> constexpr int kLanes = Lanes<T>::count;

#define INLINE inline __attribute__((always_inline))

template <class T> INLINE V<T> load(const T* from) {
  return *reinterpret_cast<const typename Lanes<T>::Loose*>(from);
}
template <class T> INLINE void store(T* to, V<T> value) {
  *reinterpret_cast<typename Lanes<T>::Loose*>(to) = value;
}
template <class T> INLINE V<T> all(T value) { return value - V<T>{}; }

// As many numbers as a register of W holds, in W.
template <class W, class S> INLINE V<W> load_as(const S* from) {
  if constexpr (std::is_same_v<W, S>) {
    return load(from);
  } else {
    typedef S Half __attribute__((vector_size(kBytes / 2), aligned(sizeof(S)), may_alias));
    return __builtin_convertvector(*reinterpret_cast<const Half*>(from), V<W>);
  }
}
template <class W, class S> INLINE void store_as(S* to, V<W> value) {
  if constexpr (std::is_same_v<W, S>) {
    store(to, value);
  } else {
    typedef S Half __attribute__((vector_size(kBytes / 2), aligned(sizeof(S)), may_alias));
    *reinterpret_cast<Half*>(to) = __builtin_convertvector(value, Half);
  }
}
// op of all of a register, by halves: one number after the other takes several times as long.
template <class T, int bytes = kBytes, class X, class Op> INLINE T folded(X v, const Op& op) {
  if constexpr (bytes == 2 * sizeof(T)) {
    return op(T(v[0]), T(v[1]));
  } else {
    typedef T Half __attribute__((vector_size(bytes / 2)));
    Half low, high;
    std::memcpy(&low, &v, bytes / 2);
    std::memcpy(&high, reinterpret_cast<const char*>(&v) + bytes / 2, bytes / 2);
    return folded<T, bytes / 2>(op(low, high), op);
  }
}
template <class T> INLINE T sum_of(V<T> v) {
  return folded<T>(v, [](auto x, auto y) { return x + y; });
}
template <class T> INLINE T max_of(V<T> v) {
  return folded<T>(v, [](auto x, auto y) { return x < y ? y : x; });
}

// exp(r) for |r| <= ln(2) / 2, the highest power first: 1 + r and Chebyshev fits, off by 1e-8 and 2e-16.
template <class T> constexpr double kSeries[] = {
    2.5090870615025714e-08, 2.7620616404414727e-07, 2.755730169346813e-06, 2.4801519984897177e-05,
    0.00019841269819833207, 0.001388888891818879, 0.008333333333353364, 0.04166666666662244,
    0.16666666666666644, 0.5000000000000002, 1.0, 1.0};
template <> constexpr double kSeries<float>[] = {
    0.0013933652487560828, 0.008363181544675472, 0.04166646489535625, 0.1666657696724759,
    0.5000000013470304, 1.0, 1.0};

// exp(x) for x up to 80; nan stays nan.  bounded: no x is below the normal numbers' logarithms; 0 there.
template <class T, bool bounded = false> INLINE V<T> exponential(V<T> x) {
  constexpr bool single = std::is_same_v<T, float>;
  constexpr T to_int = single ? T(12582912.0) : T(6755399441055744.0);  // 1.5 * 2^(bits of the fraction)
  constexpr T log2_e = T(1.4426950408889634);
  constexpr T ln2_high = single ? T(0.693359375) : T(0.693147180369123816490);
  constexpr T ln2_low = single ? T(-2.12194440e-4) : T(1.90821492927058770002e-10);
  using Bits = typename Lanes<T>::Bits;
  const V<T> shifted = x * log2_e + to_int;
  const V<T> n = shifted - to_int;
  const V<T> r = x - n * ln2_high - n * ln2_low;
  V<T> p = all(T(kSeries<T>[0]));
  for (size_t i = 1; i < std::size(kSeries<T>); ++i) p = p * r + T(kSeries<T>[i]);
  const Bits power = (Bits(shifted) << (single ? 23 : 52)) + Bits(all(T(1)));
  const V<T> result = p * V<T>(power);
  if constexpr (bounded) return result;
  return x < T(single ? -87.3 : -708.3) ? V<T>{} : result;
}

// A logarithm as the sum of two numbers.
struct Logarithm {
  V<double> high, low;
};

// Without the last 27 bits: products of two such numbers are exact.
INLINE V<double> cut(V<double> x) {
  typedef Lanes<double>::Bits Bits;
  return V<double>(Bits(x) >> 27 << 27);
}

// log x of normal numbers above 0, off by 2^-58 of itself: x = 2^e m with m from sqrt(1/2) to sqrt(2), and
// log m = 2 artanh(s) of s = (m - 1) / (m + 1), which is taken in two parts.
INLINE Logarithm logarithm(V<double> x) {
  typedef Lanes<double>::Bits Bits;
  constexpr uint64_t one = 0x3ff0000000000000, least = 0x3fe6a09e667f3bcd;  // 1 and sqrt(1/2)
  const Bits power = (Bits(x) + (one - least)) >> 52;
  const V<double> m = V<double>(Bits(x) - ((power - 1023) << 52));
  const V<double> e = V<double>(power | 0x4330000000000000) - (0x1p52 + 1023);  // as the last digits of 2^52
  const V<double> f = m - 1, d = f + 2, s = f / d, s_high = cut(s), d_high = cut(d);
  const V<double> s_low = (f - s_high * d_high - s_high * (d - d_high + (f - (d - 2)))) / d;
  const V<double> z = s * s;
  V<double> series = V<double>{} + 2.0 / 23;
#pragma GCC unroll 10
  for (int i = 21; i >= 3; i -= 2) series = series * z + 2.0 / i;
  const V<double> first = e * 0.693147180369123816490, second = 2 * s_high, high = first + second;
  return {high, (first - high) + second + (2 * s_low + s * z * series + e * 1.90821492927058770002e-10)};
}

// What op makes of a register's numbers in double, half of them after the other.
template <class Op> INLINE V<float> in_double(V<float> x, const Op& op) {
  float numbers[kLanes<float>];
  store(numbers, x);
  for (float* half = numbers; half < numbers + kLanes<float>; half += kLanes<double>)
    store_as<double>(half, op(load_as<double>(half)));
  return load(numbers);
}

// What was found, and op of each number that is not fine.
template <class Mask, class Op> INLINE V<double> repaired(V<double> found, V<double> x, Mask fine, const Op& op) {
  if (sum_of<double>(fine ? V<double>{} : V<double>{} + 1) != 0)
    for (int i = 0; i < kLanes<double>; ++i) if (!fine[i]) found[i] = op(double(x[i]));
  return found;
}

// log x and x^p = exp(p log x), off by as little as exp. Of what is neither normal nor 0 the library has them.
template <class T> INLINE V<T> log_of(V<T> x) {
  if constexpr (std::is_same_v<T, float>) {
    return in_double(x, [](V<double> half) { return log_of<double>(half); });
  } else {
    const auto nothing = x == 0, normal = (x >= std::numeric_limits<T>::min()) & (x <= std::numeric_limits<T>::max());
    const Logarithm log = logarithm(normal ? x : V<T>{} + 1);
    const V<T> found = nothing ? V<T>{} - std::numeric_limits<T>::infinity() : log.high + log.low;
    return repaired(found, x, normal | nothing, [](T own) { return std::log(own); });
  }
}
template <class T> INLINE V<T> power_of(V<T> x, double p) {
  if constexpr (std::is_same_v<T, float>) {
    return in_double(x, [p](V<double> half) { return power_of<double>(half, p); });
  } else {
    const auto nothing = (x == 0) & (V<T>{} + p > 0);
    const auto normal = (x >= std::numeric_limits<T>::min()) & (x <= std::numeric_limits<T>::max());
    const Logarithm log = logarithm(normal ? x : V<T>{} + 1);
    const V<T> first = cut(log.high), p_first = cut(V<T>{} + p), most = first * p_first;
    const V<T> rest = (log.high - first) * p_first + log.high * (p - p_first) + log.low * p, y = most + rest;
    const V<T> whole = exponential<T, true>(y), found = whole + whole * (most - y + rest);
    const auto fine = (normal & (y < 700) & (y > -700)) | nothing;
    return repaired(nothing ? V<T>{} : found, x, fine, [p](T own) { return std::pow(own, p); });
  }
}

// The numbers of x and y by turns, of their first halves or their second.
template <bool second, class T, size_t... i> INLINE V<T> zipped(V<T> x, V<T> y, std::index_sequence<i...>) {
#define FROM i / 2 + i % 2 * kLanes<T> + (second ? kLanes<T> / 2 : 0)
#ifdef __clang__
  return __builtin_shufflevector(x, y, (FROM)...);
#else
  return __builtin_shuffle(x, y, typename Lanes<T>::Bits{(FROM)...});
#endif
#undef FROM
}

// Rows of a square as its columns, by as many rounds as halve it.
template <class T> INLINE void turn_square(V<T> (&x)[kLanes<T>]) {
  constexpr int L = kLanes<T>;
  constexpr std::make_index_sequence<L> lanes;
  V<T> y[L];
#pragma GCC unroll 4
  for (int round = 1; round < L; round *= 2) {
#pragma GCC unroll 16
    for (int i = 0; i < L; i += 2) {
      y[i] = zipped<false, T>(x[i / 2], x[i / 2 + L / 2], lanes);
      y[i + 1] = zipped<true, T>(x[i / 2], x[i / 2 + L / 2], lanes);
    }
    std::swap(x, y);
  }
}

template <class X> struct Number { typedef X type; };
template <> struct Number<V<float>> { typedef float type; };
template <> struct Number<V<double>> { typedef double type; };
template <class X> constexpr bool kIsVector = !std::is_arithmetic_v<X>;

}  // namespace
