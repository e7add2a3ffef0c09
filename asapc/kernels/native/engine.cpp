// The finite Sinkhorn loop and its product with the values, exactly, on a CPU: the fast twin of
// operators/sinkhorn.py, asap.py, banded.py and lot.py behind one C function, asapc_sinkhorn.
// asapc_plan has the plans of operators/plan.py, asapc_esp the sliced plans of operators/esp.py and asapc_feature the
// predictions of features/.
//
// A head is worked on at a time, by blocks of a few queries. A block's scores come from a register tile,
// K = exp(S - row maximum) and its row sums from one pass over them while they are in cache. From then on
//
//     a_i = 1 / sum_j K_ij b_j,    b_j = (N / M) / sum_i K_ij a_i
//
// takes one pass over K for each pair of half-steps: a block's rows are closed, and what they add to the
// columns' sums is added, before the next block is read. The output is diag(a) K (diag(b) v). Where K of a
// head is larger than `resident_bytes` its blocks are formed again in every pass, which costs O(N + M)
// memory. Rows are closed to 1 and columns to N / M: with equal totals the gauge of a and b stays.
//
// K lies in [exp(-range), 1] for the widest range of a row's scores and the scalings in exp(+-2 range). A
// head whose range float32 does not hold is computed in float64, and in logarithms where that does not
// either; its scores are those of the inputs' precision all the same.
//
// Compiled once for each instruction set (see setup.py), with the vectors of vectors.h.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <iterator>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <numeric>
#include <system_error>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include <pthread.h>

#include "vectors.h"

// Torch's team of threads, where it has GNU's OpenMP loaded. They are awake after a model's last operator, when
// threads of ours would share their cores. A team smaller than torch's would have the rest of it end.
extern "C" void GOMP_parallel(void (*)(void*), void*, unsigned, unsigned) __attribute__((weak));

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kSmall = 1 << 21;            // multiplications that are not worth waking a thread for
constexpr size_t kKeptBytes = size_t{1} << 24;  // of a thread's scratch, from one call to the next

// The widest row of scores whose exponentials, sums and scalings a format holds: exp(2 * 40) < 3.4e38.
template <class T> constexpr double kSafeRange = std::is_same_v<T, float> ? 40.0 : 340.0;
// A score that far below the largest is masked: no scalings that a format holds make anything of it.
constexpr double kMasked = 2500.0;

}  // namespace

struct Strides {
  int64_t batch, head, token;
};

enum Form { kPlain, kScaling, kPlan };

// How a scaling closes its row or column, of which D_i = sum_j K_ij b_j, to the mass mu_i; columns alike.
//
//     a_i = mu_i / max(D_i, least)                     kPlain
//     a_i = mu_i / (D_i (+) constant)                  kScaling
//     a_i = a_i mu_i / (a_i D_i (+) constant)          kPlan
//
// x (+) c is x + c or max(x, c), see operators/stabilised.py. softmax: the first half-step has no constant.
// unshifted: K is exp(S), not exp(S - row maximum). gauge: a is multiplied by it, and b divided, after each row
// half-step but the loop's first.
struct Rule {
  int64_t form, adds, softmax, unshifted;
  double constant, least, gauge;
};

// What is computed; asapc/kernels/native/__init__.py fills it in.  q: [B, H, N, D]; k: [B, H, M, D];
// v: [B, H, M, E] or null for the map; keep: [B, M] bytes or null; bias: [B, H, N, M] or null;
// dual: [B, H, N] where columns are closed first, [B, H, M] where rows are, or null for zero; out:
// [B, H, N, E or M]; query_keep: [B, N] bytes or null: rows of 0 are no part of the problem, and not written, unless
// no key is kept; mass: [B, H, N], of rows, of total 1, or null where all weigh the same; rows of the output are
// divided by N times theirs. to_columns: the values are of the rows, [B, H, N, E], and out is A^T v, [B, H, M, E], of
// the plan A as it is; nothing is written where no column is kept. Strides are of numbers; where none is given, tensors
// are contiguous. The output factor is coefficient * N^queries * M^keys * n^active. Query i sees the keys from i + low to
// i + high alone, where low is above -N: without one a query has no part, nor a key that no query sees.
struct Problem {
  const void *q, *k, *v;
  const uint8_t* keep;
  const void *bias, *dual;
  void* out;
  const uint8_t* query_keep;
  const void* mass;
  int64_t batch, heads, queries, keys, dim, width;
  Strides q_strides, k_strides, v_strides, bias_strides;
  int64_t bias_key_stride, half_steps, rows_first, to_columns, is_double, resident_bytes, threads, low, high;
  double multiplier, coefficient, queries_power, keys_power, active_power, row_mass, column_mass;
  Rule rule;

  bool banded() const { return low > -queries; }
};

// Where gradients of a problem's A v are wanted instead of it, for grad in the sizes of `out`: of q, k and v, and of the
// dual, the mass and the bias [B, H, N, M] or null, in their sizes, contiguous and 0 before. depth: [B, H], the half-steps
// that they passed through, not written where the linear domain does not hold a head. most, tolerance: of
// kernels/loop.py's Tail.
struct Slopes {
  const void* grad;
  void *q, *k, *v, *dual, *mass, *bias;
  int64_t *depth, most;
  double tolerance;
};

namespace {

// out[r] = sum_d x[r][d step] panel[d] for kRows rows, panel: [depth][2 registers], `across` apart: all products'
// inner part; or of (x[r][d step] - panel[d])^2. sides: 1 for the first register of each.
template <class T, bool squares = false, int sides = 2> INLINE void tile(const T* const* x, int64_t depth,
    const T* panel, T* out, int64_t stride, int64_t across = 2 * kLanes<T>, int64_t step = 1) {
  constexpr int L = kLanes<T>;
  V<T> sum[kRows][sides] = {};
  for (int64_t d = 0; d < depth; ++d) {
    V<T> y[sides];
#pragma GCC unroll 2
    for (int side = 0; side < sides; ++side) y[side] = load(panel + d * across + side * L);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const V<T> factor = all(x[r][d * step]);
#pragma GCC unroll 2
      for (int side = 0; side < sides; ++side) {
        const V<T> other = squares ? factor - y[side] : y[side];
        sum[r][side] += (squares ? other : factor) * other;
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
    for (int side = 0; side < sides; ++side) store(out + r * stride + side * L, sum[r][side]);
}

// kRows rows from the first on, the last one again for those from `end` on.  at: where a row begins.
template <class T> struct Rows {
  const int64_t first, count;
  const T* x[kRows];

  template <class At> INLINE Rows(int64_t row, int64_t end, const At& at)
      : first(row), count(std::min<int64_t>(kRows, end - row)) {
    for (int64_t r = 0; r < kRows; ++r) x[r] = at(row + std::min(r, count - 1));
  }
};

// The same for `width` columns of panels, each `next` after the last one.
template <class T, bool squares = false> INLINE void tiles(const Rows<T>& rows, int64_t depth, const T* panels, int64_t next,
    int64_t width, T* out, int64_t stride, int64_t across = 2 * kLanes<T>, int64_t step = 1) {
  for (int64_t start = 0; start < width; start += 2 * kLanes<T>, panels += next)
    tile<T, squares>(rows.x, depth, panels, out + start, stride, across, step);
}

// sums[r] = sum_j rows[r][j] b[j], of R rows `stride` apart.
template <int R, class T>
INLINE void dots(const T* rows, int64_t stride, int64_t size, const T* b, T* sums) {
  constexpr int L = kLanes<T>;
  V<T> sum[R][2] = {};
  int64_t j = 0;
  for (; j + 2 * L <= size; j += 2 * L) {
    const V<T> left = load(b + j), right = load(b + j + L);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      sum[r][0] += load(rows + r * stride + j) * left;
      sum[r][1] += load(rows + r * stride + j + L) * right;
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) sums[r] = sum_of<T>(sum[r][0] + sum[r][1]);
  for (; j < size; ++j)
    for (int r = 0; r < R; ++r) sums[r] += rows[r * stride + j] * b[j];
}

// total[j] += sum_r a[r] rows[r][j]; next: as many rows that are read soon, or null.
template <int R, class T>
INLINE void add_rows(const T* rows, int64_t stride, int64_t size, const T* a, T* total, const T* next = nullptr) {
  constexpr int L = kLanes<T>;
  V<T> factors[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) factors[r] = all(a[r]);
  int64_t j = 0;
  for (; j + L <= size; j += L) {
    V<T> sum = load(total + j);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sum += factors[r] * load(rows + r * stride + j);
    for (int r = 0; next && r < R; ++r) __builtin_prefetch(next + r * stride + j, 0, 2);
    store(total + j, sum);
  }
  for (; j < size; ++j)
    for (int r = 0; r < R; ++r) total[j] += a[r] * rows[r * stride + j];
}

// to[j] += sum_r weights[r][j] x[r] for every token j; x: [R, width], whole registers.
template <int R, class T>
INLINE void add_products(const T* weights, int64_t stride, int64_t size, const T* x, int64_t width, T* to) {
  for (int64_t e = 0; e < width; e += kLanes<T>) {
    V<T> own[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) own[r] = load(x + r * width + e);
    for (int64_t j = 0; j < size; ++j) {
      V<T> sum = load(to + j * width + e);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) sum += weights[r * stride + j] * own[r];
      store(to + j * width + e, sum);
    }
  }
}

// Calls body(row, how many as a type) for a block of rows: all of a whole one together, others each.
template <class Body> INLINE void by_rows(int64_t count, const Body& body) {
  if (count == kRows) return body(0, std::integral_constant<int, kRows>{});
  for (int64_t row = 0; row < count; ++row) body(row, std::integral_constant<int, 1>{});
}

// Calls body(closes rows, closes columns) for each pair of half-steps, and for one that is left at either end.
template <class Body> INLINE void each_pair(bool rows_turn, int64_t half_steps, const Body& body) {
  for (int64_t left = half_steps; left > 0; rows_turn = true) {
    body(rows_turn, left > int(rows_turn));
    left -= rows_turn ? 2 : 1;
  }
}

// The scaling that closes a row or column of this sum.  X: a number, or those of several matrices.
template <class X> INLINE X closed(const Rule& rule, X scaling, X mass, X sum, bool exact) {
  const auto number = [](double value) { return X(X{} + typename Number<X>::type(value)); };
  if (rule.form == kPlain) {
    const X least = number(rule.least);
    return mass / (sum < least ? least : sum);
  }
  const X total = rule.form == kPlan ? scaling * sum : sum, constant = number(rule.constant), none = number(0);
  X divisor = total;
  if (exact) divisor = total == none ? number(1) : total;
  else divisor = rule.adds ? X(total + constant) : X(total < constant ? constant : total);
  if (rule.form == kScaling) return mass / divisor;
  return total == none ? scaling : X(scaling * mass / divisor);
}

// Whether the format holds a scaling beside a constant. Those of kPlan drift apart where parts of a kernel do not see
// each other, and their products with its entries must not leave the format unseen.
template <class T> bool is_fine(const Rule& rule, T scaling) {
  if (rule.form != kPlan || scaling == 0) return std::isfinite(scaling);
  static const T most = T(std::exp(kSafeRange<T>)), least = 1 / most;
  return scaling >= least && scaling <= most;
}

int64_t rounded_up(int64_t size, int64_t step) { return (size + step - 1) / step * step; }

// A thread's memory for one head after the other, kept from one call to the next where it is small.
class Scratch {
 public:
  void reserve(size_t bytes) {
    if (bytes > size_) block_.reset(new char[bytes + kBytes]), size_ = bytes;
    used_ = -reinterpret_cast<uintptr_t>(block_.get()) % kBytes;  // to where registers are aligned
  }
  template <class T> T* take(int64_t count) {
    T* found = reinterpret_cast<T*>(block_.get() + used_);
    used_ += rounded_up(count * sizeof(T), kBytes);
    return found;
  }
  void shrink() {
    if (size_ > kKeptBytes) block_.reset(), size_ = 0;
  }

 private:
  std::unique_ptr<char[]> block_;
  size_t size_ = 0, used_ = 0;
};

// The active tokens of an example; where there is none, all of them.  count: before some were left out.
struct Tokens {
  std::vector<int64_t> active;
  int64_t count;
  bool none;

  Tokens(const uint8_t* keep, int64_t size, int64_t example) {
    active.resize(size);
    count = 0;
    for (int64_t j = 0; j < size; ++j) active[count] = j, count += !keep || keep[example * size + j];
    none = count == 0;
    if (none) std::iota(active.begin(), active.end(), 0), count = size;
    else active.resize(count);
  }

  template <class Out> void leave_out(const Out& out) {
    active.erase(std::remove_if(active.begin(), active.end(), out), active.end());
  }
};

// Tokens' numbers [tokens, depth] as panels [two registers' tokens, of every number], times the factor.
template <class T, class S>
void pack_tokens(const S* from, int64_t stride, const Tokens& tokens, int64_t depth, T factor, T* panel) {
  constexpr int L = kLanes<T>;
  constexpr int64_t P = 2 * L;
  const int64_t size = tokens.active.size();
  for (int64_t start = 0; start < size; start += P, panel += P * depth) {
    const int64_t here = std::min(P, size - start), squares = here < P ? 0 : depth / L * L;
    const auto token = [&](int64_t j) { return from + tokens.active[start + j] * stride; };
    if (here < P) std::fill_n(panel, P * depth, T(0));
    for (int64_t j = 0; j < P; j += L)
      for (int64_t d = 0; d < squares; d += L) {
        V<T> x[L];
#pragma GCC unroll 16
        for (int i = 0; i < L; ++i) x[i] = load_as<T>(token(j + i) + d) * factor;
        turn_square<T>(x);
#pragma GCC unroll 16
        for (int i = 0; i < L; ++i) store(panel + (d + i) * P + j, x[i]);
      }
    for (int64_t j = 0; j < here; ++j)
      for (int64_t d = squares; d < depth; ++d) panel[d * P + j] = T(token(j)[d]) * factor;
  }
}

// diag(weights) v of the active tokens, or v, as panels [two registers' values, of every token].
template <class S, class W>
void pack_values(const S* v, int64_t stride, const Tokens& tokens, int64_t width, const W* weights, W* to) {
  constexpr int64_t L = kLanes<W>, E = 2 * L;
  const int64_t size = tokens.active.size();
  for (int64_t start = 0; start < width; start += E) {
    const int64_t here = std::min(E, width - start), read = here > L ? E : L;  // by multiply
    for (int64_t j = 0; j < size; ++j, to += E) {
      const S* from = v + tokens.active[j] * stride + start;
      const W weight = weights ? weights[j] : W(1);
      int64_t e = 0;
      for (; e + L <= here; e += L) store(to + e, load_as<W>(from + e) * weight);
      for (; e < here; ++e) to[e] = weight * W(from[e]);
      for (; e < read; ++e) to[e] = W(0);
    }
  }
}

// to(i) = factor(i) x(i) values for every row i, entries of x(i) `step` apart; values: panels of pack_values, [depth,
// width], which are `next` apart.
template <class W, class Factor, class To>
INLINE void multiply(const Rows<W>& rows, int64_t depth, const W* values, int64_t next, int64_t width,
                     const Factor& factor, const To& to, int64_t step = 1) {
  constexpr int64_t E = 2 * kLanes<W>;
  for (int64_t start = 0; start < width; start += E, values += next) {
    W part[kRows * E];
    const int64_t here = std::min(E, width - start);
    if (here > E / 2) tile<W>(rows.x, depth, values, part, E, E, step);
    else tile<W, false, 1>(rows.x, depth, values, part, E, E, step);
    for (int64_t r = 0; r < rows.count; ++r) {
      auto* const out = to(rows.first + r) + start;
      typedef std::remove_reference_t<decltype(*out)> S;
      const W own = factor(rows.first + r);
      if (here == E) for (int64_t e = 0; e < E; ++e) out[e] = S(own * part[r * E + e]);
      else for (int64_t e = 0; e < here; ++e) out[e] = S(own * part[r * E + e]);
    }
  }
}

// S: the scores' format, that of the inputs; W: what the loop is computed in.
template <class S, class W> class Head {
  static constexpr int L = kLanes<W>;      // of a register of the loop
  static constexpr int P = 2 * kLanes<S>;  // keys in a panel
  static constexpr int E = 2 * L;          // values in a panel
  static constexpr W kHardlySeen = std::numeric_limits<W>::min();

 public:
  Head(const Problem& p, const Slopes* slopes, int64_t index, Scratch& scratch, const Tokens& queries,
       const Tokens& keys)
      : p_(p), slopes_(slopes), index_(index), queries_(queries), keys_(keys), rows_(queries.active),
        active_(keys.active), count_(rows_.size()), size_(active_.size()), padded_(rounded_up(size_, P)) {
    const int64_t batch = index / p.heads, head = index % p.heads;
    const auto at = [&](const void* from, const Strides& s) {
      return static_cast<const S*>(from) + batch * s.batch + head * s.head;
    };
    q_ = at(p.q, p.q_strides), k_ = at(p.k, p.k_strides);
    v_ = p.v ? at(p.v, p.v_strides) : nullptr;
    dim_ = keys.none ? 0 : p.dim;  // whatever they hold, scores are 0
    bias_ = p.bias && !keys.none ? at(p.bias, p.bias_strides) : nullptr;
    out_ = static_cast<S*>(p.out) + index * (p.to_columns ? p.keys : p.queries) * p.width;
    const int64_t length = p.rows_first ? p.keys : p.queries;
    const S* dual = p.dual && !keys.none ? static_cast<const S*>(p.dual) + index * length : nullptr;
    key_dual_ = p.rows_first ? dual : nullptr, query_dual_ = p.rows_first ? nullptr : dual;
    banded_ = p.low > 1 - p.queries || p.high < p.keys - 1;
    int64_t widest = 0;
    for (int64_t key = 0, before = 0; banded_ && key <= p.keys; ++key) {
      before_.push_back(before);
      before += before < size_ && active_[before] == key;
    }
    for (int64_t row = 0; row < count_; row += kRows) {
      windows_.push_back(seen_from(row));
      widest = std::max(widest, windows_.back().wide);
    }
    stride_ = widest * sizeof(W) % 1024 == 0 ? widest + P : widest;  // not all rows in one cache set
    row_mass_ = p.mass ? static_cast<const S*>(p.mass) + index * p.queries : nullptr;
    double least = 1;
    for (int64_t i = 0; row_mass_ && i < p.queries; ++i)
      if (row_mass_[i] > 0) least = std::min(least, double(row_mass_[i]));
    spare_ = std::max(0.0, -std::log(least) - 8) / 2;
    share_ = double(count_) / double(size_);
    ends_on_rows_ = (p.rows_first != 0) == (p.half_steps % 2 == 1);
    stabilised_ = p.rule.form != kPlain, unshifted_ = p.rule.unshifted;
    is_softmax_ = p.rows_first && p.half_steps == 1 && !stabilised_ && !row_mass_;
    const bool once = is_softmax_ && !slopes;  // which needs a block of rows at a time alone
    kept_ = p.to_columns || (!once && count_ * widest * int64_t(sizeof(W)) <= p.resident_bytes);
    if (stabilised_) share_ = 1;
    const double share = 1.0 / double(ends_on_rows_ ? p.queries : p.keys);
    const double reached = !stabilised_ ? 1.0 : ends_on_rows_ ? p.row_mass : p.column_mass;
    scale_ = p.coefficient * std::pow(double(p.queries), p.queries_power) *
             std::pow(double(p.keys), p.keys_power) * std::pow(double(keys.count), p.active_power) * share / reached;
    take(scratch);
  }

  // In the linear domain.  Returns the widest range of a row's scores, and what small masses take of that of
  // a format, or the first that is too wide, infinity of a row without scores: what is written then means
  // nothing.
  double linear() {
    widest_ = 0;
    highest_ = -kInfinity;
    sees_all_ = is_sparse_ = false;
    std::fill_n(a_, count_, W(1)), std::fill_n(top_, padded_, W(0));
    for (int64_t j = 0; j < padded_; ++j) b_[j] = W(j < size_);
    if (slopes_) past_b_.assign(b_, b_ + padded_);
    each_pass([&](const Pass& pass) {
      if (slopes_ && !pass.closes_rows && !pass.closes_columns) return true;
      if (!linear_pass(pass)) return false;
      if (slopes_ && (pass.first || pass.closes_rows)) past_a_.insert(past_a_.end(), a_, a_ + count_);
      if (slopes_ && pass.closes_columns) past_b_.insert(past_b_.end(), b_, b_ + padded_);
      return true;
    });
    if (slopes_ && widest_ <= kSafeRange<W>) differentiate();
    const auto fine = [this](W x) { return is_fine(p_.rule, x); };
    const bool held = std::all_of(a_, a_ + count_, fine) && std::all_of(b_, b_ + size_, fine);
    return std::isnan(widest_) || (stabilised_ && !held) ? kInfinity : widest_;
  }

  // With logarithms of the plan, formed again in every pass.
  void logarithmic() {
    for (int64_t i = 0; i < count_; ++i) a_[i] = start_of(i);
    std::fill_n(b_, padded_, W(0));
    each_pass([&](const Pass& pass) { logarithmic_pass(pass); return true; });
  }

 private:
  // What a block of rows sees: whole panels of keys from `start` on, of which `keys` are.
  struct Window {
    int64_t start, wide, keys;
  };

  // The active keys that a query sees: from the first one to before the second.
  std::pair<int64_t, int64_t> seen_by(int64_t i) const {
    const auto from = [this](int64_t key) { return before_[std::clamp<int64_t>(key, 0, p_.keys)]; };
    return {from(rows_[i] + p_.low), from(rows_[i] + p_.high + 1)};
  }

  Window seen_from(int64_t row) const {
    if (!banded_) return {0, padded_, size_};
    const int64_t start = seen_by(row).first / P * P, end = seen_by(std::min(row + kRows, count_) - 1).second;
    return {start, rounded_up(end - start, P), std::min(rounded_up(end - start, P), size_ - start)};
  }

  // Fills what a query does not see.
  template <class X> void hide(int64_t i, const Window& here, X value, X* row) const {
    const auto [from, till] = seen_by(i);
    std::fill(row, row + from - here.start, value), std::fill(row + till - here.start, row + here.wide, value);
  }

  // One visit of every row: what it forms, closes and does.
  struct Pass {
    bool first, closes_rows, closes_columns;
  };

  // Of a mean of 1; tokens without mass have no part.
  W row_mass(int64_t i) const { return row_mass_ ? W(row_mass_[rows_[i]]) * W(count_) : W(1); }

  W start_of(int64_t i) const {
    return !(row_mass(i) > 0) ? W(-kInfinity) : query_dual_ ? W(query_dual_[rows_[i]]) : W(0);
  }

  // Once rows were closed, a is 1 / sum, which is large where a mass is small; before, the scaling itself.
  bool of_density(const Pass& pass) const {
    return row_mass_ && (pass.closes_rows || (!pass.first && p_.half_steps > (p_.rows_first ? 0 : 1)));
  }

  // What a scaling makes of a row of K: of the plan, or of that divided by the row's mass.
  W weight_of(int64_t i, W a, bool is_density, bool of_plan) const {
    const W mass = row_mass(i);
    if (of_plan) return is_density ? a * mass : a;
    return is_density || !(mass > 0) ? a * W(mass > 0) : a / mass;
  }

  template <class Run> void each_pass(const Run& run) {
    bool first = true, goes_on = true;
    each_pair(p_.rows_first, p_.half_steps, [&](bool closes_rows, bool closes_columns) {
      goes_on = goes_on && run(Pass{first, closes_rows, closes_columns}), first = false;
    });
    if (goes_on && !ends_on_rows_) run(Pass{false, false, false});
  }

  void take(Scratch& scratch) {
    const int64_t rows = kept_ ? count_ : kRows;
    const int64_t value_panels = v_ && !slopes_ ? rounded_up(p_.width, E) : 0, valued = p_.to_columns ? count_ : size_;
    const size_t bytes = (padded_ * (p_.dim + 1) + kRows * padded_) * sizeof(S) +
                         (rows * stride_ + 2 * count_ + 3 * padded_ + value_panels * valued) * sizeof(W);
    scratch.reserve(bytes + 16 * kBytes);
    panels_ = scratch.take<S>(padded_ * p_.dim), added_ = scratch.take<S>(padded_);
    scores_ = scratch.take<S>(kRows * padded_), kernel_ = scratch.take<W>(rows * stride_);
    a_ = scratch.take<W>(count_), log_a_ = scratch.take<W>(count_);
    b_ = scratch.take<W>(padded_), total_ = scratch.take<W>(padded_), top_ = scratch.take<W>(padded_);
    values_ = scratch.take<W>(value_panels * valued);
    pack_keys();
  }

  // Active keys, times the multiplier, as panels [P keys' k_d, of every d]; and the dual they start from,
  // its middle at 0: the loop from g on S is the loop from 0 on S + g.
  void pack_keys() {
    pack_tokens(k_, p_.k_strides.token, keys_, dim_, S(p_.multiplier), panels_);
    if (key_dual_ == nullptr) return;
    S low = S(kInfinity), high = -S(kInfinity);
    for (int64_t j : active_) low = std::min(low, key_dual_[j]), high = std::max(high, key_dual_[j]);
    const S middle = low + (high - low) / 2;
    for (int64_t j = 0; j < size_; ++j) added_[j] = key_dual_[active_[j]] - middle;
  }

  // S of a block of rows and the keys of its window; of others, one of a key that is seen.
  void form_scores(int64_t row, int64_t count, const Window& here) {
    const Rows<S> x(row, row + count, [this](int64_t i) { return q_ + rows_[i] * p_.q_strides.token; });
    tiles<S>(x, dim_, panels_ + here.start * dim_, P * dim_, here.wide, scores_, padded_);
    for (int64_t r = 0; r < count; ++r) {
      S* s = scores_ + r * padded_;
      if (banded_) {
        hide(row + r, here, s[seen_by(row + r).first - here.start], s);
        continue;
      }
      if (key_dual_) for (int64_t j = 0; j < size_; ++j) s[j] += added_[j];
      if (const S* bias = bias_ + rows_[row + r] * p_.bias_strides.token; bias_) {
        if (size_ == p_.keys && p_.bias_key_stride == 1) for (int64_t j = 0; j < size_; ++j) s[j] += bias[j];
        else for (int64_t j = 0; j < size_; ++j) s[j] += bias[active_[j] * p_.bias_key_stride];
      }
      std::fill(s + size_, s + padded_, s[0]);
    }
  }

  // K of a block of rows, and their products with b; false where a row's scores are too far apart.
  bool form_kernel(int64_t row, int64_t count, const Window& here, W* rows, W* sums) {
    form_scores(row, count, here);
    for (int64_t r = 0; r < count; ++r) {
      S* const s = scores_ + r * padded_;
      V<S> high[2] = {load(s), load(s + kLanes<S>)}, low[2] = {high[0], high[1]};  // neither waits for the other
      for (int64_t j = P; j < here.wide; j += P) {
        for (int64_t side = 0; side < 2; ++side) {
          const V<S> x = load(s + j + side * kLanes<S>);
          high[side] = x > high[side] ? x : high[side], low[side] = x < low[side] ? x : low[side];
        }
      }
      const S top = max_of<S>(high[0] > high[1] ? high[0] : high[1]);
      const auto range_of = [&](double below) {
        return unshifted_ ? std::max(double(top), below) : double(top) + below + spare_;
      };
      double range = range_of(max_of<S>(low[0] < low[1] ? -low[0] : -low[1]));
      const bool masks = !(range <= kSafeRange<W>);
      if (masks && is_softmax_ && std::isfinite(top)) range = kSafeRange<W>;  // what leaves the format is nothing
      else if (masks) range = top == -S(kInfinity) ? 0 : range_of(below_unmasked(s, here.keys, top));
      if (!(range <= widest_)) widest_ = range;
      if (!(range <= kSafeRange<W>)) return false;
      const V<W> shift = all(unshifted_ || top == -S(kInfinity) ? W(0) : W(top));
      W* const to = rows + r * stride_;
      sums[r] = masks ? exponentials<false>(s, shift, here, to) : exponentials<true>(s, shift, here, to);
      log_a_[row + r] = W(top) + start_of(row + r);
      if (banded_) {
        hide(row + r, here, W(0), to), hide(row + r, here, -S(kInfinity), s);
        dots<1>(to, 0, here.wide, b_ + here.start, sums + r);
      }
      if (masks) see(s, here, to);
      else see_all(row + r);
    }
    return true;
  }

  // exp(s - shift) of a row, and its product with b.  bounded: no score is masked.
  template <bool bounded> W exponentials(const S* s, V<W> shift, const Window& here, W* to) const {
    V<W> sum[2] = {};
    for (int64_t j = 0; j < here.wide; j += 2 * L) {
      const V<W> left = exponential<W, bounded>(load_as<W>(s + j) - shift);
      const V<W> right = exponential<W, bounded>(load_as<W>(s + j + L) - shift);
      store(to + j, left), store(to + j + L, right);
      sum[0] += left * load(b_ + here.start + j), sum[1] += right * load(b_ + here.start + j + L);
    }
    return sum_of<W>(sum[0] + sum[1]);
  }

  // The lowest score of a row that is not masked, times -1.
  double below_unmasked(const S* s, int64_t keys, S top) const {
    S low = S(kInfinity);
    const S masked = unshifted_ ? -S(kMasked) : top - S(kMasked);
    for (int64_t j = 0; j < keys; ++j) low = s[j] > masked && s[j] < low ? s[j] : low;
    return -double(low);
  }

  void see_all(int64_t i) {
    is_sparse_ |= banded_, sees_all_ |= !banded_;
    if (banded_) std::fill(top_ + seen_by(i).first, top_ + seen_by(i).second, W(1));
  }

  // Notes which columns a row with masked entries sees: those of -inf alone have no part.
  void see(const S* s, const Window& here, const W* row) {
    is_sparse_ = true;
    W* const top = top_ + here.start;
    for (int64_t j = 0; j < here.keys; ++j)
      top[j] = std::max(top[j], row[j] > 0 ? row[j] : s[j] == -S(kInfinity) ? W(0) : kHardlySeen);
  }

  // Where entries are masked, scalings may drift apart until terms that count leave the format: not where no sum is
  // small. What a column has whose finite scores are all masked has left it.
  bool are_held() const {
    const W reach = W(std::exp(kSafeRange<W> + 5));
    for (int64_t i = 0; i < count_; ++i) if (!(a_[i] <= reach)) return false;
    for (int64_t j = 0; j < size_; ++j) {
      const bool absent = !sees_all_ && top_[j] == 0;
      if (!absent && !(b_[j] > 0 && b_[j] <= reach)) return false;
      if (!sees_all_ && top_[j] == kHardlySeen) return false;
    }
    return true;
  }

  bool linear_pass(const Pass& pass) {
    const double scale = scale_ / (ends_on_rows_ ? 1.0 : share_);
    if (pass.closes_columns) std::fill_n(total_, padded_, W(0));
    else pack_values(b_);
    for (int64_t row = 0; row < count_; row += kRows) {
      const int64_t count = std::min<int64_t>(kRows, count_ - row);
      const Window here = windows_[row / kRows];
      W* rows = kernel_ + (kept_ ? row * stride_ : 0);
      W *a = a_ + row, sums[kRows];
      const bool ahead = kept_ && !pass.first && row + 2 * kRows <= count_;  // from where memory is slow
      if (pass.first || !kept_) {
        if (!form_kernel(row, count, here, rows, sums)) return false;
        if (pass.first && !pass.closes_rows && !stabilised_) start_rows(row, count);
      } else if (pass.closes_rows) {
        by_rows(count, [&](int64_t r, auto R) {
          dots<R.value>(rows + r * stride_, stride_, here.wide, b_ + here.start, sums + r);
        });
      }
      if (pass.closes_rows) for (int64_t r = 0; r < count; ++r) a[r] = closed_row(a[r], sums[r], pass);
      W weights[kRows];
      for (int64_t r = 0; r < count; ++r)
        weights[r] = weight_of(row + r, a[r], of_density(pass), pass.closes_columns || p_.to_columns);
      if (!pass.closes_columns) apply(row, count, here, rows, weights, b_, scale);
      else by_rows(count, [&, next = ahead ? rows + kRows * stride_ : nullptr](int64_t r, auto R) {
        add_rows<R.value>(rows + r * stride_, stride_, here.wide, weights + r, total_ + here.start, next);
      });
    }
    if (!pass.closes_columns) {
      if (p_.to_columns) apply_to_columns(b_, scale);
      return true;
    }
    if (stabilised_) {
      for (int64_t j = 0; j < size_; ++j) b_[j] = closed_column(j, total_[j], pass);
    } else {
      for (int64_t j = 0; j < padded_; j += L) {
        const V<W> total = load(total_ + j);
        store(b_ + j, total == V<W>{} ? total : all(W(share_)) / total);
      }
      std::fill(b_ + size_, b_ + padded_, W(0));
    }
    if (pass.first && !pass.closes_rows && !stabilised_)  // in the units of the last block, which are everyone's
      for (int64_t i = 0; i < count_; ++i) a_[i] = started(i);
    if (!is_sparse_ || stabilised_ || are_held()) return true;
    widest_ = kInfinity;
    return false;
  }

  // A row that sees no mass has no part.
  W closed_row(W a, W sum, const Pass& pass) const {
    if (!stabilised_) return sum == 0 ? W(0) : W(1) / sum;
    const W found = closed(p_.rule, a, W(p_.row_mass), sum, p_.rule.softmax && pass.first);
    return pass.first || !pass.closes_columns ? found : found * W(p_.rule.gauge);
  }

  W closed_column(int64_t j, W sum, const Pass& pass) const {
    const W own = pass.closes_rows && !pass.first ? b_[j] / W(p_.rule.gauge) : b_[j];
    return closed(p_.rule, own, W(p_.column_mass), sum, p_.rule.softmax && pass.first && !pass.closes_rows);
  }

  // a_i = exp(f_i) in K's units where columns are closed first, less the largest of them up to here.
  void start_rows(int64_t row, int64_t count) {
    const W top = *std::max_element(log_a_ + row, log_a_ + row + count);
    if (top > highest_) {
      const W factor = std::exp(W(highest_) - top);
      for (int64_t j = 0; j < padded_; ++j) total_[j] *= factor;
      highest_ = top;
    }
    for (int64_t i = row; i < row + count; ++i) a_[i] = started(i);
  }

  W started(int64_t i) const { return log_a_[i] == W(-kInfinity) ? W(0) : std::exp(log_a_[i] - W(highest_)); }

  // Log plan of a block of rows as the last columns left it, in place of K.
  void form_log_plan(int64_t row, int64_t count, const Window& here, W* rows) {
    form_scores(row, count, here);
    for (int64_t r = 0; r < count; ++r) {
      W* x = rows + r * stride_;
      for (int64_t j = 0; j < here.wide; j += L)
        store(x + j, load_as<W>(scores_ + r * padded_ + j) + a_[row + r] + load(b_ + here.start + j));
      std::fill(x + here.keys, x + here.wide, W(-kInfinity));
      if (banded_) hide(row + r, here, W(-kInfinity), x);
    }
  }

  void logarithmic_pass(const Pass& pass) {
    W ones[kRows];
    std::fill_n(total_, padded_, W(pass.closes_columns ? 0 : 1)), std::fill_n(top_, padded_, W(-kInfinity));
    if (!pass.closes_columns) pack_values(total_);
    for (int64_t row = 0; row < count_; row += kRows) {
      const int64_t count = std::min<int64_t>(kRows, count_ - row);
      const Window here = windows_[row / kRows];
      W* rows = kernel_ + (kept_ ? row * stride_ : 0);
      form_log_plan(row, count, here, rows);
      for (int64_t r = 0; r < count; ++r) {
        W* x = rows + r * stride_;
        ones[r] = p_.to_columns ? W(1) : row_mass(row + r) > 0 ? W(1) / row_mass(row + r) : W(0);
        if (pass.closes_rows) a_[row + r] += close_log_row(x, here.wide, std::log(row_mass(row + r)));
        if (pass.closes_columns) continue;
        for (int64_t j = 0; j < here.wide; j += L) store(x + j, exponential<W>(load(x + j)));
      }
      if (pass.closes_columns) add_log_rows(rows, count, here);
      else apply(row, count, here, rows, ones, total_, scale_);
    }
    if (!pass.closes_columns) {
      if (p_.to_columns) apply_to_columns(total_, scale_);
      return;
    }
    for (int64_t j = 0; j < size_; ++j)  // a column that no query sees stays as it is
      if (top_[j] != W(-kInfinity)) b_[j] -= top_[j] + std::log(total_[j]);
  }

  // x_j - logsumexp(x) + log mass, and what was added; a row of -inf alone stays as it is.
  W close_log_row(W* x, int64_t wide, W log_mass) const {
    V<W> high = load(x), sum{};
    for (int64_t j = L; j < wide; j += L) high = load(x + j) > high ? load(x + j) : high;
    const W top = max_of<W>(high);
    if (top == W(-kInfinity)) return W(0);
    for (int64_t j = 0; j < wide; j += L) sum += exponential<W>(load(x + j) - top);
    const W rest = std::log(sum_of<W>(sum)) - log_mass;
    for (int64_t j = 0; j < wide; j += L) store(x + j, load(x + j) - top - rest);
    return -(top + rest);
  }

  // The columns' logsumexp as top + log(total), one block of rows further.
  void add_log_rows(const W* rows, int64_t count, const Window& here) {
    W *const tops = top_ + here.start, *const totals = total_ + here.start;
    for (int64_t j = 0; j < here.wide; j += L) {
      V<W> top = load(tops + j);
      for (int64_t r = 0; r < count; ++r) {
        const V<W> x = load(rows + r * stride_ + j);
        top = x > top ? x : top;
      }
      const V<W> finite = top == all(W(-kInfinity)) ? V<W>{} : top;
      V<W> sum = load(totals + j) * exponential<W>(load(tops + j) - finite);
      for (int64_t r = 0; r < count; ++r) sum += exponential<W>(load(rows + r * stride_ + j) - finite);
      store(totals + j, sum), store(tops + j, top);
    }
  }

  void pack_values(const W* weights) {
    if (v_ && !p_.to_columns && !slopes_) ::pack_values(v_, p_.v_strides.token, keys_, p_.width, weights, values_);
  }

  // A block of rows of the map, times the values where there are some; or what it weighs in all columns, in a_.
  void apply(int64_t row, int64_t count, const Window& here, const W* rows, const W* a, const W* weights, double scale) {
    if (slopes_) return;
    if (p_.to_columns) {
      std::copy_n(a, count, a_ + row);
      return;
    }
    if (v_ == nullptr) {
      for (int64_t r = 0; r < count; ++r) {
        S* out = out_ + rows_[row + r] * p_.width;
        const W factor = W(a[r] * scale);
        if (here.keys < p_.keys) std::fill_n(out, p_.keys, S(0));
        for (int64_t j = 0; j < here.keys; ++j)
          out[active_[here.start + j]] = S(factor * rows[r * stride_ + j] * weights[here.start + j]);
      }
      return;
    }
    const Rows<W> x(0, count, [=, this](int64_t r) { return rows + r * stride_; });
    multiply(x, here.keys, values_ + here.start * E, E * size_, p_.width, [=](int64_t r) { return W(a[r] * scale); },
             [=, this](int64_t r) { return out_ + rows_[row + r] * p_.width; });
  }

  // diag(weights) K^T diag(a) v of the rows' values, by blocks of columns.
  void apply_to_columns(const W* weights, double scale) {
    ::pack_values(v_, p_.v_strides.token, queries_, p_.width, a_, values_);
    for (int64_t start = 0; start < size_; start += kRows)
      multiply(Rows<W>(start, size_, [this](int64_t j) { return kernel_ + j; }), count_, values_, E * count_, p_.width,
               [=](int64_t j) { return W(weights[j] * scale); },
               [this](int64_t j) { return out_ + active_[j] * p_.width; }, stride_);
  }

  // Visits K by blocks of rows.
  template <class Body> void each_block(const Body& body) {
    for (int64_t row = 0; row < count_; row += kRows) {
      const int64_t count = std::min<int64_t>(kRows, count_ - row);
      W *rows = kernel_ + (kept_ ? row * stride_ : 0), sums[kRows];
      const Window here = windows_[row / kRows];
      if (!kept_) form_kernel(row, count, here, rows, sums);
      body(row, count, here, rows);
    }
  }

  void take_rows(const S* from, int64_t stride, int64_t width, int64_t row, int64_t count, W factor, W* to) const {
    for (int64_t r = 0; r < count; ++r, to += rounded_up(width, L))
      for (int64_t e = 0; e < width; ++e) to[e] = W(from[rows_[row + r] * stride + e]) * factor;
  }

  // What a tail may leave out of a row, see kernels/loop.py.
  double may_leave_out(const W* terms, const W* weights, int64_t wide, W sum, W mass) const {
    const W mean = sum / std::max(mass, std::numeric_limits<W>::min());
    V<W> slopes{}, size{};
    for (int64_t j = 0; j < wide; j += L) {
      const V<W> term = load(terms + j), slope = term - load(weights + j) * mean;
      slopes += slope < 0 ? -slope : slope, size += term < 0 ? -term : term;
    }
    return slopes_->tolerance * double(sum_of<W>(slopes)) +
           8 * double(std::numeric_limits<W>::epsilon()) * double(sum_of<W>(size));
  }

  // Gradients of A v from the scalings of every half-step. With of_a and of_b those of log a and log b,
  //
  //     rows closed     dL/dS_ij = -of_a_i a_i K_ij b_j       columns closed    dL/dS_ij = -of_b_j a_i K_ij b_j / share
  //     applied         dL/dS_ij = <grad_i, v_j> A_ij
  //
  // so that the slopes of all are K times one product of rank T + E, formed in the last visit of K. The chain before
  // it (block-wise paper, Propositions 1 and 6) takes one visit for a pair of half-steps. To columns, grad is the keys'
  // and v the rows'. The a of a row that was closed is that of a mass of 1 (weight_of), its mass a factor of its own.
  void differentiate() {
    const int64_t deep = rounded_up(p_.dim, L), wide = rounded_up(p_.width, L);
    const W scale = W(scale_ / (ends_on_rows_ ? 1.0 : share_));
    std::vector<W> of_a(count_), of_b(padded_), own_a(count_), z(kRows * padded_), weights(kRows * padded_), grads(kRows * wide);
    std::vector<W> panels(padded_ * p_.width), dv(size_ * wide), of_columns(p_.to_columns ? rounded_up(p_.width, E) * size_ : 0);
    const S *of_rows = static_cast<const S*>(slopes_->grad) + index_ * (p_.to_columns ? p_.keys : p_.queries) * p_.width, *of_keys = v_;
    int64_t row_step = p_.width, key_step = p_.v_strides.token;
    if (p_.to_columns) std::swap(of_rows, of_keys), std::swap(row_step, key_step);
    pack_tokens(of_keys, key_step, keys_, p_.width, W(1), panels.data());
    if (p_.to_columns) ::pack_values<S, W>(of_keys, key_step, keys_, p_.width, nullptr, of_columns.data());
    const bool is_density = row_mass_ && (p_.rows_first || p_.half_steps > 1);
    for (int64_t i = 0; i < count_; ++i) own_a[i] = weight_of(i, a_[i], is_density, p_.to_columns) * scale;
    const auto form = [&](int64_t row, int64_t count, const Window& here) {  // <grad_i, v_j>
      take_rows(of_rows, row_step, p_.width, row, count, W(1), grads.data());
      const Rows<W> x(0, count, [&](int64_t r) { return &grads[r * wide]; });
      tiles<W>(x, p_.width, panels.data() + here.start * p_.width, E * p_.width, here.wide, z.data(), padded_);
    };
    double allowed = 0;
    each_block([&](int64_t row, int64_t count, const Window& here, const W* rows) {
      form(row, count, here);
      for (int64_t r = 0; r < count; ++r) {
        W *terms = &z[r * padded_], *own = &weights[r * padded_];
        const W factor = own_a[row + r];
        V<W> sum{}, mass{};
        for (int64_t j = 0; j < here.wide; j += L) {
          W* const of_key = &of_b[here.start + j];
          const V<W> weight = load(rows + r * stride_ + j) * load(b_ + here.start + j) * factor, term = weight * load(terms + j);
          store(own + j, weight), store(terms + j, term), store(of_key, load(of_key) + term);
          sum += term, mass += weight;
        }
        of_a[row + r] = sum_of<W>(sum);
        if (slopes_->tolerance > 0) allowed += may_leave_out(terms, own, here.wide, of_a[row + r], sum_of<W>(mass));
      }
      if (p_.to_columns) multiply(Rows<W>(row, row + count, [&](int64_t i) { return &weights[(i - row) * padded_]; }), here.keys,
          of_columns.data(), E * size_, p_.width, [](int64_t) { return W(1); },
          [this](int64_t i) { return static_cast<S*>(slopes_->v) + (index_ * p_.queries + rows_[i]) * p_.width; });
      else by_rows(count, [&](int64_t r, auto R) {
        add_products<R.value>(&weights[r * padded_], padded_, here.keys, &grads[r * wide], wide, &dv[here.start * wide]);
      });
    });
    if (!p_.to_columns) put(dv, wide, keys_, p_.width, slopes_->v, p_.keys);
    of_mass_.assign(count_, W(0));
    for (int64_t i = 0; i < count_ && !p_.to_columns; ++i) of_mass_[i] = -of_a[i];

    std::vector<W> left, right;  // the slopes of the half-steps are K times sum_t left_t right_t
    left.reserve(p_.half_steps * count_), right.reserve(p_.half_steps * padded_);
    const int64_t depth = follow_back(of_a, of_b, allowed, left, right);
    slopes_->depth[index_] = depth;
    if (slopes_->dual && p_.rows_first) put(of_b, 1, keys_, 1, slopes_->dual, p_.keys);
    else if (slopes_->dual) put(of_a, 1, queries_, 1, slopes_->dual, p_.queries);
    for (int64_t i = 0; slopes_->mass && i < count_; ++i) of_mass_[i] = row_mass(i) > 0 ? of_mass_[i] / row_mass_[rows_[i]] : W(0);
    if (slopes_->mass) put(of_mass_, 1, queries_, 1, slopes_->mass, p_.queries);

    std::vector<W> keys(rounded_up(p_.dim, E) * size_), dk(size_ * deep), points(kRows * deep);
    ::pack_values<S, W>(k_, p_.k_strides.token, keys_, p_.dim, nullptr, keys.data());
    each_block([&](int64_t row, int64_t count, const Window& here, const W* rows) {
      form(row, count, here);
      const Rows<W> steps(row, row + count, [&](int64_t i) { return left.data() + i; });
      tiles<W>(steps, depth, right.data() + here.start, E, here.wide, weights.data(), padded_, padded_, count_);
      const W multiplier = W(p_.multiplier);
      for (int64_t r = 0; r < count; ++r)
        for (int64_t j = 0; j < here.wide; j += L) {
          W* const slope = &z[r * padded_ + j];
          const V<W> applied = load(slope) * load(b_ + here.start + j) * own_a[row + r];
          store(slope, load(rows + r * stride_ + j) * (applied + load(&weights[r * padded_ + j])));
        }
      for (int64_t r = 0; slopes_->bias && r < count; ++r)
        for (int64_t j = 0; j < here.keys; ++j)
          static_cast<S*>(slopes_->bias)[(index_ * p_.queries + rows_[row + r]) * p_.keys + active_[here.start + j]] = S(z[r * padded_ + j]);
      const Rows<W> x(row, row + count, [&](int64_t i) { return &z[(i - row) * padded_]; });
      multiply(x, here.keys, keys.data() + here.start * E, E * size_, p_.dim, [=](int64_t) { return multiplier; }, [this](int64_t i) {
        return static_cast<S*>(slopes_->q) + (index_ * p_.queries + rows_[i]) * p_.dim;
      });
      take_rows(q_, p_.q_strides.token, p_.dim, row, count, multiplier, points.data());
      by_rows(count, [&](int64_t r, auto R) {
        add_products<R.value>(&z[r * padded_], padded_, here.keys, &points[r * deep], deep, &dk[here.start * deep]);
      });
    });
    put(dk, deep, keys_, p_.dim, slopes_->k, p_.keys);
  }

  // Rows of active tokens, to where they are of all.
  void put(const std::vector<W>& from, int64_t apart, const Tokens& tokens, int64_t width, void* to,
           int64_t count) const {
    const int64_t size = tokens.active.size();
    for (int64_t t = 0; t < size; ++t)
      for (int64_t e = 0; e < width; ++e)
        static_cast<S*>(to)[(index_ * count + tokens.active[t]) * width + e] = S(from[t * apart + e]);
  }

  // The gradients of log a and log b, back along the half-steps, and the slopes of those; returns how many.
  int64_t follow_back(std::vector<W>& of_a, std::vector<W>& of_b, double allowed, std::vector<W>& left,
                      std::vector<W>& right) {
    const int64_t most = std::min(slopes_->most, p_.half_steps);
    int64_t depth = 0;
    const auto without_gauge = [](std::vector<W>& of, int64_t size, const W* scalings) {
      const int64_t seen = size - std::count(scalings, scalings + size, W(0));
      const W mean = std::accumulate(of.begin(), of.begin() + size, W(0)) / W(std::max<int64_t>(seen, 1));
      for (int64_t t = 0; t < size; ++t) if (scalings[t] != 0) of[t] -= mean;
    };
    const auto size_of = [](W sum, W x) { return sum + std::abs(x); };
    const W *a = past_a_.data() + past_a_.size() - count_, *b = past_b_.data() + past_b_.size() - padded_;
    std::vector<W> own_a(count_);
    for (bool columns = !ends_on_rows_; depth < most; columns = true) {
      const bool is_density = row_mass_ && (p_.rows_first || a != past_a_.data());
      for (int64_t i = 0; i < count_; ++i) own_a[i] = weight_of(i, a[i], is_density, true);
      if (columns) {
        left.insert(left.end(), own_a.begin(), own_a.end());
        for (int64_t j = 0; j < padded_; ++j) right.push_back(-of_b[j] * b[j] / W(share_)), of_b[j] = 0;
        ++depth, b -= padded_;
      }
      const bool closes_rows = depth < most;
      const W* const y = right.data() + right.size() - padded_;
      std::fill_n(total_, padded_, W(0));
      each_block([&](int64_t row, int64_t count, const Window& here, const W* rows) {
        W sums[kRows], x[kRows];
        by_rows(count, [&](int64_t r, auto R) {
          if (columns) dots<R.value>(rows + r * stride_, stride_, here.wide, y + here.start, sums + r);
          for (int64_t i = r; i < r + R.value; ++i) {
            if (columns) of_a[row + i] += own_a[row + i] * sums[i];
            x[i] = -of_a[row + i] * a[row + i];
          }
          if (closes_rows) add_rows<R.value>(rows + r * stride_, stride_, here.wide, x + r, total_ + here.start);
        });
      });
      if (!closes_rows) {
        without_gauge(of_a, count_, own_a.data());
        break;
      }
      for (int64_t i = 0; i < count_; ++i) left.push_back(-of_a[i] * a[i]), of_mass_[i] += of_a[i], of_a[i] = 0;
      right.insert(right.end(), b, b + padded_);
      for (int64_t j = 0; j < padded_; ++j) of_b[j] += b[j] * total_[j];
      without_gauge(of_b, size_, b);  // rounding of a sum that is 0 would not fade along the chain as the rest does
      ++depth, a -= count_;
      if (slopes_->tolerance > 0 && double(p_.half_steps - depth) *
              double(std::accumulate(of_b.begin(), of_b.end(), W(0), size_of)) <= allowed) break;
    }
    return depth;
  }

  const Problem& p_;
  const Slopes* const slopes_;
  const int64_t index_;
  const Tokens &queries_, &keys_;
  const std::vector<int64_t> &rows_, &active_;
  const int64_t count_, size_, padded_;
  const S *q_, *k_, *v_, *bias_, *key_dual_, *query_dual_, *row_mass_;
  S *out_, *panels_, *added_, *scores_;
  W *kernel_, *a_, *log_a_, *b_, *total_, *top_, *values_;
  int64_t dim_, stride_;
  std::vector<Window> windows_;     // of every block of rows
  std::vector<int64_t> before_;     // of a band: the active keys before each
  std::vector<W> past_a_, past_b_, of_mass_;  // after every half-step, for gradients; that of log masses
  bool banded_, kept_, ends_on_rows_, stabilised_, unshifted_, is_softmax_, sees_all_, is_sparse_;
  double share_, scale_, spare_, widest_, highest_;
};

// Returns the widest range of scores in a row, or the first beyond what float64 holds; with a constant, what
// was written means nothing then.
template <class S>
double run_head(const Problem& p, const Slopes* slopes, int64_t index, Scratch& scratch, const Tokens& queries,
                const Tokens& keys) {
  double range = Head<S, S>(p, slopes, index, scratch, queries, keys).linear();
  if (range <= kSafeRange<S>) return range;
  if constexpr (!std::is_same_v<S, double>) {
    range = Head<S, double>(p, slopes, index, scratch, queries, keys).linear();
    if (range <= kSafeRange<double>) return range;
  }
  if (p.rule.form == kPlain && !slopes) Head<S, double>(p, slopes, index, scratch, queries, keys).logarithmic();
  return range;
}

// Half-steps on a kernel K of any origin. All quotients but those of kPlan are taken to a power.
struct Scaling {
  int64_t rows, columns, half_steps, rows_first;
  double row_power, column_power;
  Rule rule;
};

// The same of numbers of several matrices.
template <int R, class X> INLINE void row_sums(const X* rows, int64_t size, const X* b, X* sums) {
  if constexpr (!kIsVector<X>) return dots<R>(rows, size, size, b, sums);
  else for (int64_t j = 0; j < size; ++j) for (int r = 0; r < R; ++r) sums[r] += rows[r * size + j] * b[j];
}
template <int R, class X> INLINE void add_to_columns(const X* rows, int64_t size, const X* a, X* total) {
  if constexpr (!kIsVector<X>) return add_rows<R>(rows, size, size, a, total);
  else for (int64_t j = 0; j < size; ++j) for (int r = 0; r < R; ++r) total[j] += a[r] * rows[r * size + j];
}

// New scalings of rows or columns, those of one matrix by registers, up to whose end all these arrays reach.
template <class X> INLINE void close_all(const Rule& rule, int64_t count, const X* mass, const X* sums, bool exact,
                                         double power, X* scalings) {
  typedef V<typename Number<X>::type> Y;
  constexpr int64_t step = sizeof(Y) / sizeof(X);
#pragma GCC unroll 4
  for (int64_t i = 0; i < count; i += step) {
    Y* to = reinterpret_cast<Y*>(scalings + i);
    const auto at = [i](const X* from) { return *reinterpret_cast<const Y*>(from + i); };
    const Y quotient = closed<Y>(rule, *to, at(mass), at(sums), exact);
    *to = power == 1.0 ? quotient : power_of<typename Number<X>::type>(quotient, power);
  }
}

// All half-steps of one matrix, or of several side by side. a and b, the scalings of rows and columns, hold where
// they start and what they become; mu and nu are their masses; total: [columns].  Rows are closed, and what
// they add to the columns' sums is added, before the next ones are read.  size: of both sides, where it is known here.
template <class X, int size = 0>
INLINE void scale_sides(const Scaling& s, const X* kernel, const X* mu, const X* nu, X* a, X* b, X* total) {
  typedef typename Number<X>::type T;
  constexpr int64_t together = kIsVector<X> ? 4 : std::max(4, kLanes<T>);
  const int64_t all_rows = size ? size : s.rows, columns = size ? size : s.columns;
  const X gauge = X{} + T(s.rule.gauge);
  bool first = true;
  each_pair(s.rows_first != 0, s.half_steps, [&](bool closes_rows, bool closes_columns) {
    const bool regauged = closes_rows && !first && s.rule.gauge != 1.0, exact = s.rule.softmax && first;
    std::fill_n(total, columns, X{});
    for (int64_t start = 0; start < all_rows; start += together) {
      const int64_t count = std::min(together, all_rows - start);
      const auto by_four = [&](const auto& body) {
        int64_t row = 0;
        for (; row + 4 <= count; row += 4) body(row, std::integral_constant<int, 4>{});
        for (; row < count; ++row) body(row, std::integral_constant<int, 1>{});
      };
      const X* rows = kernel + start * columns;
      if (closes_rows) {
        alignas(kBytes) X sums[together] = {};
        by_four([&](int64_t row, auto R) { row_sums<R.value>(rows + row * columns, columns, b, sums + row); });
        close_all(s.rule, count, mu + start, sums, exact, s.row_power, a + start);
        if (regauged) for (int64_t row = start; row < start + count; ++row) a[row] *= gauge;
      }
      if (closes_columns) by_four([&](int64_t row, auto R) {
        add_to_columns<R.value>(rows + row * columns, columns, a + start + row, total);
      });
    }
    if (regauged) for (int64_t j = 0; j < columns; ++j) b[j] /= gauge;
    if (closes_columns) close_all(s.rule, columns, nu, total, exact && !closes_rows, s.column_power, b);
    first = false;
  });
}

// Of small squares side by side, all stays in registers.
template <class X>
void scale(const Scaling& s, const X* kernel, const X* mu, const X* nu, X* a, X* b, X* total) {
  constexpr int size = 4;
  if constexpr (kIsVector<X>) if (s.rows == size && s.columns == size && s.rule.gauge == 1.0) {
    X own[size * size], rows[size], columns[size], sums[size], row_mass[size], column_mass[size];
    std::copy_n(kernel, size * size, own), std::copy_n(mu, size, row_mass), std::copy_n(nu, size, column_mass);
    std::copy_n(a, size, rows), std::copy_n(b, size, columns);
    scale_sides<X, size>(s, own, row_mass, column_mass, rows, columns, sums);
    std::copy_n(rows, size, a), std::copy_n(columns, size, b);
    return;
  }
  scale_sides<X>(s, kernel, mu, nu, a, b, total);
}

// Whether this process was forked and has started no program since, or cannot be asked: where its parent had
// threads of torch's, it waits for them forever.
bool is_fork() {
  std::FILE* file = std::fopen("/proc/self/stat", "r");
  if (file == nullptr) return true;
  unsigned flags = 0;
  const int found = std::fscanf(file, "%*d (%*[^)]) %*c %*d %*d %*d %*d %*d %u", &flags);
  std::fclose(file);
  return found != 1 || (flags & 0x40) != 0;  // PF_FORKNOEXEC
}

// Calls work on so many threads: torch's, or where they are not at hand, some that end with the call.
void work_on(int64_t threads, const std::function<void()>& work) {
  static bool forked = false;
  static std::once_flag asked;
  std::call_once(asked, [] {
    forked = is_fork();
    pthread_atfork(nullptr, nullptr, [] { forked = true; });
  });
  const auto call = [](void* of) { (*static_cast<const std::function<void()>*>(of))(); };
  if (GOMP_parallel && !forked) return GOMP_parallel(call, const_cast<std::function<void()>*>(&work), unsigned(threads), 0);
  std::vector<std::thread> others;
  try {
    while (int64_t(others.size()) + 1 < threads) others.emplace_back(std::cref(work));
  } catch (const std::system_error&) {  // there may be no more; those that there are do all the work
  }
  work();
  for (std::thread& other : others) other.join();
}

// Calls body(index, scratch) for each, by as many threads as that is worth; whether there was enough memory.
template <class Body> bool each(int64_t count, double products, int64_t threads, const Body& body) {
  std::atomic<int64_t> next{0};
  std::atomic<bool> fits{true};
  const std::function<void()> work = [&] {
    static thread_local Scratch scratch;
    try {
      for (int64_t index; (index = next++) < count;) body(index, scratch);
    } catch (const std::bad_alloc&) {
      fits = false;
    }
    scratch.shrink();
  };
  if (products < kSmall || std::min(threads, count) < 2) work();
  else work_on(threads, work);
  return fits;
}

// How many of body(index, scratch) are lost; -1 where there is not enough memory.
template <class Body> int64_t count_lost(int64_t count, double products, int64_t threads, const Body& body) {
  std::atomic<int64_t> lost{0};
  const bool fits = each(count, products, threads, [&](int64_t index, Scratch& scratch) { lost += body(index, scratch); });
  return fits ? int64_t(lost) : -1;
}

template <class S> double run(const Problem& p, const Slopes* slopes) {
  const double entries = double(p.batch * p.heads * p.queries) * double(std::min(p.keys, p.high - p.low + 1));
  std::mutex mutex;
  double widest = 0.0;
  const bool fits = each(p.batch * p.heads, entries * double(p.dim + p.width + 2 * p.half_steps + 16), p.threads,
                         [&](int64_t index, Scratch& scratch) {
    Tokens keys(p.keep, p.keys, index / p.heads);
    Tokens queries(keys.none ? nullptr : p.query_keep, p.queries, index / p.heads);
    if (p.banded()) {
      keys.leave_out([&p](int64_t j) { return j < p.low || j > p.queries - 1 + p.high; });
      queries.leave_out([&p, &seen = keys.active](int64_t i) {
        const auto first = std::lower_bound(seen.begin(), seen.end(), i + p.low);
        return first == seen.end() || *first > i + p.high;
      });
    }
    const Tokens& written = p.to_columns ? keys : queries;
    const int64_t rows = p.to_columns ? p.keys : p.queries;
    const bool nothing = queries.none || queries.active.empty() || ((p.to_columns || p.banded()) && keys.none);
    if (!slopes && (nothing || int64_t(written.active.size()) < rows))
      std::fill_n(static_cast<S*>(p.out) + index * rows * p.width, rows * p.width, S(0));
    if (nothing) return;
    const double range = run_head<S>(p, slopes, index, scratch, queries, keys);
    const std::lock_guard<std::mutex> lock(mutex);
    if (!(range <= widest)) widest = range;
  });
  return fits ? widest : -1.0;
}

}  // namespace

// Plans, or their logarithms, from scores; kernels/native/__init__.py fills it in.  scores, out: [matrices, rows,
// columns]; held: [matrices] bytes, whether what was written means something, or null. log_mu, log_nu: logarithms of masses, of
// every matrix where mu_each and nu_each, of all alike otherwise, or null for row_mass and column_mass each. offset:
// what is subtracted from scores before exp where `start` has nothing else. near: scores beyond it are not held; lost:
// tokens of a lower log mass have a logarithm of the plan, but no part in sums.
// written: the order of a teacher's sums, in which a matrix that the linear domain does not hold is computed in
// logarithms; log_shares: uniform masses are 1 / N and 1 / M there, not 1. factor: of the plans.
// changes: where it is not null, no plan is written, but what each half-step on rows changes, [matrices, so many]: the
// sum over rows of |f - f before|, or if of_scalings of |exp(f) - exp(f before)|.
enum Start { kOffset, kOfMatrix, kOfRow, kOfColumn };
enum Written { kUnknown, kDuals, kReversed, kSummed, kIncrements, kLogs, kSoftmax };

struct Plan {
  const void *scores, *log_mu, *log_nu;
  void* out;
  uint8_t* held;
  double* changes;
  int64_t mu_each, nu_each, threads, of_scalings;
  double offset;
  int64_t matrices, rows, columns, half_steps, rows_first, is_double, beside;
  int64_t start, start_share, log, damped, written, log_shares, is_kernel;
  double multiplier, row_mass, column_mass, row_power, column_power, near, lost, factor;
  Rule rule;
};

namespace {

// Scalings may spread so far, of the range that a format holds, where entries of K are lost.
constexpr double kSpread = 0.6;

// The same of the transposed matrices.
Plan turned(const Plan& p) {
  Plan q = p;
  std::swap(q.rows, q.columns), std::swap(q.log_mu, q.log_nu), std::swap(q.mu_each, q.nu_each);
  std::swap(q.row_mass, q.column_mass), std::swap(q.row_power, q.column_power);
  q.rows_first = !p.rows_first;
  q.start = p.start == kOfRow ? int64_t{kOfColumn} : p.start == kOfColumn ? int64_t{kOfRow} : p.start;
  return q;
}

// About what a pass over a matrix takes: registers, numbers that fill none, and a sum across a register for each row.
template <class T> int64_t pass_of(int64_t rows, int64_t columns) {
  return rows * (columns / kLanes<T> + columns % (2 * kLanes<T>) + 2);
}

// S: the format of scores and plans. X: what is computed in: a number, for one matrix, or a register, for as many
// matrices as it holds.  is_turned: whether p is `turned`.
template <class X, class S> class Planned {
  typedef typename Number<X>::type T;
  static constexpr int64_t W = kIsVector<X> ? kLanes<T> : 1, L = kLanes<T>;
  static constexpr T kInf = std::numeric_limits<T>::infinity();

 public:
  Planned(const Plan& p, bool is_turned, int64_t index, Scratch& scratch)
      : p_(p), is_turned_(is_turned || kIsVector<X>), n_(p.rows), m_(p.columns), first_(index * W), count_(std::min(W, p.matrices - first_)),
        padded_(rounded_up(n_ * m_, L)), stabilised_(p.rule.form != kPlain), nothing_(p.is_kernel ? T(0) : -kInf),
        least_(p.is_kernel ? T(std::exp(-kSafeRange<T>)) : T(-kSafeRange<T>)), most_(p.is_kernel ? 1 / least_ : -least_) {
    const bool apart = p.log && !p.is_kernel && !p.changes;  // the logarithms of K are needed beside it
    scratch.reserve(((1 + apart) * padded_ + 6 * n_ + 4 * m_ + 10 * L) * sizeof(X) + 12 * kBytes);
    s_ = scratch.take<X>(padded_), kernel_ = apart ? scratch.take<X>(padded_) : s_;
    for (X** side : {&a_, &mu_, &row_tops_, &before_, &moved_, &off_}) *side = scratch.take<X>(whole(n_));
    for (X** side : {&b_, &nu_, &column_tops_, &total_}) *side = scratch.take<X>(whole(m_));
    given_ = kIsVector<X> || is_turned ? nullptr : static_cast<const S*>(p.scores) + first_ * n_ * m_;
    std::fill_n(own_, W, p.factor);
  }

  // Returns how many matrices are not held.
  int64_t run() {
    const bool ends_on_rows = (p_.rows_first != 0) == (p_.half_steps % 2 == 1);
    take_masses(p_.log_mu, p_.mu_each, n_, p_.row_mass, ends_on_rows, mu_);
    take_masses(p_.log_nu, p_.nu_each, m_, p_.column_mass, !ends_on_rows, nu_);
    take_scores();
    find_tops<false>();
    bool held[W];
    const auto none = [&](const auto& test) {
      for (int64_t g = 0; g < count_; ++g) held[g] = held[g] && test(g);
      return std::count(held, held + count_, true) == 0;
    };
    std::fill_n(held, count_, true), std::fill_n(p_.held + first_, count_, 0);
    if (none([this](int64_t g) { return is_near(g) && !vanishes(g); })) return count_;
    const bool shifts = is_shifted();
    if (p_.changes && none([this](int64_t g) { return start_changes(g); })) return count_;
    if (shifts) find_tops<true>();
    if (none([this](int64_t g) { return may_be_held(g); })) return count_;
    if (!shifts) form_kernel();
    std::fill_n(a_, whole(n_), X{} + (p_.start_share ? T(1) / T(n_) : T(1)));
    std::fill_n(b_, whole(m_), X{} + (p_.start_share ? T(1) / T(m_) : T(1)));
    std::fill_n(total_, whole(m_), X{});
    const Scaling loop{n_, m_, p_.half_steps, p_.rows_first, p_.row_power, p_.column_power, p_.rule};
    if (p_.changes) follow(loop);
    else scale<X>(loop, kernel_, mu_, nu_, a_, b_, total_);
    if (none([this, finite = are_finite()](int64_t g) { return is_held(g, finite); })) return count_;
    if (!p_.changes && p_.log) put_log_plan(held);
    else if (!p_.changes) put_plan();
    if (is_turned_ && !p_.changes) {
      S* const out = static_cast<S*>(p_.out) + first_ * n_ * m_;
      if constexpr (kIsVector<X>) turn(reinterpret_cast<const T*>(s_), W, n_ * m_, count_, T(1), out, n_ * m_);
      else turn(s_, m_, n_, m_, T(1), out, n_);
    }
    std::copy_n(held, count_, p_.held + first_);
    return std::count(held, held + count_, false);
  }

 private:
  static int64_t whole(int64_t size) { return kIsVector<X> ? size : rounded_up(size, L); }  // registers
  static T of(const X& x, int64_t g) {
    if constexpr (kIsVector<X>) return x[g];
    else return x;
  }
  static void set(X& x, int64_t g, T value) {
    if constexpr (kIsVector<X>) x[g] = value;
    else x = value;
  }
  // As a register, of a number in its first place; and back, by a reduction.
  template <class Y, class Z> static INLINE Y get(const Z* from) {
    if constexpr (std::is_same_v<Y, Z> || !kIsVector<Y>) return Y(*from);
    else return load_as<T>(from);
  }
  template <class Y, class Z> static INLINE void put(Z* to, Y value) {
    if constexpr (std::is_same_v<Y, Z> || !kIsVector<Y>) *to = Z(value);
    else store_as<T>(to, value);
  }
  // Calls body(j, a number or a register, 0 or 1 by turns) along a row: registers as far as they go, then numbers.
  template <class Body> static INLINE void along(int64_t size, const Body& body) {
    int64_t j = 0;
    if constexpr (!kIsVector<X>) {
      for (; j + 2 * L <= size; j += 2 * L) body(j, V<T>{}, 0), body(j + L, V<T>{}, 1);
      for (; j + L <= size; j += L) body(j, V<T>{}, 0);
    }
    for (; j < size; ++j) body(j, X{}, 0);
  }

  // One side's masses.  Those of a balanced loop are of total 1: the other side's total is gauge, and the last one's is
  // put back.
  void take_masses(const void* given, int64_t each, int64_t size, double alike, bool is_last, X* to) {
    std::fill_n(to, whole(size), given ? X{} : X{} + T(alike));
    const bool shares = !p_.damped && !stabilised_ && !p_.changes;
    for (int64_t g = 0; given && g < (each ? count_ : 1); ++g) {
      const S* logs = logs_of(given, each, size, g);
      const T top = shares ? T(*std::max_element(logs, logs + size)) : T(0);
      int64_t e = 0;
      if constexpr (!kIsVector<X>)
        for (; shares && e + L <= size; e += L) store(to + e, exponential<T>(load_as<T>(logs + e) - top));
      for (; e < size; ++e) set(to[e], g, std::exp(T(logs[e]) - top));
      if (!shares) continue;
      double total = 0;
      for (e = 0; e < size; ++e) total += of(to[e], g);
      for (e = 0; e < size; ++e) set(to[e], g, T(of(to[e], g) / total));
      if (is_last) own_[g] *= std::exp(double(top)) * total;
    }
    if (!given || each) return;
    if (is_last) std::fill_n(own_ + 1, W - 1, own_[0]);
    for (int64_t e = 0; e < size; ++e) to[e] = X{} + of(to[e], 0);
  }

  // Scores that are not read from where they are.
  void take_scores() {
    const S* from = static_cast<const S*>(p_.scores) + first_ * n_ * m_;
    const T factor = T(p_.multiplier);
    std::fill(count_ < W ? s_ : s_ + n_ * m_, s_ + padded_, X{});
    if constexpr (kIsVector<X>) turn(from, n_ * m_, count_, n_ * m_, factor, reinterpret_cast<T*>(s_), W);
    else if (is_turned_) turn(from, n_, m_, n_, factor, s_, m_);
    else if (!given_) for (int64_t e = 0; e < n_ * m_; ++e) s_[e] = from[e] * factor;
  }
  template <class Y> static INLINE Y score(const S* given, const X* s, T factor, int64_t e) {
    if constexpr (kIsVector<X>) return s[e];
    else return given ? Y(get<Y>(given + e) * factor) : get<Y>(s + e);
  }

  // to = factor from', of one matrix [rows, columns], by squares as far as they go; rows of either begin so far apart.
  template <class Y, class Z> static void turn(const Y* from, int64_t across, int64_t rows, int64_t columns, T factor, Z* to,
                                               int64_t apart) {
    const int64_t right = columns / L * L, bottom = rows / L * L;
    for (int64_t i = 0; i < bottom; i += L)
      for (int64_t j = 0; j < right; j += L) {
        V<T> x[L];
#pragma GCC unroll 16
        for (int r = 0; r < L; ++r) x[r] = load_as<T>(from + (i + r) * across + j) * factor;
        turn_square<T>(x);
#pragma GCC unroll 16
        for (int r = 0; r < L; ++r) store_as<T>(to + (j + r) * apart + i, x[r]);
      }
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = i < bottom ? right : 0; j < columns; ++j) to[j * apart + i] = Z(from[i * across + j] * factor);
  }

  // The largest score of every row and column, the lowest that is not masked, and the highest; of a kernel that is
  // given, its largest entries, the lowest above 0, and the highest.  forms: first takes off what the loop starts
  // with (a kernel is divided by it), and nothing where a row or column has no score at all; K is formed of them.
  template <bool forms> void find_tops() {
    const bool divides = p_.is_kernel, of_rows = p_.start == kOfRow, of_columns = p_.start == kOfColumn;
    const auto finite = [=](X top) {
      return divides ? X(top == 0 ? X{} + T(1) : T(1) / top) : X(top == -kInf ? X{} : top);
    };
    const X own = p_.start == kOfMatrix ? finite(high_) : X{} + T(p_.offset);
    for (int64_t j = 0; forms && j < m_; ++j) total_[j] = finite(column_tops_[j]);
    X *const s = s_, *const tops = column_tops_, *const off = total_;
    const S* const given = given_;
    const T factor = T(p_.multiplier);
    const int64_t m = m_;
    std::fill_n(tops, m_, X{} + nothing_);
    X high = X{} + nothing_;
    const V<T> nothing = V<T>{} + nothing_, masked = V<T>{} + (divides ? T(0) : T(-kMasked)), most_of_all = V<T>{} + kInf;
    V<T> low = most_of_all;
    for (int64_t i = 0, done = 0; i < n_; ++i) {
      const X of_row = forms && of_rows ? finite(row_tops_[i]) : own;
      V<T> top[2] = {nothing, nothing}, least[2] = {most_of_all, most_of_all};  // neither waits for the other
      along(m_, [=, &top, &least](int64_t j, auto kind, int side) {
        typedef decltype(kind) Y;
        Y x = score<Y>(given, s, factor, i * m + j);
        if constexpr (forms) {
          const Y less = of_columns ? get<Y>(off + j) : Y(Y{} + of_row);
          put<Y>(s + i * m + j, x = divides ? Y(x * less) : Y(x - less));
        }
        const Y most = get<Y>(tops + j);
        put<Y>(tops + j, x > most ? x : most);
        const V<T> wide = V<T>{} + x, shown = wide > masked ? wide : most_of_all;
        top[side] = wide > top[side] ? wide : top[side], least[side] = shown < least[side] ? shown : least[side];
      });
      for (const V<T>& here : least) low = here < low ? here : low;
      row_tops_[i] = highest(top[0] > top[1] ? top[0] : top[1]);
      high = row_tops_[i] > high ? row_tops_[i] : high;
      if (forms) done = exponentiate(done, i + 1 < n_ ? (i + 1) * m_ : padded_);
    }
    low_ = -highest(-low), high_ = high;
  }
  static X highest(V<T> v) {
    if constexpr (kIsVector<X>) return v;
    else return max_of<T>(v);
  }

  // Whether anything is taken off the scores. Where no constant stands beside a kernel, to divide one whose largest
  // entry is near 1 would change nothing.
  bool is_shifted() const {
    const bool is_near_one = p_.is_kernel && !stabilised_ && all_of(count_, [this](int64_t g) {
      return of(high_, g) >= T(0.02) && of(high_, g) <= 50;
    });
    return (p_.start != kOffset || p_.offset != 0) && !is_near_one;
  }

  // K of the scores as they are; one that is given may stay where it is.
  void form_kernel() {
    if (std::is_same_v<S, T> && given_ && p_.is_kernel && !p_.log) {
      kernel_ = const_cast<X*>(reinterpret_cast<const X*>(given_));
      return;
    }
    X* const s = s_;
    for (int64_t i = 0, done = 0; i < n_; ++i) {
      if (given_) along(m_, [=, given = given_, factor = T(p_.multiplier)](int64_t j, auto kind, int) {
        put<decltype(kind)>(s + i * m_ + j, score<decltype(kind)>(given, s, factor, i * m_ + j));
      });
      done = exponentiate(done, i + 1 < n_ ? (i + 1) * m_ : padded_);
    }
  }
  // exp of what there is of the scores up to `till`, by whole registers; in their place where nothing else needs them.
  int64_t exponentiate(int64_t done, int64_t till) const {
    const T* from = reinterpret_cast<const T*>(s_);
    T* to = reinterpret_cast<T*>(kernel_);
    for (; done + L / W <= till; done += L / W)
      if (!p_.is_kernel) store(to + done * W, exponential<T>(load(from + done * W)));
    return done;
  }

  template <class Test> static bool all_of(int64_t size, const Test& test) {
    for (int64_t i = 0; i < size; ++i) if (!test(i)) return false;
    return true;
  }

  // No row and no column is so low, or high, as a whole that its dual loses digits that count. Those of a token
  // whose mass is smaller still do not: it has no part in sums, and its scores vanish beside its log mass.
  bool is_near(int64_t g) const {
    const auto near = [&](const X* tops, const X* mass, const S* logs) {
      return [=, this](int64_t i) {
        const double top = std::abs(of(tops[i], g));
        const bool absent = logs && of(mass[i], g) == 0 && logs[i] <= p_.lost && logs[i] > -kInf;
        return top <= p_.near || (absent && top <= -2.0 * logs[i]);
      };
    };
    return !std::isfinite(p_.near) || (all_of(n_, near(row_tops_, mu_, logs_of(p_.log_mu, p_.mu_each, n_, g))) &&
                                       all_of(m_, near(column_tops_, nu_, logs_of(p_.log_nu, p_.nu_each, m_, g))));
  }

  // Of matrix g, null where none are given.
  const S* logs_of(const void* logs, int64_t each, int64_t size, int64_t g) const {
    return logs ? static_cast<const S*>(logs) + (each ? (first_ + g) * size : 0) : nullptr;
  }

  // Whether entries of a kernel, or one over them, may leave the format where it is divided.
  bool vanishes(int64_t g) const {
    const T least = std::max(of(high_, g) * least_ * least_, std::numeric_limits<T>::min());
    return p_.is_kernel && p_.start != kOffset && of(low_, g) < least;
  }

  // Whether the linear domain may hold a matrix, by what it begins with, and whether it has held it. What has left the
  // format is below 1e-38. Of a token of the side that is closed first, whose sum has a term K = 1, that is nothing
  // while the other side's scalings spread less than the range; of the second side, whose largest K are at least
  // exp(-safe), while those of the first spread less than what is left of it; of a kernel that is given, both sides
  // are as the second. Tokens without mass, or all of whose scores are -inf, are absent. Damped: no product of three
  // numbers may leave the format.
  bool may_be_held(int64_t g) const {
    const T low = of(low_, g), high = of(high_, g);
    if (stabilised_) return (p_.is_kernel || low >= least_) && high <= most_;
    if (!p_.damped && low >= least_) return true;
    const auto near = [&](int64_t size, const X* mass, const X* tops) {
      return all_of(size, [&](int64_t i) { return of(tops[i], g) >= least_ || is_absent(mass, tops, i, g); });
    };
    const bool seen = near(n_, mu_, row_tops_) && near(m_, nu_, column_tops_);
    if (!p_.damped) return seen;
    return seen && low >= (p_.is_kernel ? std::exp(-kBound) : -kBound) && high <= (p_.is_kernel ? std::exp(kBound) : kBound);
  }
  template <class Mask> bool is_held(int64_t g, const Mask& finite) const {
    if (stabilised_) {
      const auto fine = [&](const X* scaling) { return [=, this](int64_t i) { return is_fine(p_.rule, of(scaling[i], g)); }; };
      return all_of(n_, fine(a_)) && all_of(m_, fine(b_));
    }
    if (p_.damped) {
      const double most = std::exp(kBound), least = 1 / most;
      const auto within = [&](const X* scaling) {
        return [=](int64_t i) { return of(scaling[i], g) == 0 || (of(scaling[i], g) >= least && of(scaling[i], g) <= most); };
      };
      return all_of(n_, within(a_)) && all_of(m_, within(b_));
    }
    if (!is_set(finite, g)) return false;
    if (of(low_, g) >= least_) return true;
    const auto spread = [&](int64_t size, const X* scaling, const X* mass, const X* tops) {
      double most = 0, least = kInfinity;
      for (int64_t i = 0; i < size; ++i) {
        if (is_absent(mass, tops, i, g)) continue;
        most = std::max(most, double(of(scaling[i], g))), least = std::min(least, double(of(scaling[i], g)));
      }
      return std::log(most) - std::log(least);
    };
    const double rows = spread(n_, a_, mu_, row_tops_), columns = spread(m_, b_, nu_, column_tops_);
    return (p_.rows_first ? rows : columns) <= kSpread * kSafeRange<T> &&
           (p_.rows_first ? columns : rows) <= (p_.is_kernel ? kSpread : 1) * kSafeRange<T>;
  }
  // Whether no token's sum was less than what is divided by, for each matrix.
  auto are_finite() const {
    const T most = T(0.5 / p_.rule.least);
    auto fine = low_ == low_;
    const auto narrow = [&](int64_t size, const X* scaling, const X* mass, const X* tops) {
      for (int64_t i = 0; i < size; ++i)
        fine = fine & ((scaling[i] < mass[i] * most) | (mass[i] == T(0)) | (tops[i] == nothing_));
    };
    narrow(n_, a_, mu_, row_tops_), narrow(m_, b_, nu_, column_tops_);
    return fine;
  }
  template <class Mask> static bool is_set(const Mask& mask, int64_t g) {
    if constexpr (kIsVector<X>) return mask[g] != 0;
    else return mask != 0;
  }
  bool is_absent(const X* mass, const X* tops, int64_t i, int64_t g) const {
    return of(mass[i], g) == 0 || of(tops[i], g) == nothing_;
  }

  // What is taken off a row's scores, in the unit of its changes. Returns whether the format holds it.
  bool start_changes(int64_t g) {
    for (int64_t i = 0; i < n_; ++i) {
      const T highest = of(row_tops_[i], g), top = p_.start == kOfRow ? highest : T(0);
      if (!std::isfinite(highest) || (p_.of_scalings && std::abs(top) > kSafeRange<T>)) return false;
      set(off_[i], g, p_.of_scalings ? std::exp(-top) : top), set(before_[i], g, T(p_.of_scalings));
    }
    return true;
  }
  // All half-steps, and what those on rows change: f is log a less what is taken off.
  void follow(Scaling loop) {
    const auto at = [](X* side, int64_t e) { return reinterpret_cast<T*>(side) + e; };
    const int64_t steps = (p_.half_steps + (p_.rows_first != 0)) / 2;
    int64_t step = 0;
    each_pair(p_.rows_first != 0, p_.half_steps, [&](bool closes_rows, bool closes_columns) {
      loop.rows_first = closes_rows, loop.half_steps = closes_rows + closes_columns;
      scale<X>(loop, kernel_, mu_, nu_, a_, b_, total_);
      if (!closes_rows) return;
      for (int64_t e = 0; e < n_ * W; e += L) {
        const V<T> a = load(at(a_, e)), off = load(at(off_, e));
        const V<T> now = p_.of_scalings ? a * off : log_of<T>(a) - off, change = now - load(at(before_, e));
        store(at(before_, e), now), store(at(moved_, e), change < 0 ? -change : change);
      }
      const X change = std::accumulate(moved_, moved_ + n_, X{});
      for (int64_t g = 0; g < count_; ++g) p_.changes[(first_ + g) * steps + step] = of(change, g);
      ++step;
    });
  }

  // diag(a) K diag(b), times what each matrix's plan is multiplied by.
  void put_plan() {
    T factors[W];
    std::copy_n(own_, W, factors);
    const X own = get<X>(factors);
    for (int64_t i = 0; i < n_; ++i)
      put_row(i, [row = kernel_ + i * m_, b = b_, factor = a_[i] * own](int64_t j, auto kind) {
        typedef decltype(kind) Y;
        return Y(get<Y>(row + j) * factor * get<Y>(b + j));
      });
  }

  // log K + log a + log b + log of what it is multiplied by. What has no logarithm is not held, nor masses too small
  // for their digits, as of padding at -1e12, unless put_lost finds their tokens' duals.
  void put_log_plan(bool* held) {
    const auto logs = [](const X* from, int64_t size, X* to) {
      for (int64_t e = 0; e < whole(size) * W; e += L)
        store(reinterpret_cast<T*>(to) + e, log_of<T>(load(reinterpret_cast<const T*>(from) + e)));
    };
    if (p_.is_kernel || stabilised_) logs(kernel_, n_ * m_, s_);  // beside a constant, of masked entries too
    logs(a_, n_, row_tops_), logs(b_, m_, column_tops_);
    for (int64_t g = 0; g < count_; ++g) {
      if (p_.log_mu || p_.log_nu) held[g] = put_lost(g) && held[g];
      held[g] = held[g] && std::isfinite(T(own_[g])) && T(own_[g]) != 0;
      for (int64_t i = 0; i < n_; ++i) set(row_tops_[i], g, of(row_tops_[i], g) + std::log(T(own_[g])));
    }
    for (int64_t i = 0; i < n_; ++i)
      put_row(i, [row = s_ + i * m_, f = row_tops_[i], g = column_tops_](int64_t j, auto kind) {
        typedef decltype(kind) Y;
        return Y(get<Y>(row + j) + f + get<Y>(g + j));
      });
  }

  // Row i of the output, of value(j, a number or a register); in place of its scores where it is to be turned.
  template <class Value> void put_row(int64_t i, const Value& value) {
    S* const out = static_cast<S*>(p_.out) + first_ * n_ * m_ + i * m_;
    X* const own = s_ + i * m_;
    if (is_turned_) along(m_, [=](int64_t j, auto kind, int) { put<decltype(kind)>(own + j, value(j, kind)); });
    else along(m_, [=](int64_t j, auto kind, int) {
      if constexpr (!kIsVector<X>) put<decltype(kind)>(out + j, value(j, kind));
    });
  }

  // The duals of tokens whose mass has a logarithm but no digits: what the last half-step of their side gives,
  // up to what the other duals have moved since, which is nothing beside 1e12. They take no part in the sums of
  // others. A side that was not closed has none. Returns whether all are known.
  bool put_lost(int64_t g) {
    const S *log_mu = logs_of(p_.log_mu, p_.mu_each, n_, g), *log_nu = logs_of(p_.log_nu, p_.nu_each, m_, g);
    const auto lost = [](const S* logs, const X& mass, int64_t g, int64_t i) {
      return logs && of(mass, g) < std::numeric_limits<T>::min() && logs[i] > -kInf;
    };
    const bool simple = !p_.damped && !kIsVector<X>;
    bool known = true;
    const auto found = [&](T log_mass, const X* other, int64_t size, int64_t start, int64_t step) {
      T top = -kInf, sum = 0;
      const auto at = [&](int64_t e) { return of(s_[start + e * step], g) + of(other[e], g); };
      for (int64_t e = 0; e < size; ++e) top = std::max(top, at(e));
      for (int64_t e = 0; e < size; ++e) sum += std::exp(at(e) - top);
      const T dual = log_mass - (top + std::log(sum));
      known = known && simple && !(log_mass > p_.lost) && std::isfinite(dual);
      return dual;
    };
    if (p_.half_steps > 1 || !p_.rows_first || !simple)
      for (int64_t j = 0; j < m_; ++j)
        if (lost(log_nu, nu_[j], g, j)) set(column_tops_[j], g, found(log_nu[j], row_tops_, n_, j, m_));
    if (p_.half_steps > 1 || p_.rows_first || !simple)
      for (int64_t i = 0; i < n_; ++i)
        if (lost(log_mu, mu_[i], g, i)) set(row_tops_[i], g, found(log_mu[i], column_tops_, m_, i * m_, 1));
    return known;
  }

  static constexpr double kBound = 2.0 / 3 * kSafeRange<T>;  // of damped scalings and scores

  const Plan& p_;
  const bool is_turned_;            // plans are turned from s_ to where they are wanted
  const int64_t n_, m_, first_, count_, padded_;
  const bool stabilised_;
  const T nothing_, least_, most_;  // a hidden entry, and the ends of the safe range; their exp for a kernel
  const S* given_;                  // the scores where they are read from there; in s_ otherwise
  double own_[W];                   // what each matrix's plan is multiplied by
  X *s_, *kernel_, *a_, *mu_, *row_tops_, *before_, *moved_, *off_, *b_, *nu_, *column_tops_, *total_, low_, high_;
};

// written_steps of operators/plan.py, of one matrix.
template <class T> class InOrder {
  static constexpr int L = kLanes<T>;
  static constexpr T kInf = std::numeric_limits<T>::infinity();

  // Rows or columns, up to a whole register.  given: logarithms of their masses or null.
  struct Side {
    const void* given;
    int64_t each, count;
    double damping;
    T *dual, *mass, *top, *sum;
  };

 public:
  InOrder(const Plan& p, int64_t index, Scratch& scratch)
      : p_(p), in_place_(p.written >= kLogs), n_(p.rows), m_(p.columns), padded_(rounded_up(m_, L)), index_(index),
        rows_{p.log_mu, p.mu_each, n_, p.row_power, {}, {}, {}, {}},
        columns_{p.log_nu, p.nu_each, m_, p.column_power, {}, {}, {}, {}} {
    scratch.reserve((n_ * padded_ + 4 * (n_ + m_ + 2 * L)) * sizeof(T) + 10 * kBytes);
    s_ = scratch.take<T>(n_ * padded_);
    for (Side* side : {&rows_, &columns_})
      for (T** numbers : {&side->dual, &side->mass, &side->top, &side->sum})
        *numbers = scratch.take<T>(rounded_up(side->count, L));
  }

  // Returns whether all masses have a logarithm.
  bool run() {
    for (const Side& side : {rows_, columns_}) {
      const T* given = side.given ? static_cast<const T*>(side.given) + (side.each ? index_ * side.count : 0) : nullptr;
      std::fill_n(side.dual, rounded_up(side.count, L), T(0));
      std::fill_n(side.mass, rounded_up(side.count, L), p_.log_shares ? -std::log(T(side.count)) : T(0));
      if (given) std::copy_n(given, side.count, side.mass);
      if (std::any_of(side.mass, side.mass + side.count, [](T mass) { return std::isnan(mass); })) return false;
    }
    const T* scores = static_cast<const T*>(p_.scores) + index_ * n_ * m_;
    for (int64_t i = 0; i < n_; ++i) {
      T* row = s_ + i * padded_;
      for (int64_t j = 0; j < m_; ++j) row[j] = scores[i * m_ + j] * T(p_.multiplier);
      std::fill(row + m_, row + padded_, -kInf);
    }
    bool rows = !p_.rows_first;
    for (int64_t step = 0; step < p_.half_steps; ++step) {
      rows = !rows;
      if (rows) sum_rows();
      else sum_columns();
      if (in_place_) subtract(rows);
      else update(rows ? rows_ : columns_);
    }
    const Side& last = rows ? rows_ : columns_;
    put(p_.log_shares || last.given ? T(0) : std::log(T(last.count)));
    return true;
  }

 private:
  // What is summed along rows, or columns: (row, column) to a register.
  auto terms(bool along_rows) const {
    const bool both = p_.written == kIncrements;
    return [=, s = s_, padded = padded_, f = rows_.dual, g = columns_.dual, plain = in_place_](int64_t i, int64_t j) {
      const V<T> x = load(s + i * padded + j);
      if (plain) return x;
      return both ? x + f[i] + load(g + j) : along_rows ? x + load(g + j) : x + f[i];
    };
  }

  static V<T> finite(V<T> top) { return (top < kInf) & (top > -kInf) ? top : V<T>{}; }  // is subtracted before exp

  void sum_rows() {
    const auto term = terms(true);
    for (int64_t i = 0; i < n_; ++i) {
      V<T> high = all(-kInf), sum{};
      for (int64_t j = 0; j < padded_; j += L) high = term(i, j) > high ? term(i, j) : high;
      const T top = max_of<T>(high);
      const V<T> shift = finite(all(top));
      for (int64_t j = 0; j < padded_; j += L) sum += exponential<T>(term(i, j) - shift);
      rows_.top[i] = top, rows_.sum[i] = sum_of<T>(sum);
    }
  }

  void sum_columns() {
    const auto term = terms(false);
    const auto over_rows = [this](T* found, const auto& op) {  // a few rows at a time
      for (int64_t i = 0; i < n_; i += kRows)
        for (int64_t j = 0; j < padded_; j += L) {
          V<T> so_far = load(found + j);
          for (int64_t row = i; row < std::min(i + kRows, n_); ++row) so_far = op(so_far, row, j);
          store(found + j, so_far);
        }
    };
    std::fill_n(columns_.top, padded_, -kInf), std::fill_n(columns_.sum, padded_, T(0));
    over_rows(columns_.top, [=](V<T> top, int64_t i, int64_t j) { return term(i, j) > top ? term(i, j) : top; });
    over_rows(columns_.sum, [=, tops = columns_.top](V<T> sum, int64_t i, int64_t j) {
      return sum + exponential<T>(term(i, j) - finite(load(tops + j)));
    });
  }

  static V<T> log_sum(const Side& side, int64_t t) {
    const V<T> top = load(side.top + t);
    return top == kInf ? top : log_of<T>(load(side.sum + t)) + finite(top);
  }

  void update(const Side& side) const {
    for (int64_t t = 0; t < side.count; t += L) {
      const V<T> change = load(side.mass + t) - log_sum(side, t);
      store(side.dual + t, p_.written == kIncrements ? load(side.dual + t) + change : T(side.damping) * change);
    }
    std::fill(side.dual + side.count, side.dual + rounded_up(side.count, L), T(0));
  }

  // Scores in place: less the largest of a row or column and the logarithm of its sum, or less its logsumexp.
  void subtract(bool rows) const {
    const Side& side = rows ? rows_ : columns_;
    for (int64_t t = 0; t < side.count; t += L) {
      store(side.sum + t, p_.written == kLogs ? log_sum(side, t) : log_of<T>(load(side.sum + t)));
      if (p_.written == kLogs) store(side.top + t, V<T>{});
    }
    for (int64_t i = 0; i < n_; ++i) {
      T* row = s_ + i * padded_;
      const auto of = [&](const T* numbers, int64_t j) { return rows ? all(numbers[i]) : load(numbers + j); };
      for (int64_t j = 0; j < padded_; j += L)
        store(row + j, load(row + j) - of(side.top, j) - of(side.sum, j) + of(side.mass, j));
      std::fill(row + m_, row + padded_, -kInf);
    }
  }

  void put(T count) const {
    T* out = static_cast<T*>(p_.out) + index_ * n_ * m_;
    const T log_factor = std::log(T(p_.factor));
    for (int64_t i = 0; i < n_; ++i)
      for (int64_t j = 0; j < padded_; j += L) {
        const V<T> s = load(s_ + i * padded_ + j), f = all(rows_.dual[i]), g = load(columns_.dual + j);
        V<T> x = in_place_ ? s : p_.written == kSummed ? s + (f + g) : p_.written == kReversed ? s + g + f : s + f + g;
        x -= count;
        if (p_.log) x += log_factor;
        else if (max_of<T>(x) <= 80) x = exponential<T>(x) * T(p_.factor);
        else for (int e = 0; e < L; ++e) x[e] = std::exp(x[e]) * T(p_.factor);
        std::memcpy(out + i * m_ + j, &x, std::min<int64_t>(L, m_ - j) * sizeof(T));
      }
  }

  const Plan& p_;
  const bool in_place_;  // scores become the logarithm of the plan, step by step
  const int64_t n_, m_, padded_, index_;
  Side rows_, columns_;
  T* s_;
};

template <class T> int64_t plan_all(Plan given) {
  std::vector<uint8_t> held(given.held ? 0 : given.matrices);
  if (!given.held) given.held = held.data();
  const bool fixed = given.beside || given.changes || given.rule.gauge != 1.0 || (given.log && (given.log_mu || given.log_nu));
  const bool turns = !fixed && pass_of<T>(given.columns, given.rows) < pass_of<T>(given.rows, given.columns);
  const Plan p = turns ? turned(given) : given;
  const int64_t step = p.beside ? kLanes<T> : 1;
  const double products = double(p.matrices) * double(p.rows) * double(p.columns) * double(p.half_steps + 16);
  return count_lost((p.matrices + step - 1) / step, products, p.threads, [&](int64_t index, Scratch& scratch) {
    int64_t here = p.beside ? Planned<V<T>, T>(p, false, index, scratch).run() : Planned<T, T>(p, turns, index, scratch).run();
    for (int64_t g = index * step; here && g < std::min((index + 1) * step, p.matrices); ++g) {
      if (p.held[g]) continue;
      if (p.written) p.held[g] = InOrder<T>(given, g, scratch).run();
      else if (p.rule.form != kPlain && !p.is_double) Planned<double, T>(given, false, g, scratch).run();
      here -= p.held[g];
    }
    return here;
  });
}

}  // namespace

// Expected sliced plans; see operators/esp.py.  q: [B, H, N, D]; k: [B, H, M, D]; v: [B, H, M, E]; x:
// [B, H, L, N] and y: [B, H, L, M], their projections; tau: [B, H]; omega: [B, H, L]; keep: [B, M] and query_keep:
// [B, N] bytes or null; out: [B, H, N, E], or the map where v is null, which is sorted softly, with E = M; 0
// where nothing is written. All contiguous.  softly: sorted by SoftSort at a temperature. Else exactly, where tokens
// that tie share, or are in order, the last one first if `ascending`.
struct Esp {
  const void *q, *k, *v, *x, *y;
  const double *tau, *omega;
  const uint8_t *keep, *query_keep;
  void* out;
  int64_t batch, heads, queries, keys, dim, width, slices, monotone, squared, mean, is_double, threads;
  int64_t softly, shared, ascending;
  double temperature, factor;
};

// Where gradients are wanted instead, for grad in the sizes of `out`: of these tensors, 0 before; of exact sorts not of x
// and y.
struct EspSlopes {
  const void* grad;
  void *q, *k, *v, *x, *y;
  double *tau, *omega;
};

namespace {

// Ranks of a query and a key that meet, and what passes between them; see operators/ranks.py.
struct Meeting {
  int64_t query, key;
  double mass;
};

std::vector<Meeting> meetings(int64_t n, int64_t m, bool monotone) {
  std::vector<Meeting> found;
  if (monotone) {
    for (int64_t r = 0, s = 0, since = 0, till; r < n && s < m; since = till) {
      const int64_t row = (r + 1) * m, column = (s + 1) * n;
      till = std::min(row, column);
      found.push_back({r, s, double(till - since) / double(m)});
      r += till == row, s += till == column;
    }
    return found;
  }
  const int64_t gaps = std::max<int64_t>(n - 1, 1);
  for (int64_t r = 0; r < n; ++r) {
    const int64_t low = r * (m - 1) / gaps, rest = r * (m - 1) % gaps;
    found.push_back({r, low, 1 - double(rest) / double(gaps)});
    if (rest) found.push_back({r, low + 1, double(rest) / double(gaps)});
  }
  return found;
}

// Tokens of a line by rank, largest first.
template <class T> class Ranking {
  typedef typename Lanes<T>::Int Bits;

 public:
  explicit Ranking(const std::vector<int64_t>& active)
      : order(active.size()), group(active.size()), active_(active), entries_(active.size()),
        other_(active.size()) {}

  // order: the token of every rank; starts: where groups of ranks that tie start, and where the last one ends;
  // group: the one of every rank; alike: whether all of a group are the same point, see HardHead.
  std::vector<int64_t> order, starts, group;
  std::vector<char> alike;

  bool tied() const { return starts.size() <= order.size(); }

  // By the bytes of numbers, from the last one on, which leaves equal ones in the order they come in.
  void sort(const T* x, bool shared, bool ascending) {
    constexpr int bytes = sizeof(T);
    const int64_t size = active_.size();
    uint32_t counts[bytes][256] = {};
    for (int64_t i = 0; i < size; ++i) {
      const int64_t token = ascending ? size - 1 - i : i;
      const Bits key = descending(x[active_[token]]);
      entries_[i] = {key, uint32_t(token)};
      for (int byte = 0; byte < bytes; ++byte) ++counts[byte][key >> 8 * byte & 255];
    }
    for (int byte = 0; byte < bytes; ++byte) {
      uint32_t* places = counts[byte];
      if (places[entries_[0].key >> 8 * byte & 255] == size) continue;
      for (uint32_t digit = 0, before = 0; digit < 256; ++digit)
        before += std::exchange(places[digit], before);
      for (const Entry& entry : entries_) other_[places[entry.key >> 8 * byte & 255]++] = entry;
      entries_.swap(other_);
    }
    starts.clear();
    for (int64_t r = 0; r < size; ++r) {
      if (r == 0 || !shared || entries_[r].key != entries_[r - 1].key) starts.push_back(r);
      order[r] = entries_[r].token, group[r] = int64_t(starts.size()) - 1;
    }
    starts.push_back(size);
  }

 private:
  struct Entry {
    Bits key;
    uint32_t token;
  };

  // Bits that are larger where the number is smaller; those of 0 and -0 are alike.
  static Bits descending(T number) {
    constexpr Bits sign = Bits(1) << (8 * sizeof(T) - 1);
    Bits bits;
    number += T(0);
    std::memcpy(&bits, &number, sizeof(T));
    return bits & sign ? bits : ~(bits | sign);
  }

  const std::vector<int64_t>& active_;
  std::vector<Entry> entries_, other_;
};

// 0, 1, 2, ...
template <class T> const V<T> kRamp = [] {
  V<T> ramp{};
  for (int e = 0; e < kLanes<T>; ++e) ramp[e] = T(e);
  return ramp;
}();

// A cloud on a line, largest first, as SoftSort sees it. With nodes g a step h apart,
//
//     exp(-(s - x)^2 / t) = c sum_g X_gs X_gx,    X_gx = exp(-2 (g - x)^2 / t),
//
// the trapezoidal rule of a Gaussian's integral: every entry is off by a factor 1 +- 2 exp(-pi^2 t / 4 h^2). Of
// a token only the K nodes next to it count, which leaves out exp(-K^2 h^2 / 2t). Where both exponents are
// alike, h^2 = pi t / (K sqrt 2), K = 16 is beyond the rounding of float32 and K = 32 of float64. SoftSort is
// then diag(1 / Z) X'X, Z = X'(X 1), in any order of its columns. Tokens further apart than K nodes do not
// see each other, so that nodes between them are left out.
template <class T> class Line : public Ranking<T> {
  static constexpr int L = kLanes<T>;

 public:
  static constexpr int K = std::is_same_v<T, float> ? 16 : 32;
  static constexpr T c = T(std::is_same_v<T, float> ? 0.42044820762685725 : 0.29730177875068026);  // 2^(3/4) / sqrt(K)

  explicit Line(const std::vector<int64_t>& active)
      : Ranking<T>(active), first(active.size()), near(active.size() * K), share(active.size()),
        active_(active) {}

  // Of every rank.  first: its first node; near: X at its K nodes; share: 1 / Z.
  using Ranking<T>::order;
  std::vector<int64_t> first;
  std::vector<T> near, share;

  // False where a number is not finite.
  bool place(const T* x, double temperature) {
    const double per_step = std::sqrt(K * M_SQRT2 / (M_PI * temperature));
    const int64_t size = active_.size();
    bool finite = std::isfinite(per_step);
    for (int64_t token : active_) finite &= std::isfinite(x[token]);
    if (!finite) return false;
    this->sort(x, false, false);
    double at = 0;
    const auto value = [&](int64_t r) { return double(x[active_[order[r]]]); };
    for (int64_t r = 0; r < size; ++r) {
      if (r) at += std::min((value(r - 1) - value(r)) * per_step, double(K));
      first[r] = int64_t(at);
      spread(T(at - double(first[r])), &near[r * K]);
    }
    sums_.assign(first[size - 1] + K, 0.0);
    constexpr int64_t wide = kLanes<double>;
    for (int64_t r = 0; r < size; ++r) {
      double* to = &sums_[first[r]];
      for (int m = 0; m < K; m += wide) store(to + m, load(to + m) + load_as<double>(&near[r * K + m]));
    }
    for (int64_t r = 0; r < size; ++r) {
      V<double> total{};
      for (int m = 0; m < K; m += wide) total += load(&sums_[first[r] + m]) * load_as<double>(&near[r * K + m]);
      share[r] = T(1 / sum_of<double>(total));
    }
    return true;
  }

 private:
  static void spread(T part, T* to) {
    for (int m = 0; m < K; m += L) {
      const V<T> away = all(part + T(K / 2 - 1 - m)) - kRamp<T>;
      store(to + m, exponential<T, true>(away * away * T(-M_PI * M_SQRT2 / K)));
    }
  }

  const std::vector<int64_t>& active_;
  std::vector<double> sums_;
};

// One head, and the weights of its slices.
template <class T> class SlicedHead {
 protected:
  SlicedHead(const Esp& p, const EspSlopes* slopes, int64_t index, const Tokens& queries, const Tokens& keys)
      : p_(p), slopes_(slopes), queries_(queries), keys_(keys), n_(queries.active.size()), m_(keys.active.size()),
        index_(index), meetings_(meetings(n_, m_, p.monotone)) {
    const auto at = [&](const void* from, int64_t size) { return static_cast<const T*>(from) + index * size; };
    q_ = at(p.q, p.queries * p.dim), k_ = at(p.k, p.keys * p.dim);
    v_ = p.v ? at(p.v, p.keys * p.width) : nullptr;
    lines_x_ = at(p.x, p.slices * p.queries), lines_y_ = at(p.y, p.slices * p.keys);
    out_ = static_cast<T*>(p.out) + index * p.queries * p.width;
  }

  // What slices before are multiplied by when one of this cost joins them, and its own weight,
  // omega exp(-tau D) in units of the largest up to here: in float32, too, one of them is 1.
  std::pair<T, T> joined(int64_t slice, double cost) {
    const double omega = p_.omega[index_ * p_.slices + slice], tau = p_.tau[index_];
    if (omega == 0 || (tau > 0 && cost == double(kInfinity))) return {T(1), T(0)};
    if (p_.mean) cost /= double(n_);
    if (best_omega_ == 0) best_ = cost, best_omega_ = std::abs(omega);
    const double ahead = tau * (best_ - cost) + std::log(std::abs(omega) / best_omega_);
    const double kept = ahead > 0 ? std::exp(-ahead) : 1.0;
    const double weight = std::copysign(ahead > 0 ? 1.0 : std::exp(ahead), omega);
    if (ahead > 0) best_ = cost, best_omega_ = std::abs(omega);
    total_ = total_ * kept + weight;
    return {T(kept), T(weight)};
  }

  // <C, P> and <Z, P> of a slice, with Z the gradient of sum_l w_l P_l.
  struct Sums {
    double cost = 0, wanted = 0;
  };

  // Gradients of tau and omega. With z_l = <Z, P_l> and D_l = <C, P_l>, body(l, w_l, d_l) is called where w_l is not 0,
  //
  //     d_l = dL/dD_l = -tau w_l (z_l - sum_l w_l z_l),    dL/dP_l = w_l Z + d_l C,    dL/dC = sum_l d_l P_l
  //
  // Returns sum_l w_l z_l.
  template <class Body> double differentiate(const std::vector<Sums>& found, const Body& body) {
    const double *omega = p_.omega + index_ * p_.slices, tau = p_.tau[index_], per = p_.mean ? double(n_) : 1.0;
    double mean = 0, *const of_omega = of_head<double>(slopes_->omega, p_.slices);
    std::vector<double> away, weight;  // costs beyond the lowest, and w
    for (int64_t l = 0; l < p_.slices; ++l) {
      away.push_back(found[l].cost / per - best_);
      of_omega[l] = std::exp(-tau * away[l]) / (best_omega_ * total_);
      weight.push_back(omega[l] == 0 ? 0.0 : omega[l] * of_omega[l]);
      if (weight[l] != 0) mean += weight[l] * found[l].wanted;
    }
    for (int64_t l = 0; l < p_.slices; ++l) {
      if (of_omega[l] != 0) of_omega[l] *= found[l].wanted - mean;
      if (weight[l] == 0) continue;
      const double slope = weight[l] * (found[l].wanted - mean);
      *of_head<double>(slopes_->tau, 1) -= slope * away[l];
      body(l, T(weight[l]), T(-tau * slope / per));
    }
    return mean;
  }

  template <class X> X* of_head(void* slopes, int64_t size) const { return static_cast<X*>(slopes) + index_ * size; }

  const Esp& p_;
  const EspSlopes* const slopes_;
  const Tokens &queries_, &keys_;
  const int64_t n_, m_, index_;
  const std::vector<Meeting> meetings_;
  const T *q_, *k_, *v_, *lines_x_, *lines_y_;
  T* out_;
  double best_ = 0, best_omega_ = 0, total_ = 0;
};

// exp(-(x_i - x_j)^2 / t) of all pairs of tokens on a line. Diag(1 / Z) of it, Z = its rows' sums, is SoftSort, whose
// ranks stand where their tokens do.
template <class T> class Pairs {
  static constexpr int L = kLanes<T>;
  using Bits = typename Lanes<T>::Bits;
  static constexpr T kLeast = std::is_same_v<T, float> ? -36 : -80;  // of exponents: REACH of operators/esp.py

 public:
  Pairs(const std::vector<int64_t>& active, double temperature)
      : size(active.size()), room(rounded_up(size, 2 * L)), order(size), active_(active), scale_(T(-1 / temperature)) {}

  void take(Scratch& scratch) {
    entries = scratch.take<T>(size * room), share = scratch.take<T>(room);
    tokens_ = scratch.take<T>(room), received_ = scratch.take<T>(room);
  }

  const int64_t size, room;
  std::vector<int64_t> order;  // the token of every rank
  T *entries, *share;          // [size, room]; 1 / Z

  // False where a number is not finite.
  bool place(const T* from) {
    bool finite = true;
    for (int64_t i = 0; i < size; ++i) tokens_[i] = from[active_[i]], finite &= std::isfinite(tokens_[i]);
    std::fill_n(tokens_ + size, room - size, std::numeric_limits<T>::max());
    for (int64_t start = 0; start < size; start += L) {  // a rank is how many are larger, or as large before
      const V<T> own = load(tokens_ + start);
      Bits rank{};
      for (int64_t j = 0; j < start; ++j) rank -= Bits(all(tokens_[j]) >= own);
      for (int64_t j = start; j < std::min(start + L, size); ++j) {
        const V<T> other = all(tokens_[j]);
        rank -= Bits(other > own) | (Bits(other == own) & Bits(all(T(j - start)) < kRamp<T>));
      }
      for (int64_t j = start + L; j < size; ++j) rank -= Bits(all(tokens_[j]) > own);
      for (int64_t i = start; finite && i < std::min(start + L, size); ++i) order[rank[i - start]] = i;
    }
    for (int64_t i = 0; i < size; ++i) {
      V<T> sum{};
      for (int64_t j = 0; j < room; j += L) {
        const V<T> exponent = exponent_of(i, j), entry = exponential<T, true>(exponent > kLeast ? exponent : all(kLeast));
        store(entries + i * room + j, entry), sum += entry;
      }
      share[i] = 1 / sum_of<T>(sum);
    }
    return finite;
  }

  // The gradient of the numbers, from that of the entries [size, room], before they are divided by their sums.
  void put_slopes(const T* slopes, T* to) const {
    std::fill_n(received_, room, T(0));
    for (int64_t i = 0; i < size; ++i) {
      const T *own = slopes + i * room, *entry = entries + i * room;
      T mean;
      dots<1>(own, 0, room, entry, &mean);
      mean *= share[i];
      V<T> given{};
      for (int64_t j = 0; j < room; j += L) {
        const V<T> moved = load(entry + j) * (load(own + j) - mean) * (tokens_[i] - load(tokens_ + j));
        const V<T> part = exponent_of(i, j) > kLeast ? moved : V<T>{};
        store(received_ + j, load(received_ + j) + part), given += part;
      }
      to[active_[i]] += 2 * scale_ * sum_of<T>(given);
    }
    for (int64_t i = 0; i < size; ++i) to[active_[i]] -= 2 * scale_ * received_[i];
  }

 private:
  INLINE V<T> exponent_of(int64_t i, int64_t j) const {
    const V<T> away = load(tokens_ + j) - tokens_[i];
    return away * away * scale_;
  }

  const std::vector<int64_t>& active_;
  const T scale_;
  T *tokens_, *received_;
};

// Of every slice P = A' I B = X' M Y with M = X diag(1/Z) I diag(1/Z) Y', which are sums over the nodes next
// to a token: K N M multiplications, of no more than kNodes nodes of the queries at a time. Of up to kFew tokens
// all entries of A and B are formed, and N multiplied for each of P: shorter than to place them among nodes.
//
// Gradients take a second pass over the slices, once the first one knows all D and z.
template <class T> class SoftHead : SlicedHead<T> {
  static constexpr int L = kLanes<T>, P = 2 * L, K = Line<T>::K, kNodes = 128, kWide = kNodes + 2 * K;
  static constexpr int64_t kFew = 128;
  using Base = SlicedHead<T>;
  using Base::p_, Base::slopes_, Base::queries_, Base::keys_, Base::n_, Base::m_, Base::meetings_, Base::out_;
  using Sums = typename Base::Sums;

 public:
  SoftHead(const Esp& p, const EspSlopes* slopes, int64_t index, Scratch& scratch, const Tokens& queries, const Tokens& keys)
      : Base(p, slopes, index, queries, keys), padded_(rounded_up(m_, P)),
        few_(n_ <= kFew && m_ <= kFew), x_(queries.active), y_(keys.active), pairs_x_(queries.active, p.temperature),
        pairs_y_(keys.active, p.temperature) {
    const int64_t rows = rounded_up(std::max(n_, m_), kRows), wide = pairs_x_.room, most = std::max(wide, padded_);
    const int64_t plan = rows * padded_, depth = std::max(p.dim, p.v ? p.width : 0), whole = few_ || slopes;
    const int64_t values = p.v ? rounded_up(p.width, P) * std::max(n_, m_) : 0, spread = (few_ ? n_ : kNodes) * padded_;
    const int64_t pairs = whole ? (n_ + 3) * wide + (m_ + 3) * padded_ : 0, back = slopes ? 3 * plan + 2 * rows * most : 0;
    scratch.reserve((padded_ * depth + 3 * plan + spread + values + pairs + back) * sizeof(T) + 20 * kBytes);
    panels_ = scratch.take<T>(padded_ * depth), cost_ = scratch.take<T>(plan), plan_ = scratch.take<T>(plan);
    mean_ = scratch.take<T>(plan), spread_ = scratch.take<T>(spread), values_ = scratch.take<T>(values);
    if (whole) pairs_x_.take(scratch), pairs_y_.take(scratch);
    if (!slopes) return;
    wanted_ = scratch.take<T>(plan), moved_ = scratch.take<T>(plan), slope_ = scratch.take<T>(plan);
    turned_ = scratch.take<T>(rows * most), back_ = scratch.take<T>(rows * most);
    grad_ = static_cast<const T*>(slopes->grad) + index * p.queries * p.width;
  }

  void run() {
    form<true>(this->q_, this->k_, p_.dim, cost_);
    for (int64_t i = 0; i < n_; ++i) {
      T* row = cost_ + i * padded_;
      for (int64_t j = 0; !p_.squared && j < padded_; ++j) row[j] = std::sqrt(row[j]);
      std::fill(row + m_, row + padded_, T(0));
    }
    std::fill_n(mean_, n_ * padded_, T(0));
    if (slopes_) form_wanted(), std::fill_n(moved_, n_ * padded_, T(0));
    std::vector<Sums> found;
    for (int64_t l = 0; l < p_.slices; ++l) {
      const T *x = this->lines_x_ + l * p_.queries, *y = this->lines_y_ + l * p_.keys;
      sums_ = Sums{};
      if (few_ ? !form_all(x, y) : !form_plan(x, y)) sums_.cost = std::nan("");
      const auto [kept, weight] = this->joined(l, sums_.cost);
      mix(mean_, kept, weight);
      if (!slopes_) continue;
      found.push_back(sums_);
      mix(moved_, kept, weight * T(sums_.wanted - found[0].wanted));
    }
    if (!slopes_) return apply();
    const double mean = this->differentiate(found, [this](int64_t l, T weight, T of_cost) { add_slice(l, weight, of_cost); });
    const double per = p_.mean ? double(n_) : 1.0;
    add_cost(T(mean - found[0].wanted), T(-p_.tau[this->index_] / (per * this->total_)));
    const T factor = T(p_.factor / this->total_);
    if (p_.v) multiply_rows(m_, mean_, 1, padded_, grad_, queries_, keys_, factor, this->template of_head<T>(slopes_->v, p_.keys * p_.width));
  }

 private:
  // x y' of all queries and keys, or their squared distances.
  template <bool squares> void form(const T* x, const T* y, int64_t depth, T* to) {
    pack_tokens(y, depth, keys_, depth, T(1), panels_);
    for (int64_t row = 0; row < n_; row += kRows) {
      const Rows<T> rows(row, n_, [&](int64_t i) { return x + queries_.active[i] * depth; });
      tiles<T, squares>(rows, depth, panels_, P * depth, padded_, to + row * padded_, padded_);
    }
  }

  // to [tokens, wide] = a line's pairs times panels `next` apart, whose rows are `across` apart.
  static void form_product(const Pairs<T>& pairs, const T* panels, int64_t across, int64_t next, T* to, int64_t wide) {
    for (int64_t row = 0; row < pairs.size; row += kRows) {
      const Rows<T> rows(row, pairs.size, [&](int64_t i) { return pairs.entries + i * pairs.room; });
      tiles<T>(rows, pairs.size, panels, next, wide, to + row * wide, wide, across);
    }
  }

  void mix(T* to, T kept, T weight) const {
    const V<T> factor = all(weight), other = all(kept);
    for (int64_t i = 0; i < n_ * padded_; i += L) store(to + i, load(to + i) * other + load(plan_ + i) * factor);
  }

  // What a query of P adds to the sums.
  void add_sums(int64_t i) {
    T sum;
    dots<1>(plan_ + i * padded_, 0, padded_, cost_ + i * padded_, &sum);
    sums_.cost += double(sum);
    if (!slopes_) return;
    dots<1>(plan_ + i * padded_, 0, padded_, wanted_ + i * padded_, &sum);
    sums_.wanted += double(sum);
  }

  // Calls body(query, key, what passes between them, divided by the sums of both) for all that meet.
  template <class Body> void each_meeting(const Body& body) const {
    for (const auto& [r, s, mass] : meetings_) {
      const int64_t i = pairs_x_.order[r], j = pairs_y_.order[s];
      body(i, j, T(mass) * pairs_x_.share[i] * pairs_y_.share[j]);
    }
  }

  static void add_row(T factor, const T* from, int64_t row, T* to, int64_t place, int64_t wide) {
    add_rows<1>(from + row * wide, 0, wide, &factor, to + place * wide);
  }

  // P of a few tokens, with diag(1/Z) I B in the order of the queries.
  bool form_all(const T* x, const T* y) {
    if (!pairs_x_.place(x) || !pairs_y_.place(y)) return false;
    std::fill_n(spread_, n_ * padded_, T(0));
    each_meeting([this](int64_t i, int64_t j, T share) { add_row(share, pairs_y_.entries, j, spread_, i, padded_); });
    form_product(pairs_x_, spread_, padded_, P, plan_, padded_);
    for (int64_t i = 0; i < n_; ++i) add_sums(i);
    return true;
  }

  // P of many.
  bool form_plan(const T* x, const T* y) {
    if (!x_.place(x, p_.temperature) || !y_.place(y, p_.temperature)) return false;
    const int64_t last = meetings_.size();
    for (int64_t row = 0, end = 0, meeting = 0; row < n_; row = end) {
      const int64_t base = x_.first[row];
      while (end < n_ && x_.first[end] + K <= base + kNodes) ++end;
      const int64_t nodes = rounded_up(x_.first[end - 1] + K - base, P);
      while (x_.first[meetings_[meeting].query] <= base - K) ++meeting;
      int64_t behind = meeting;
      while (behind < last && x_.first[meetings_[behind].query] < base + nodes) ++behind;
      form_spread(base, nodes, meeting, behind);
      for (; row < end; ++row) form_row(row, base);
    }
    return true;
  }

  // M Y [nodes, M] of some nodes of the queries.
  void form_spread(int64_t base, int64_t nodes, int64_t meeting, int64_t behind) {
    const int64_t low = y_.first[meetings_[meeting].key], high = y_.first[meetings_[behind - 1].key] + K;
    met_.assign((high - low) * kWide, T(0));  // M' of these nodes, and of K more on both sides
    for (; meeting < behind; ++meeting) {
      const auto [r, s, mass] = meetings_[meeting];
      const T factor = T(mass) * x_.share[r] * y_.share[s];
      T* to = &met_[(y_.first[s] - low) * kWide + x_.first[r] - base + K];
      for (int m = 0; m < K; ++m, to += kWide) {
        const V<T> own = all(factor * y_.near[s * K + m]);
        for (int g = 0; g < K; g += L) store(to + g, load(to + g) + own * load(&x_.near[r * K + g]));
      }
    }
    std::fill_n(spread_, nodes * padded_, T(0));
    for (int64_t s = 0; s < m_; ++s) {
      const int64_t from = std::max(y_.first[s], low), till = std::min(y_.first[s] + K, high);
      T* to = spread_ + y_.order[s];
      for (int64_t g = 0; from < till && g < nodes; g += P) {
        V<T> sum[2] = {};
        const T* rows = &met_[(from - low) * kWide + K + g];
        for (int64_t node = from; node < till; ++node, rows += kWide) {
          const V<T> own = all(y_.near[s * K + node - y_.first[s]]);
          sum[0] += own * load(rows), sum[1] += own * load(rows + L);
        }
        for (int e = 0; e < P; ++e, to += padded_) *to = sum[e / L][e % L];
      }
    }
  }

  void form_row(int64_t r, int64_t base) {
    const T *from = spread_ + (x_.first[r] - base) * padded_, *near = &x_.near[r * K];
    const int64_t start = x_.order[r] * padded_;
    const auto some = [&](int64_t j, auto R) {
      V<T> sum[R.value] = {};
      for (int m = 0; m < K; ++m) {
        const V<T> own = all(near[m]);
#pragma GCC unroll 8
        for (int i = 0; i < R.value; ++i) sum[i] += own * load(from + m * padded_ + j + i * L);
      }
#pragma GCC unroll 8
      for (int i = 0; i < R.value; ++i) store(plan_ + start + j + i * L, sum[i]);
    };
    int64_t j = 0;
    for (; j + 2 * P <= padded_; j += 2 * P) some(j, std::integral_constant<int, 4>{});
    if (j < padded_) some(j, std::integral_constant<int, 2>{});
    add_sums(x_.order[r]);
  }

  // The output or, of a map, its gradient's Z.
  void apply() {
    const T factor = T(p_.factor / this->total_);
    if (p_.v) return multiply_rows(n_, mean_, padded_, 1, this->v_, keys_, queries_, factor, out_);
    for (int64_t i = 0; i < n_; ++i)
      for (int64_t j = 0; j < m_; ++j)
        out_[queries_.active[i] * p_.width + keys_.active[j]] = factor * mean_[i * padded_ + j];
  }

  // to = factor x from, for tokens of x whose rows are `stride` apart and their entries `step`.
  void multiply_rows(int64_t count, const T* x, int64_t stride, int64_t step, const T* from, const Tokens& others,
                     const Tokens& tokens, T factor, T* to) const {
    const int64_t depth = others.active.size();
    pack_values<T, T>(from, p_.width, others, p_.width, nullptr, values_);
    for (int64_t row = 0; row < count; row += kRows)
      multiply(Rows<T>(row, count, [&](int64_t i) { return x + i * stride; }), depth, values_, P * depth, p_.width,
               [=](int64_t) { return factor; }, [&](int64_t i) { return to + tokens.active[i] * p_.width; }, step);
  }

  // Z, from the gradient of the output.
  void form_wanted() {
    const T factor = T(p_.factor);
    if (p_.v) form<false>(grad_, this->v_, p_.width, wanted_);
    for (int64_t i = 0; i < n_; ++i) {
      T* row = wanted_ + i * padded_;
      for (int64_t j = 0; j < m_; ++j)
        row[j] = factor * (p_.v ? row[j] : grad_[queries_.active[i] * p_.width + keys_.active[j]]);
      std::fill(row + m_, row + padded_, T(0));
    }
  }

  // Gradients of a slice's numbers.
  void add_slice(int64_t l, T weight, T of_cost) {
    T* const x = this->template of_head<T>(slopes_->x, p_.slices * p_.queries) + l * p_.queries;
    T* const y = this->template of_head<T>(slopes_->y, p_.slices * p_.keys) + l * p_.keys;
    const T *line_x = this->lines_x_ + l * p_.queries, *line_y = this->lines_y_ + l * p_.keys;
    if (!pairs_x_.place(line_x) || !pairs_y_.place(line_y)) {
      for (int64_t i : queries_.active) x[i] = T(std::nan(""));
      for (int64_t j : keys_.active) y[j] = T(std::nan(""));
      return;
    }
    if (!few_) x_.place(line_x, p_.temperature), y_.place(line_y, p_.temperature);
    for (int64_t i = 0; i < n_ * padded_; i += L)
      store(slope_ + i, load(wanted_ + i) * weight + (of_cost == 0 ? V<T>{} : load(cost_ + i) * of_cost));
    pack_tokens(slope_, padded_, rows_, m_, T(1), turned_);
    multiply_by(pairs_y_, y_, turned_, P, P * m_, pairs_x_.room);
    std::fill_n(turned_, n_ * pairs_x_.room, T(0));
    each_meeting([this](int64_t i, int64_t j, T share) { add_row(share, back_, j, turned_, i, pairs_x_.room); });
    pairs_x_.put_slopes(turned_, x);
    multiply_by(pairs_x_, x_, slope_, padded_, P, padded_);
    std::fill_n(turned_, m_ * padded_, T(0));
    each_meeting([this](int64_t i, int64_t j, T share) { add_row(share, back_, i, turned_, j, padded_); });
    pairs_y_.put_slopes(turned_, y);
  }

  // back [tokens, wide] = a line's pairs times panels `next` apart, whose rows are `across` apart; of many by its nodes.
  void multiply_by(const Pairs<T>& pairs, const Line<T>& line, const T* panels, int64_t across, int64_t next, int64_t wide) {
    if (few_) return form_product(pairs, panels, across, next, back_, wide);
    V<T> nodes[kNodes][2];
    for (int64_t start = 0; start < wide; start += P, panels += next)
      for (int64_t row = 0, end = 0, first = 0; row < pairs.size;) {
        const int64_t base = line.first[row];
        while (end < pairs.size && line.first[end] + K <= base + kNodes) ++end;
        while (line.first[first] <= base - K) ++first;
        std::memset(nodes, 0, sizeof(nodes));
        for (int64_t r = first; r < pairs.size && line.first[r] < base + kNodes; ++r) {
          const T* own = panels + line.order[r] * across;
          const V<T> x[] = {load(own), load(own + L)};
          const int64_t at = line.first[r] - base;
          for (int64_t m = std::max<int64_t>(0, -at); m < std::min<int64_t>(K, kNodes - at); ++m)
            for (int side = 0; side < 2; ++side) nodes[at + m][side] += x[side] * line.near[r * K + m];
        }
        for (; row < end; ++row) {
          V<T> sum[2] = {};
          for (int m = 0; m < K; ++m)
            for (int side = 0; side < 2; ++side) sum[side] += nodes[line.first[row] - base + m][side] * line.near[row * K + m];
          for (int side = 0; side < 2; ++side) store(back_ + line.order[row] * wide + start + side * L, sum[side] * Line<T>::c);
        }
      }
  }

  // Gradients of points by their distances', factor (moved - mean others).
  void add_cost(T mean, T factor) {
    T* const to_q = this->template of_head<T>(slopes_->q, p_.queries * p_.dim);
    T* const to_k = this->template of_head<T>(slopes_->k, p_.keys * p_.dim);
    for (int64_t i = 0; i < n_; ++i)
      for (int64_t j = 0; j < m_; ++j) {
        const int64_t at = i * padded_ + j, query = queries_.active[i] * p_.dim, key = keys_.active[j] * p_.dim;
        const T slope = factor * (moved_[at] - mean * mean_[at]);
        const T each = p_.squared ? 2 * slope : cost_[at] == 0 ? T(0) : slope / cost_[at];
        for (int64_t d = 0; d < p_.dim; ++d) {
          const T part = each * (this->q_[query + d] - this->k_[key + d]);
          to_q[query + d] += part, to_k[key + d] -= part;
        }
      }
  }

  const int64_t padded_;
  const bool few_;
  const Tokens rows_{nullptr, n_, 0};
  Sums sums_;
  Line<T> x_, y_;
  Pairs<T> pairs_x_, pairs_y_;
  std::vector<T> met_;
  const T* grad_;
  T *panels_, *cost_, *plan_, *mean_, *spread_, *values_, *wanted_, *moved_, *slope_, *turned_, *back_;
};

// Of every slice only who meets whom: O(N (D + E)) a slice, and no N x M matrix. Groups of tokens that tie meet
// as one; of those that are not the same point the distances of all pairs count.
template <class T> class HardHead : SlicedHead<T> {
  static constexpr int L = kLanes<T>;
  using Base = SlicedHead<T>;
  using Base::p_, Base::slopes_, Base::queries_, Base::keys_, Base::n_, Base::m_, Base::meetings_;
  using Sums = typename Base::Sums;

 public:
  HardHead(const Esp& p, const EspSlopes* slopes, int64_t index, Scratch& scratch, const Tokens& queries, const Tokens& keys)
      : Base(p, slopes, index, queries, keys), depth_(rounded_up(p.dim, L)), width_(rounded_up(p.width, L)),
        x_(queries.active), y_(keys.active) {
    const int64_t back = slopes ? (n_ + m_) * depth_ + (2 * n_ + m_) * width_ : 0;
    scratch.reserve(((n_ + m_) * depth_ + (n_ + 2 * m_ + 1) * width_ + back) * sizeof(T));
    points_x_ = scratch.take<T>(n_ * depth_), points_y_ = scratch.take<T>(m_ * depth_);
    values_ = scratch.take<T>(m_ * width_), means_ = scratch.take<T>(m_ * width_);
    mixed_ = scratch.take<T>(n_ * width_), received_ = scratch.take<T>(width_);
    copy(this->q_, p.dim, queries, depth_, points_x_), copy(this->k_, p.dim, keys, depth_, points_y_);
    copy(this->v_, p.width, keys, width_, values_), std::fill_n(mixed_, n_ * width_, T(0));
    if (!slopes) return;
    grads_ = scratch.take<T>(n_ * width_), grad_means_ = scratch.take<T>(n_ * width_);
    of_x_ = scratch.take<T>(n_ * depth_), of_y_ = scratch.take<T>(m_ * depth_), of_values_ = scratch.take<T>(m_ * width_);
    copy(static_cast<const T*>(slopes->grad) + index * p.queries * p.width, p.width, queries, width_, grads_);
    std::fill_n(of_x_, n_ * depth_, T(0)), std::fill_n(of_y_, m_ * depth_, T(0)), std::fill_n(of_values_, m_ * width_, T(0));
  }

  void run() {
    std::vector<Sums> found;
    for (int64_t l = 0; l < p_.slices; ++l) {
      const std::vector<Meeting>& met = meet(l);
      Sums sums;
      for (const Meeting& pair : met) sums.cost += pair.mass * double(between(pair.query, pair.key));
      const auto [kept, weight] = this->joined(l, sums.cost);
      if (slopes_) {
        for (const auto& [g, h, mass] : met) {
          T product;
          dots<1>(grad_of(g), 0, width_, value_of(h), &product);
          sums.wanted += p_.factor * mass * double(product);
        }
        found.push_back(sums);
        continue;
      }
      for (int64_t i = 0; kept != T(1) && i < n_ * width_; i += L)
        store(mixed_ + i, load(mixed_ + i) * kept);
      add(met, weight);
    }
    if (slopes_) {
      this->differentiate(found, [this](int64_t l, T weight, T of_cost) { add_slopes(meet(l), weight, of_cost); });
      put(of_x_, depth_, queries_, p_.dim, this->template of_head<T>(slopes_->q, p_.queries * p_.dim));
      put(of_y_, depth_, keys_, p_.dim, this->template of_head<T>(slopes_->k, p_.keys * p_.dim));
      return put(of_values_, width_, keys_, p_.width, this->template of_head<T>(slopes_->v, p_.keys * p_.width));
    }
    const T factor = T(p_.factor / this->total_);
    for (int64_t i = 0; i < n_; ++i)
      for (int64_t e = 0; e < p_.width; ++e)
        this->out_[queries_.active[i] * p_.width + e] = mixed_[i * width_ + e] * factor;
  }

 private:
  // Rows of active tokens, filled up with zeros to a register.
  static void copy(const T* from, int64_t size, const Tokens& tokens, int64_t padded, T* to) {
    for (int64_t token : tokens.active) {
      std::fill(std::copy_n(from + token * size, size, to), to + padded, T(0));
      to += padded;
    }
  }

  static void put(const T* from, int64_t padded, const Tokens& tokens, int64_t size, T* to) {
    for (int64_t token : tokens.active) std::copy_n(from, size, to + token * size), from += padded;
  }

  // Who meets in a slice, and the means that groups have.
  const std::vector<Meeting>& meet(int64_t l) {
    rank(x_, this->lines_x_ + l * p_.queries, points_x_);
    rank(y_, this->lines_y_ + l * p_.keys, points_y_);
    if (y_.tied()) form_means(y_, values_, means_);
    if (x_.tied() && slopes_) form_means(x_, grads_, grad_means_);
    if (x_.tied() || y_.tied()) meet_in_groups();
    return x_.tied() || y_.tied() ? grouped_ : meetings_;
  }
  const T* value_of(int64_t h) const { return y_.tied() ? means_ + h * width_ : values_ + y_.order[h] * width_; }
  const T* grad_of(int64_t g) const { return x_.tied() ? grad_means_ + g * width_ : grads_ + x_.order[g] * width_; }

  void rank(Ranking<T>& line, const T* numbers, const T* points) {
    line.sort(numbers, p_.shared, p_.ascending);
    line.alike.assign(line.tied() ? line.starts.size() - 1 : 0, true);
    for (size_t g = 0; g < line.alike.size(); ++g) {
      const T* first = points + line.order[line.starts[g]] * depth_;
      for (int64_t r = line.starts[g] + 1; r < line.starts[g + 1]; ++r)
        line.alike[g] &= std::equal(first, first + depth_, points + line.order[r] * depth_);
    }
  }

  // Meetings of groups. A group of queries comes back to none of keys but the last two that it met.
  void meet_in_groups() {
    grouped_.clear();
    for (const auto& [r, s, mass] : meetings_) {
      const int64_t g = x_.group[r], h = y_.group[s];
      const auto same = [&](const Meeting& other) { return other.query == g && other.key == h; };
      const auto since = grouped_.rbegin(), till = since + std::min<int64_t>(2, grouped_.size());
      const auto found = std::find_if(since, till, same);
      if (found == till) grouped_.push_back({g, h, mass});
      else found->mass += mass;
    }
  }

  // The mean distance of two groups.
  T between(int64_t g, int64_t h) const {
    const int64_t row = x_.starts[g], column = y_.starts[h];
    const int64_t rows = x_.tied() && !x_.alike[g] ? x_.starts[g + 1] - row : 1;
    const int64_t columns = y_.tied() && !y_.alike[h] ? y_.starts[h + 1] - column : 1;
    if (rows * columns == 1) return distance(x_.order[row], y_.order[column]);
    double total = 0;
    for (int64_t r = row; r < row + rows; ++r)
      for (int64_t s = column; s < column + columns; ++s)
        total += double(distance(x_.order[r], y_.order[s]));
    return T(total / (double(rows) * double(columns)));
  }

  INLINE T distance(int64_t i, int64_t j) const {
    V<T> sum{};
    for (int64_t d = 0; d < depth_; d += L) {
      const V<T> apart = load(points_x_ + i * depth_ + d) - load(points_y_ + j * depth_ + d);
      sum += apart * apart;
    }
    return p_.squared ? sum_of<T>(sum) : std::sqrt(sum_of<T>(sum));
  }

  // What every query receives in a slice, times its weight.
  void add(const std::vector<Meeting>& met, T weight) {
    for (size_t i = 0; i < met.size();) {
      const int64_t g = met[i].query, row = x_.starts[g], rows = x_.starts[g + 1] - row;
      T* to = rows == 1 ? mixed_ + x_.order[row] * width_ : received_;
      if (rows > 1) std::fill_n(received_, width_, T(0));
      for (; i < met.size() && met[i].query == g; ++i) {
        const T share = weight * T(met[i].mass / double(rows));
        add_row(share, value_of(met[i].key), to);
      }
      for (int64_t r = row; rows > 1 && r < row + rows; ++r)
        add_row(T(1), received_, mixed_ + x_.order[r] * width_);
    }
  }

  // Gradients of values and of points, by their distances, from a slice.
  void add_slopes(const std::vector<Meeting>& met, T weight, T of_cost) {
    for (const auto& [g, h, mass] : met) {
      const double rows = double(x_.starts[g + 1] - x_.starts[g]), columns = double(y_.starts[h + 1] - y_.starts[h]);
      const T share = weight * T(p_.factor * mass / columns), each = of_cost * T(mass / (rows * columns));
      for (int64_t s = y_.starts[h]; s < y_.starts[h + 1]; ++s) {
        add_row(share, grad_of(g), of_values_ + y_.order[s] * width_);
        for (int64_t r = x_.starts[g]; each != 0 && r < x_.starts[g + 1]; ++r) pull(x_.order[r], y_.order[s], each);
      }
    }
  }

  void pull(int64_t i, int64_t j, T slope) {
    const T away = p_.squared ? T(0.5) : distance(i, j), factor = away == 0 ? T(0) : slope / away;
    for (int64_t d = 0; d < depth_; d += L) {
      T *const to_x = of_x_ + i * depth_ + d, *const to_y = of_y_ + j * depth_ + d;
      const V<T> part = (load(points_x_ + i * depth_ + d) - load(points_y_ + j * depth_ + d)) * factor;
      store(to_x, load(to_x) + part), store(to_y, load(to_y) - part);
    }
  }

  void form_means(const Ranking<T>& line, const T* from, T* to) const {
    for (size_t h = 0; h + 1 < line.starts.size(); ++h) {
      std::fill_n(to + h * width_, width_, T(0));
      const T share = T(1) / T(line.starts[h + 1] - line.starts[h]);
      for (int64_t s = line.starts[h]; s < line.starts[h + 1]; ++s)
        add_row(share, from + line.order[s] * width_, to + h * width_);
    }
  }

  INLINE void add_row(T factor, const T* from, T* to) const {
    for (int64_t e = 0; e < width_; e += L) store(to + e, load(to + e) + load(from + e) * factor);
  }

  const int64_t depth_, width_;
  Ranking<T> x_, y_;
  std::vector<Meeting> grouped_;
  T *points_x_, *points_y_, *values_, *means_, *mixed_, *received_, *grads_, *grad_means_, *of_x_, *of_y_, *of_values_;
};

template <class T> bool sort(const Esp& p, const EspSlopes* slopes) {
  const double lines = double(p.batch) * double(p.heads) * double(p.slices) * double(p.queries);
  const double products = lines * (p.softly ? double(p.keys) * Line<T>::K : double(p.dim + p.width + 64));
  return each(p.batch * p.heads, products, p.threads, [&](int64_t index, Scratch& scratch) {
    const Tokens queries(p.query_keep, p.queries, index / p.heads), keys(p.keep, p.keys, index / p.heads);
    if (queries.none || keys.none) return;
    if (p.softly) SoftHead<T>(p, slopes, index, scratch, queries, keys).run();
    else HardHead<T>(p, slopes, index, scratch, queries, keys).run();
  });
}

}  // namespace

// A feature of two clouds, of features/.  x: [B, H, N, D]; y: [B, H, M, D]; x_keep: [B, N] and y_keep: [B, M] bytes or
// null; column: [B, H, N].
//
//     kCoarse     u + |x|^2 / 2 of a loop on clusters, at least one half-step, with u up to a constant; mass: [B, H, M],
//                 that of the points y, or null. parameter: pivots [H, R, D], or [B, H, R, D] if `each`, or null for the
//                 points of features/coarse.py
//     kSliced     potentials of slices, parameter: [L, D], times their weights [L], or [H, L] if `each`
//     kMoments    column is [B, H, 2, D + 1, D]: of x and of y the covariance and, in the last row, the mean
//     kGaussian   beta(x) by the matrix parameter: [B, H, D, D]
//
// Points without mass have no part in these, and potentials of 0.
enum Family { kCoarse, kSliced, kMoments, kGaussian };

struct Feature {
  const void *x, *y, *parameter, *weights;
  const uint8_t *x_keep, *y_keep;
  void *column, *mass;
  int64_t batch, heads, points, others, dim, count, each;
  Strides x_strides, y_strides;
  int64_t family, half_steps, x_first, is_double, threads;
};

namespace {

// One head of two clouds.  S: the points' format.
template <class S> class TwoClouds {
 protected:
  static constexpr int64_t L = kLanes<S>, P = 2 * L;

  TwoClouds(const Feature& p, int64_t index)
      : p_(p), points_(p.x_keep, p.points, index / p.heads), others_(p.y_keep, p.others, index / p.heads),
        n_(points_.active.size()), m_(others_.active.size()), head_(index % p.heads) {
    const auto at = [&](const void* from, const Strides& s) {
      return static_cast<const S*>(from) + index / p.heads * s.batch + head_ * s.head;
    };
    x_ = at(p.x, p.x_strides), y_ = at(p.y, p.y_strides);
    column_ = static_cast<S*>(p.column) + index * p.points;
  }

  const S* point(int64_t i) const { return x_ + points_.active[i] * p_.x_strides.token; }
  const S* other(int64_t j) const { return y_ + others_.active[j] * p_.y_strides.token; }

  template <class At> void find_mean(int64_t count, const At& at, S* mean) const {
    std::fill_n(mean, p_.dim, S(0));
    for (int64_t t = 0; t < count; ++t)
      for (int64_t d = 0; d < p_.dim; ++d) mean[d] += at(t)[d];
    for (int64_t d = 0; d < p_.dim; ++d) mean[d] /= S(std::max<int64_t>(count, 1));
  }

  const Feature& p_;
  const Tokens points_, others_;
  const int64_t n_, m_, head_;
  const S *x_, *y_;
  S* column_;
};

template <class S> class Clustered : TwoClouds<S> {
  using Base = TwoClouds<S>;
  using Base::p_, Base::points_, Base::others_, Base::n_, Base::m_, Base::x_, Base::y_, Base::column_;
  using Base::L, Base::P, Base::point, Base::other;

 public:
  Clustered(const Feature& p, int64_t index, Scratch& scratch)
      : Base(p, index), clusters_(nullptr, p.count, 0), size_(rounded_up(p.count, P)), scratch_(scratch) {
    pivots_ = p.parameter ? static_cast<const S*>(p.parameter) + (p.each ? index : this->head_) * p.count * p.dim : nullptr;
    mass_ = p.mass ? static_cast<S*>(p.mass) + index * p.others : nullptr;
    const int64_t rows = rounded_up(n_, 2 * kLanes<S>), panels = pivots_ ? size_ : std::max(size_, rounded_up(m_, P));
    scratch.reserve((panels * (p.dim + 1) + size_ * (p.dim + kRows + 4) + p.dim + n_ * size_) * sizeof(S) +
                    (n_ * size_ + 3 * rows + 4 * size_) * sizeof(double) + 20 * kBytes);
    panels_ = scratch.take<S>(panels * p.dim), away_ = scratch.take<S>(panels), means_ = scratch.take<S>(size_ * p.dim);
    block_ = scratch.take<S>(kRows * size_), centre_ = scratch.take<S>(p.dim);
    for (S** side : {&counts_, &second_, &half_squares_, &of_cluster_}) *side = scratch.take<S>(size_);
    scores_ = scratch.take<S>(n_ * size_);
  }

  // Returns whether the linear domain holds it.
  bool run() {
    for (int64_t i = 0; i < p_.points; ++i) column_[i] = square(x_ + i * p_.x_strides.token) / 2;
    if (mass_) std::fill_n(mass_, p_.others, S(0));
    if (others_.none || n_ == 0) return true;
    this->find_mean(m_, [this](int64_t j) { return other(j); }, centre_);
    if (!(pivots_ || find_farthest()) || !join()) return false;
    find_moments();
    const double range = form_scores();
    if (range <= kSafeRange<S>) return solve(scores_);
    return range <= kSafeRange<double> && solve(scratch_.take<double>(n_ * size_));
  }

 private:
  // A point y and a cluster that it is in, by this share.
  struct Member {
    int64_t other, cluster;
    S share;
  };

  S square(const S* x) const {
    V<S> sum{};
    int64_t d = 0;
    for (; d + L <= p_.dim; d += L) sum += load(x + d) * load(x + d);
    S total = sum_of<S>(sum);
    for (; d < p_.dim; ++d) total += x[d] * x[d];
    return total;
  }

  // The point farthest from the centre, and one after the other that farthest from all of them, as pivots in means_.
  bool find_farthest() {
    pack_tokens(y_, p_.y_strides.token, others_, p_.dim, S(1), panels_);
    const S* last = centre_;
    for (int64_t c = 0; c < p_.count; ++c) {
      for (int64_t start = 0; start < m_; start += P)
        for (int64_t side = start; side < start + P; side += L) {
          V<S> sum{};
          for (int64_t d = 0; d < p_.dim; ++d) {
            const V<S> apart = load(panels_ + start * p_.dim + d * P + side - start) - last[d];
            sum += apart * apart;
          }
          const V<S> before = load(away_ + side);
          store(away_ + side, c > 1 && before < sum ? before : sum);  // the centre is no pivot
        }
      const int64_t farthest = std::max_element(away_, away_ + m_) - away_;
      if (!std::isfinite(away_[farthest])) return false;
      last = std::copy_n(other(farthest), p_.dim, means_ + c * p_.dim) - p_.dim;
    }
    pivots_ = means_;
    return true;
  }

  // Every y joins its nearest pivot; equally near ones share it.
  bool join() {
    pack_tokens(pivots_, p_.dim, clusters_, p_.dim, S(1), panels_);
    std::fill_n(half_squares_, size_, S(kInfinity)), std::fill_n(counts_, size_, S(0));
    for (int64_t c = 0; c < p_.count; ++c) half_squares_[c] = square(pivots_ + c * p_.dim) / 2;
    members_.reserve(m_);
    for (int64_t row = 0; row < m_; row += kRows) {
      const int64_t count = multiply(row, m_, [this](int64_t j) { return other(j); });
      for (int64_t r = 0; r < count; ++r) {
        S* near = block_ + r * size_;
        V<S> top = all(S(-kInfinity));
        for (int64_t c = 0; c < size_; c += L) {
          const V<S> here = load(near + c) - load(half_squares_ + c);
          store(near + c, here), top = here > top ? here : top;
        }
        const S best = max_of<S>(top);
        const int64_t alike = std::count(near, near + size_, best);
        if (alike == 0) return false;
        for (int64_t c = 0, left = alike; left > 0; ++c)
          if (near[c] == best) members_.push_back({row + r, c, S(1) / S(alike)}), counts_[c] += S(1) / S(alike), --left;
      }
    }
    return true;
  }

  // block_[r] = x_r . panels of so many rows from one on, whose number is returned.
  template <class At> int64_t multiply(int64_t row, int64_t rows, const At& at) {
    const Rows<S> x(row, rows, at);
    tiles<S>(x, p_.dim, panels_, P * p_.dim, size_, block_, size_);
    return x.count;
  }

  // Clusters' means, those of none at the centre, and variances, by moments about the centre.
  void find_moments() {
    std::fill_n(means_, p_.count * p_.dim, S(0)), std::fill_n(second_, size_, S(0));
    for (const auto& [j, c, share] : members_) {
      S *mean = means_ + c * p_.dim, squares = 0;
      const S* y = other(j);
      V<S> sum{};
      int64_t d = 0;
      for (; d + L <= p_.dim; d += L) {
        const V<S> local = load(y + d) - load(centre_ + d);
        store(mean + d, load(mean + d) + local * share), sum += local * local;
      }
      for (; d < p_.dim; ++d) {
        const S local = y[d] - centre_[d];
        mean[d] += local * share, squares += local * local;
      }
      second_[c] += share * (squares + sum_of<S>(sum));
    }
    for (int64_t c = 0; c < p_.count; ++c) {
      S* mean = means_ + c * p_.dim;
      const S each = counts_[c] > 0 ? S(1) / counts_[c] : S(0);
      for (int64_t d = 0; d < p_.dim; ++d) mean[d] *= each;
      second_[c] = std::max(second_[c] * each - square(mean), S(0)) / S(p_.dim);
      for (int64_t d = 0; d < p_.dim; ++d) mean[d] += centre_[d];
    }
    pack_tokens<S>(means_, p_.dim, clusters_, p_.dim, S(1), panels_);
  }

  // S [N, R]; past the last cluster, the first one's. Returns the widest range of a row, or what no format holds.
  double form_scores() {
    double widest = 0;
    for (int64_t row = 0; row < n_; row += kRows) {
      const int64_t count = multiply(row, n_, [this](int64_t i) { return point(i); });
      for (int64_t r = 0; r < count; ++r) {
        const S half_square = column_[points_.active[row + r]];
        S *s = scores_ + (row + r) * size_, *from = block_ + r * size_;
        for (int64_t c = 0; c < p_.count; ++c) s[c] = from[c] + half_square * second_[c];
        std::fill(s + p_.count, s + size_, s[0]);
        V<S> high = load(s), low = high;
        for (int64_t c = L; c < size_; c += L) {
          const V<S> here = load(s + c);
          high = here > high ? here : high, low = here < low ? here : low;
        }
        const double range = double(max_of<S>(high)) + double(max_of<S>(-low));
        if (!(range <= kSafeRange<double>)) return kInfinity;
        widest = std::max(widest, range);
      }
    }
    return widest;
  }

  // The half-steps on K = exp(S - row maximum), which may take the scores' place. Clusters weigh as many points as they
  // have, in all as much as the points x: with equal totals the gauge stays.
  template <class T> bool solve(T* kernel) {
    const int64_t rows = rounded_up(n_, kLanes<T>);
    T *a = scratch_.take<T>(rows), *ones = scratch_.take<T>(rows), *tops = scratch_.take<T>(rows);
    T *b = scratch_.take<T>(size_), *nu = scratch_.take<T>(size_), *total = scratch_.take<T>(size_);
    T highest = T(-kInfinity);
    for (int64_t i = 0; i < n_; ++i) {
      const S* s = scores_ + i * size_;
      const T top = T(*std::max_element(s, s + size_));
      for (int64_t c = 0; c < size_; c += kLanes<T>)
        store(kernel + i * size_ + c, exponential<T>(load_as<T>(s + c) - top));
      tops[i] = top, highest = std::max(highest, top);
    }
    std::fill(tops + n_, tops + rows, highest), std::fill_n(ones, rows, T(1));
    for (int64_t i = 0; i < rows; i += kLanes<T>) store(a + i, exponential<T>(load(tops + i) - highest));  // u = 0
    for (int64_t c = 0; c < size_; ++c) b[c] = nu[c] = T(counts_[c]) * T(n_) / T(m_);
    const double least = std::pow(double(std::numeric_limits<T>::min()), 0.75);
    const Rule rule{kPlain, 0, 0, 0, 0.0, least, 1.0};
    scale<T>({n_, size_, p_.half_steps, p_.x_first, 1.0, 1.0, rule}, kernel, ones, nu, a, b, total);
    for (int64_t i = 0; i < rows; i += kLanes<T>) store(tops + i, log_of<T>(load(a + i)) - load(tops + i));
    if (!points_.none) for (int64_t i = 0; i < n_; ++i) column_[points_.active[i]] += S(tops[i]);
    if (!mass_) return true;
    std::fill_n(total, size_, T(0));
    for (int64_t row = 0; row < n_; row += kRows)
      by_rows(std::min<int64_t>(kRows, n_ - row), [&](int64_t r, auto R) {
        add_rows<R.value>(kernel + (row + r) * size_, size_, size_, a + row + r, total);
      });
    double all = 0;
    for (int64_t c = 0; c < size_; ++c) all += b[c] * total[c];
    for (int64_t c = 0; c < size_; ++c)
      of_cluster_[c] = counts_[c] > 0 ? S(b[c] * total[c] / T(counts_[c]) * T(double(m_) / all)) : S(0);
    for (const auto& [j, c, share] : members_) mass_[others_.active[j]] += share * of_cluster_[c];
    return true;
  }

  const Tokens clusters_;
  const int64_t size_;
  Scratch& scratch_;
  std::vector<Member> members_;
  const S* pivots_;
  S *mass_, *panels_, *away_, *means_, *block_, *centre_, *counts_, *second_, *half_squares_, *of_cluster_, *scores_;
};

// Sorts every lane of registers by itself: the comparisons are the same whatever the numbers. Sorted halves are merged
// by a bitonic network, three of its rounds for each time that eight registers are loaded, and part after part of what
// a cache holds. What is beyond the last register counts as infinity.  tagged: registers of tags go with the numbers.
template <class S, bool tagged> class Network {
 public:
  typedef typename Lanes<S>::Bits Tags;

  Network(V<S>* numbers, Tags* tags, int64_t count) : numbers_(numbers), tags_(tags), count_(count) {}

  // size: of memory, a power of two, 8 at least.
  void sort(int64_t start, int64_t size) const {
    if (start >= count_) return;
    if (size == 8) return eight<1, 3, 1, 7, 2, 1>(start, start + 4, 1);
    const int64_t step = size / 8;
    sort(start, size / 2), sort(start + size / 2, size / 2);
    for (int64_t i = start; i < std::min(start + step, count_ - step); ++i)
      eight<7, 2, 1>(i, 2 * start + size - 1 - i - 3 * step, step);
    finish(start, start + size, step);
  }

 private:
  // Parts of this size, none of which has a number of another.
  void finish(int64_t start, int64_t end, int64_t size) const {
    const int64_t step = size / 8;
    for (end = std::min(end, count_); size > 1 && start < end; start += std::max<int64_t>(size, 8)) {
      if (size == 2) eight<1>(start, start + 4, 1);
      if (size == 4) eight<2, 1>(start, start + 4, 1);
      for (int64_t i = start; i < std::min(start + step, count_ - step); ++i) eight<4, 2, 1>(i, i + 4 * step, step);
      if (size > 8) finish(start, start + size, step);
    }
  }

  // Four registers from each of two on, a step apart. Those meet whose places among the eight differ by these bits.
  template <int... bits> INLINE void eight(int64_t low, int64_t high, int64_t step) const {
    V<S> x[8];
    Tags tags[8];
    const auto at = [=](int e) { return e < 4 ? low + e * step : high + (e - 4) * step; };
#pragma GCC unroll 8
    for (int e = 0; e < 8; ++e) x[e] = numbers_[at(e)], tags[e] = tagged ? tags_[at(e)] : Tags{};
    (meet<bits>(x, tags), ...);
#pragma GCC unroll 8
    for (int e = 0; e < 8; ++e)
      if (numbers_[at(e)] = x[e]; tagged) tags_[at(e)] = tags[e];
  }

  template <int bits> static INLINE void meet(V<S> (&x)[8], Tags (&tags)[8]) {
#pragma GCC unroll 8
    for (int e = 0; e < 8; ++e) {
      const int other = e ^ bits;
      if (other < e) continue;
      const auto swaps = x[e] > x[other];
      x[e] = swaps ? std::exchange(x[other], swaps ? x[e] : x[other]) : x[e];
      if (tagged) tags[e] = swaps ? std::exchange(tags[other], swaps ? tags[e] : tags[other]) : tags[e];
    }
  }

  V<S>* const numbers_;
  Tags* const tags_;
  const int64_t count_;
};

// Potentials of slices, one in each lane of a register.
template <class S> class Sliced : TwoClouds<S> {
  using Base = TwoClouds<S>;
  using Base::p_, Base::points_, Base::others_, Base::n_, Base::m_, Base::column_, Base::L, Base::P;
  using Tags = typename Network<S, true>::Tags;

 public:
  Sliced(const Feature& p, int64_t index, Scratch& scratch)
      : Base(p, index), slices_(nullptr, p.count, 0), size_(rounded_up(p.count, P)), room_x_(room(n_)), room_y_(room(m_)) {
    scratch.reserve(size_ * (p.dim + 1) * sizeof(S) + (3 * room_x_ + 2 * room_y_) * kBytes + 7 * kBytes);
    theta_ = scratch.take<S>(size_ * p.dim), weights_ = scratch.take<S>(size_), tags_ = scratch.take<Tags>(room_x_);
    for (int64_t side = 0; side < 2; ++side) x_[side] = scratch.take<V<S>>(room_x_), y_[side] = scratch.take<V<S>>(room_y_);
  }

  void run() {
    std::fill_n(column_, p_.points, S(0));
    if (points_.none) return;
    pack_tokens(static_cast<const S*>(p_.parameter), p_.dim, slices_, p_.dim, S(1), theta_);
    std::fill_n(weights_, size_, S(0));
    std::copy_n(static_cast<const S*>(p_.weights) + (p_.each ? this->head_ * p_.count : 0), p_.count, weights_);
    for (int64_t start = 0; start < p_.count; start += P) {
      project(n_, theta_ + start * p_.dim, [this](int64_t i) { return this->point(i); }, x_);
      project(m_, theta_ + start * p_.dim, [this](int64_t j) { return this->other(j); }, y_);
      for (int64_t side = 0, slice = start; side < 2 && slice < p_.count; ++side, slice += L) add(side, slice);
    }
  }

 private:
  static int64_t room(int64_t count) {
    return count > 8 ? 2 * room((count + 1) / 2) : 8;
  }

  template <class At> void project(int64_t count, const S* theta, const At& at, V<S>* const* to) const {
    S part[kRows * P];
    for (int64_t row = 0; row < count; row += kRows) {
      const Rows<S> tokens(row, count, at);
      tile<S>(tokens.x, p_.dim, theta, part, P);
      for (int64_t r = 0; r < tokens.count; ++r)
        for (int64_t side = 0; side < 2; ++side) to[side][row + r] = load(part + r * P + side * L);
    }
    for (int64_t side = 0; side < 2; ++side) std::fill(to[side] + count, to[side] + room(count), all(S(kInfinity)));
  }

  void add(int64_t side, int64_t slice) {
    V<S> *const x = x_[side], *const y = y_[side], sum{};
    for (int64_t i = 0; i < room_x_; ++i) tags_[i] = Tags{} + typename Lanes<S>::Int(i);
    Network<S, true>(x, tags_, n_).sort(0, room_x_), Network<S, false>(y, nullptr, m_).sort(0, room_y_);
    if (others_.none) std::fill_n(y, m_, V<S>{});
    const int64_t lanes = std::min<int64_t>(L, p_.count - slice);
    for (int64_t r = 0; r < n_; ++r) {
      if (r) sum += (x[r] - x[r - 1]) * ((x[r] + x[r - 1]) / 2 - (m_ ? y[(r * m_ + n_ - 1) / n_ - 1] : V<S>{}));
      const V<S> potential = sum * load(weights_ + slice);
      for (int64_t e = 0; e < lanes; ++e) column_[points_.active[tags_[r][e]]] += potential[e];
    }
  }

  const Tokens slices_;
  const int64_t size_, room_x_, room_y_;
  S *theta_, *weights_;
  V<S> *x_[2], *y_[2];
  Tags* tags_;
};

// Moments of clouds, and beta by the matrix that is found from them. Rows are of whole panels, with zeros at their ends.
template <class S> class Gaussian : TwoClouds<S> {
  using Base = TwoClouds<S>;
  using Base::p_, Base::points_, Base::others_, Base::n_, Base::m_, Base::column_, Base::L, Base::P;

 public:
  Gaussian(const Feature& p, int64_t index, Scratch& scratch)
      : Base(p, index), index_(index), dim_(p.dim), deep_(rounded_up(p.dim, P)) {
    scratch.reserve((std::max(n_, m_) + dim_ + kRows + 2) * deep_ * sizeof(S) + 6 * kBytes);
    shifted_ = scratch.take<S>(std::max(n_, m_) * deep_), matrix_ = scratch.take<S>(dim_ * deep_);
    block_ = scratch.take<S>(kRows * deep_), mean_x_ = scratch.take<S>(deep_), mean_y_ = scratch.take<S>(deep_);
  }

  void put_moments() {
    S* to = static_cast<S*>(p_.column) + index_ * 2 * (dim_ + 1) * dim_;
    put_moments(points_.none ? 0 : n_, [this](int64_t i) { return this->point(i); }, to);
    put_moments(others_.none ? 0 : m_, [this](int64_t j) { return this->other(j); }, to + (dim_ + 1) * dim_);
  }

  // beta(x) = (m_y + A (x - m_x) / 2) (x - m_x) + m_y m_x
  void put_potential() {
    std::fill_n(column_, p_.points, S(0)), std::fill_n(mean_y_, deep_, S(0));
    if (points_.none) return;
    this->find_mean(others_.none ? 0 : m_, [this](int64_t j) { return this->other(j); }, mean_y_);
    shift(n_, [this](int64_t i) { return this->point(i); });
    const S* matrix = static_cast<const S*>(p_.parameter) + index_ * dim_ * dim_;
    for (S* row = matrix_; row < matrix_ + dim_ * deep_; row += deep_, matrix += dim_)
      std::fill(std::copy_n(matrix, dim_, row), row + deep_, S(0));
    const S both = std::inner_product(mean_x_, mean_x_ + dim_, mean_y_, S(0));
    for (int64_t row = 0; row < n_; row += kRows) {
      const Rows<S> x(row, n_, [this](int64_t i) { return shifted_ + i * deep_; });
      tiles<S>(x, dim_, matrix_, P, deep_, block_, deep_, deep_);
      for (int64_t r = 0; r < x.count; ++r) {
        V<S> sum{};
        for (int64_t d = 0; d < deep_; d += L) sum += (load(block_ + r * deep_ + d) / 2 + load(mean_y_ + d)) * load(x.x[r] + d);
        column_[points_.active[row + r]] = sum_of<S>(sum) + both;
      }
    }
  }

 private:
  // Points less their mean.
  template <class At> void shift(int64_t count, const At& at) {
    this->find_mean(count, at, mean_x_);
    for (int64_t t = 0; t < count; ++t) {
      S* const to = shifted_ + t * deep_;
      for (int64_t d = 0; d < dim_; ++d) to[d] = at(t)[d] - mean_x_[d];
      std::fill(to + dim_, to + deep_, S(0));
    }
  }

  template <class At> void put_moments(int64_t count, const At& at, S* to) {
    shift(count, at);
    for (int64_t row = 0; row < dim_; row += kRows) {
      const Rows<S> x(row, dim_, [this](int64_t i) { return shifted_ + i; });
      tiles<S>(x, count, shifted_, P, deep_, block_, deep_, deep_, deep_);
      for (int64_t r = 0; r < x.count; ++r)
        for (int64_t d = 0; d < dim_; ++d) *to++ = block_[r * deep_ + d] / S(std::max<int64_t>(count, 1));
    }
    std::copy_n(mean_x_, dim_, to);
  }

  const int64_t index_, dim_, deep_;
  S *shifted_, *matrix_, *block_, *mean_x_, *mean_y_;
};

// Returns how many heads are not held; -1 where there is not enough memory.
template <class S> int64_t predict(const Feature& p) {
  const double tokens = double(p.points + p.others), width = double(p.family <= kSliced ? p.count : p.dim);
  const double products = tokens * width * double(p.dim + 2 * p.half_steps + 16);
  return count_lost(p.batch * p.heads, double(p.batch * p.heads) * products, p.threads, [&](int64_t index, Scratch& scratch) {
    if (p.family == kCoarse) return !Clustered<S>(p, index, scratch).run();
    if (p.family == kSliced) Sliced<S>(p, index, scratch).run();
    if (p.family == kMoments) Gaussian<S>(p, index, scratch).put_moments();
    if (p.family == kGaussian) Gaussian<S>(p, index, scratch).put_potential();
    return false;
  });
}

}  // namespace

// What Python's side must agree with: a build of another version would read other fields.
extern "C" const int64_t asapc_layout[] = {sizeof(Problem), sizeof(Slopes), sizeof(Plan),
                                           sizeof(Esp), sizeof(EspSlopes), sizeof(Feature)};

// slopes: null but for gradients. Returns the widest range of scores in a row, or that of a row that logarithms were
// needed for; -1 where there is not enough memory.
extern "C" double asapc_sinkhorn(const Problem* p, const Slopes* slopes) {
  return p->is_double ? run<double>(*p, slopes) : run<float>(*p, slopes);
}

// slopes: null but for gradients. Returns whether there was enough memory.
extern "C" int asapc_esp(const Esp* p, const EspSlopes* slopes) {
  return p->is_double ? sort<double>(*p, slopes) : sort<float>(*p, slopes);
}

// Return how many matrices or heads are not held; -1 where there is not enough memory.
extern "C" int64_t asapc_plan(const Plan* p) { return p->is_double ? plan_all<double>(*p) : plan_all<float>(*p); }
extern "C" int64_t asapc_feature(const Feature* p) { return p->is_double ? predict<double>(*p) : predict<float>(*p); }
