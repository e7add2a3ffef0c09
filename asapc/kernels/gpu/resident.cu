// The whole finite loop of a head in one block of threads, its matrix in registers: resident.py.
//
//     K_ij = exp(S_ij - max_j S_ij)    a_i = 1 / sum_j K_ij b_j    b_j = (N / M) / sum_i a_i K_ij
//
// A warp owns strips of 16 rows, laid out as the tensor cores leave a product: of each tile of 8 keys, lane
// 4 g + t holds rows g and g + 8 of columns 2 t and 2 t + 1. So the matrix is formed and multiplied by the
// values without moving, a row's sum takes two exchanges, and a column's three and one between warps.
//
// Constants that come first: WARPS of STRIPS each; TILES of 8 keys, an even number, of which HELD are in
// registers and the others in shared memory; DIM and VALUE_DIM, multiples of 16 and of 8; KIND, 0 for
// float32, 1 for float16, 2 for bfloat16; LATE, whether the values take the place of the keys in shared
// memory, once these are no longer needed; BLOCKS, how many of them a processor is to hold at once.

#if KIND == 0
typedef float Element;
typedef float2 Pair;
#else
typedef unsigned short Element;
typedef ushort2 Pair;
#endif

constexpr int THREADS = 32 * WARPS;
constexpr int KEYS = 8 * TILES;
constexpr int QUERIES = 16 * STRIPS * WARPS;
constexpr int PART = 32 * ((TILES + 3) / 4);  // sums of columns that a warp leaves
constexpr int STEP = KIND ? 16 : 8;           // features, or keys, of one product
constexpr int GROUP = 4;                      // tiles of scores that are formed at once
constexpr int VALUES = 4;                     // tiles of the output
constexpr int ROWS = 2 * STRIPS;              // of a lane
constexpr int PITCH = DIM + (KIND ? 8 : 4);   // between keys, and between values: no two lanes share a bank
constexpr int VALUE_PITCH = VALUE_DIM + (KIND ? 8 : 4);
constexpr int VECTOR = 16 / sizeof(Element);
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LEAST_B = 0x1p-60f;

#define INFINITE __int_as_float(0x7f800000)

// The flags of a call.
enum { HAS_KEEP = 1, HAS_BIAS = 2, HAS_DUAL = 4, HAS_FACTORS = 8, ROWS_FIRST = 16, CLOSES_ROWS = 32,
       WIDE_QUERIES = 64, WIDE_KEYS = 128, WIDE_VALUES = 256 };

#ifndef EMULATED  // tests/cuda_block.h has these for a CPU

__device__ __forceinline__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float exchanged(float x, int distance) {
  return __shfl_xor_sync(0xffffffffu, x, distance);
}

// 16 bytes to shared memory, zeros where there is nothing to read.
__device__ __forceinline__ void copy_later(void* to, const void* from, bool exists) {
  unsigned place = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(place), "l"(from), "r"(exists ? 16 : 0));
}

// What was read before is read again, and does not wait in registers.
__device__ __forceinline__ void forget() { asm volatile("" ::: "memory"); }

__device__ __forceinline__ void copies_arrived() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// c += a b for operands in the layout of the tensor cores.
__device__ __forceinline__ void multiply(float4& c, const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if KIND == 0
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#elif KIND == 1
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
      : "+f"(c.x), "+f"(c.y), "+f"(c.z), "+f"(c.w)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#if KIND != 0
// Two numbers in 16 bits each, the first in the lower half.
__device__ __forceinline__ unsigned packed(float first, float second) {
  unsigned word;
#if KIND == 1
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
#else
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
#endif
  return word;
}

// Column g of rows 2 t, 2 t + 1 and of rows 8 + 2 t, 9 + 2 t; lane i < 16 points to row i.
__device__ __forceinline__ uint2 turned(const Element* row) {
  unsigned place = static_cast<unsigned>(__cvta_generic_to_shared(row));
  uint2 pair;
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
               : "=r"(pair.x), "=r"(pair.y) : "r"(place) : "memory");
  return pair;
}
#endif

#endif

#if KIND == 0
// x = high + low, each of the 11 bits that the tensor cores read: float32 products of three of theirs. What is
// not finite is not rounded: the NaN that a GPU makes, 0x7fffffff, would become 0.
struct Split {
  unsigned high, low;
  __device__ __forceinline__ Split(float x) {
    const unsigned bits = __float_as_uint(x);
    const bool finite = (bits & 0x7f800000u) != 0x7f800000u;
    high = (finite ? bits + 0x1000u : bits) & 0xffffe000u;
    low = finite ? __float_as_uint(x - __uint_as_float(high)) + 0x1000u : 0u;
  }
};
#endif

// The operand of 16 rows: STEP features of g and g + 8.
struct Rows {
#if KIND == 0
  unsigned high[4], low[4];
  __device__ __forceinline__ void set(int i, float x) {
    Split split(x);
    high[i] = split.high;
    low[i] = split.low;
  }
#else
  unsigned words[4];
#endif
};

#if KIND == 0
// The tensor cores cut what they add off: over many steps that is a bias, so each step starts from 0.
__device__ __forceinline__ void multiply(float4& sum, const Rows& rows, Split b0, Split b1) {
  float4 step = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  multiply(step, rows.low, b0.high, b1.high);
  multiply(step, rows.high, b0.low, b1.low);
  multiply(step, rows.high, b0.high, b1.high);
  sum = make_float4(sum.x + step.x, sum.y + step.y, sum.z + step.z, sum.w + step.w);
}
#endif

struct Matrix {
  float4 held[HELD > 0 ? HELD * STRIPS : 1];
  float4* others;  // of this thread, THREADS apart

  __device__ __forceinline__ float4 get(int tile, int strip) const {
    return tile < HELD ? held[tile * STRIPS + strip] : others[((tile - HELD) * STRIPS + strip) * THREADS];
  }
  __device__ __forceinline__ void set(int tile, int strip, float4 x) {
    if (tile < HELD) held[tile * STRIPS + strip] = x;
    else others[((tile - HELD) * STRIPS + strip) * THREADS] = x;
  }
};

__device__ __forceinline__ float finite_or_zero(float most) { return most == -INFINITE ? 0.0f : most; }

// b, or NaN where K b or its inverse might leave float32's range.
__device__ __forceinline__ float in_range(float b) {
  return b >= LEAST_B && b <= 1.0f / LEAST_B ? b : __int_as_float(0x7fffffff);
}

__device__ __forceinline__ float largest_of_warp(float x) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) x = fmaxf(x, exchanged(x, distance));
  return x;
}

__device__ __forceinline__ float sum_of_row(float x) {
  x += exchanged(x, 1);
  return x + exchanged(x, 2);
}

// `count` rows of `width` elements, zeros up to `padded` and where the row is none of `existing` or hidden.
__device__ __forceinline__ void load_rows(Element* to, int pitch, int padded, int count, const Element* from,
                                          long long stride_n, long long stride_d, int width, int existing,
                                          const float* hidden, bool wide) {
  const int size = wide ? VECTOR : 1, steps = padded / size;
  for (int i = threadIdx.x; i < count * steps; i += THREADS) {
    const int row = i / steps, d = i % steps * size;
    const bool exists = row < existing && d < width && (!hidden || hidden[row] == 0.0f);
    const Element* place = exists ? from + row * stride_n + d * stride_d : from;
    if (wide) copy_later(to + row * pitch + d, place, exists);
    else to[row * pitch + d] = exists ? *place : Element(0);
  }
}

// Features of rows g and g + 8 of a strip; p: at row g and this lane's place.
__device__ __forceinline__ Rows load_queries(const Element* p) {
  Rows rows;
#pragma unroll
  for (int i = 0; i < 4; i++) {
#if KIND == 0
    rows.set(i, p[i % 2 * 8 * PITCH + i / 2 * 4]);
#else
    rows.words[i] = *reinterpret_cast<const unsigned*>(p + i % 2 * 8 * PITCH + i / 2 * 8);
#endif
  }
  return rows;
}

// sums += rows times STEP features of a key.
__device__ __forceinline__ void multiply_key(float4 (&sums)[STRIPS], const Rows (&rows)[STRIPS], const Element* key,
                                             int t) {
#if KIND == 0
  const Split b0(key[t]), b1(key[t + 4]);
#else
  const unsigned* words = reinterpret_cast<const unsigned*>(key);
  const unsigned b0 = words[t], b1 = words[t + 4];
#endif
#pragma unroll
  for (int s = 0; s < STRIPS; s++)
#if KIND == 0
    multiply(sums[s], rows[s], b0, b1);
#else
    multiply(sums[s], rows[s].words, b0, b1);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) resident(
    const Element* q, const Element* k, const Element* v, const unsigned char* keep, const float* bias,
    const float* dual, const float* factors, Element* out, int* done, int heads, int queries, int keys, int dim,
    int value_dim, int q_b, int q_h, int q_n, int q_d, int k_b, int k_h, int k_n, int k_d, int v_b, int v_h, int v_n,
    int v_d, int keep_b, int keep_n, int bias_b, int bias_h, int bias_x, int bias_y, int dual_b, int dual_h, int dual_n,
    int scale_bits, int factor_bits, int range_bits, int pairs, int flags) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const long long head = blockIdx.x, i_b = head / heads, i_h = head % heads;
  const float scale = __int_as_float(scale_bits);
  int row[ROWS];
  bool exists[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    row[r] = 16 * STRIPS * warp + 8 * r + g;
    exists[r] = row[r] < queries;
  }
  q += i_b * q_b + i_h * q_h;
  k += i_b * k_b + i_h * k_h;
  v += i_b * v_b + i_h * v_h;
  keep += i_b * keep_b;
  bias += i_b * bias_b + i_h * bias_h;
  dual += i_b * dual_b + i_h * dual_h;

#ifndef EMULATED
  extern __shared__ float4 shared[];
#endif
  float* columns = reinterpret_cast<float*>(shared);  // what hides keys, then b
  float* parts = columns + KEYS;                      // [WARPS, PART]
  int* right = reinterpret_cast<int*>(parts + WARPS * PART);
  Element* key_rows = reinterpret_cast<Element*>(right + 4);
  Element* query_rows = key_rows + KEYS * PITCH;
  constexpr int scored = (KEYS + QUERIES) * PITCH, valued = KEYS * VALUE_PITCH;
  constexpr int kept = LATE ? (scored > valued ? scored : valued) : scored + valued;
  Element* value_rows = LATE ? key_rows : key_rows + scored;
  Matrix matrix;
  matrix.others = reinterpret_cast<float4*>(key_rows + kept) + threadIdx.x;

  if (threadIdx.x == 0) *right = 1;
  for (int j = threadIdx.x; j < KEYS; j += THREADS) {
    bool active = j < keys && (!(flags & HAS_KEEP) || keep[1ll * j * keep_n]);
    columns[j] = active ? 0.0f : -INFINITE;
  }
  __syncthreads();
  auto load_values = [&]() {
    load_rows(value_rows, VALUE_PITCH, VALUE_DIM, KEYS, v, v_n, v_d, value_dim, keys, columns, flags & WIDE_VALUES);
  };
  load_rows(query_rows, PITCH, DIM, QUERIES, q, q_n, q_d, dim, queries, nullptr, flags & WIDE_QUERIES);
  load_rows(key_rows, PITCH, DIM, KEYS, k, k_n, k_d, dim, keys, columns, flags & WIDE_KEYS);
  if (!LATE) load_values();
  copies_arrived();
  __syncthreads();

  // Scores, in units of log2.
  const Element* queries_of_lane = query_rows + row[0] * PITCH + (KIND ? 2 * t : t);
  float most[ROWS], least[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    most[r] = -INFINITE;
    least[r] = INFINITE;
  }
#pragma unroll
  for (int first = 0; first < TILES; first += GROUP) {
    forget();
    float4 sums[GROUP][STRIPS] = {};
#pragma unroll 2
    for (int d = 0; d < DIM; d += STEP) {
      Rows rows[STRIPS];
#pragma unroll
      for (int s = 0; s < STRIPS; s++) rows[s] = load_queries(queries_of_lane + 16 * s * PITCH + d);
#pragma unroll
      for (int i = 0; i < GROUP; i++)
        if (first + i < TILES) multiply_key(sums[i], rows, key_rows + (8 * (first + i) + g) * PITCH + d, t);
    }
#pragma unroll
    for (int i = 0; i < GROUP; i++) {
      if (first + i >= TILES) continue;
      const int column = 8 * (first + i) + 2 * t;
      const float2 hidden = *reinterpret_cast<const float2*>(columns + column);
#pragma unroll
      for (int s = 0; s < STRIPS; s++) {
        float2 scores[2] = {make_float2(sums[i][s].x, sums[i][s].y), make_float2(sums[i][s].z, sums[i][s].w)};
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int r = 2 * s + half;
          float2& x = scores[half];
          x = make_float2(x.x * scale + hidden.x, x.y * scale + hidden.y);
          if (flags & HAS_BIAS && exists[r]) {
            const float* own = bias + 1ll * row[r] * bias_x + 1ll * column * bias_y;
            if (hidden.x == 0.0f) x.x += LOG2_E * own[0];
            if (hidden.y == 0.0f) x.y += LOG2_E * own[bias_y];
          }
          most[r] = fmaxf(most[r], fmaxf(x.x, x.y));
          least[r] = fminf(least[r], fminf(x.x == -INFINITE ? INFINITE : x.x, x.y == -INFINITE ? INFINITE : x.y));
        }
        matrix.set(first + i, s, make_float4(scores[0].x, scores[0].y, scores[1].x, scores[1].y));
      }
    }
  }
  float shift[ROWS], a[ROWS];
  const float range = __int_as_float(range_bits);
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2) {
      most[r] = fmaxf(most[r], exchanged(most[r], distance));
      least[r] = fminf(least[r], exchanged(least[r], distance));
    }
    if (exists[r] && most[r] - least[r] > range) *right = 0;
    shift[r] = exists[r] ? finite_or_zero(most[r]) : INFINITE;  // rows that do not exist are empty
  }
#pragma unroll
  for (int i = 0; i < TILES; i++)
#pragma unroll
    for (int s = 0; s < STRIPS; s++) {
      const float4 x = matrix.get(i, s);
      matrix.set(i, s, make_float4(exp2_of(x.x - shift[2 * s]), exp2_of(x.y - shift[2 * s]),
                                   exp2_of(x.z - shift[2 * s + 1]), exp2_of(x.w - shift[2 * s + 1])));
    }

  const float ratio = static_cast<float>(keys) / static_cast<float>(queries);

  auto close_columns = [&]() {
    float* part = parts + warp * PART;
#pragma unroll
    for (int first = 0; first < TILES; first += 4) {
      float sums[8] = {};  // of columns 2 t and 2 t + 1 of four tiles: this lane ends with number g of them
#pragma unroll
      for (int i = 0; i < 4; i++)
#pragma unroll
        for (int s = 0; s < STRIPS && first + i < TILES; s++) {
          const float4 x = matrix.get(first + i, s);
          sums[2 * i] += a[2 * s] * x.x + a[2 * s + 1] * x.z;
          sums[2 * i + 1] += a[2 * s] * x.y + a[2 * s + 1] * x.w;
        }
#pragma unroll
      for (int half = 4; half > 0; half /= 2) {
        const bool upper = g & half;
#pragma unroll
        for (int i = 0; i < half; i++) {
          const float own = upper ? sums[i + half] : sums[i], other = upper ? sums[i] : sums[i + half];
          sums[i] = own + exchanged(other, 4 * half);
        }
      }
      part[8 * (first + g / 2) + 2 * t + g % 2] = sums[0];
    }
    __syncthreads();
    for (int j = threadIdx.x; j < KEYS; j += THREADS) {
      float total = 0.0f;
#pragma unroll
      for (int i = 0; i < WARPS; i++) total += parts[i * PART + j];
      total *= ratio;
      columns[j] = in_range(total == 0.0f ? 1.0f : 1.0f / total);  // 1 where no query sees the key
    }
    __syncthreads();
  };

  auto close_rows = [&]() {
    float totals[ROWS] = {};
#pragma unroll
    for (int i = 0; i < TILES; i++) {
      const float2 b = *reinterpret_cast<const float2*>(columns + 8 * i + 2 * t);
#pragma unroll
      for (int s = 0; s < STRIPS; s++) {
        const float4 x = matrix.get(i, s);
        totals[2 * s] += x.x * b.x + x.y * b.y;
        totals[2 * s + 1] += x.z * b.x + x.w * b.y;
      }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      const float total = sum_of_row(totals[r]);
      a[r] = total == 0.0f ? 0.0f : 1.0f / total;
    }
  };

  __syncthreads();  // all have read what hides keys, and the keys
  if (LATE) load_values();
  if (flags & ROWS_FIRST) {
    float top = -INFINITE;
    if (flags & HAS_DUAL) {
      for (int j = lane; j < KEYS; j += 32)
        if (columns[j] == 0.0f) top = fmaxf(top, LOG2_E * dual[1ll * j * dual_n]);
      top = finite_or_zero(largest_of_warp(top));
    }
    __syncthreads();
    for (int j = threadIdx.x; j < KEYS; j += THREADS) {
      bool starts = flags & HAS_DUAL && columns[j] == 0.0f;
      columns[j] = starts ? in_range(exp2_of(LOG2_E * dual[1ll * j * dual_n] - top)) : 1.0f;
    }
    __syncthreads();
  } else {
    float top = -INFINITE;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      if (flags & HAS_DUAL && exists[r]) most[r] += LOG2_E * dual[1ll * row[r] * dual_n];
      if (exists[r]) top = fmaxf(top, most[r]);
    }
    top = largest_of_warp(top);
    if (lane == 0) parts[warp] = top;
    __syncthreads();
    for (int i = 0; i < WARPS; i++) top = fmaxf(top, parts[i]);
    top = finite_or_zero(top);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      a[r] = exists[r] ? exp2_of(most[r] - top) : 0.0f;
      if (exists[r] && most[r] != -INFINITE && !(a[r] >= LEAST_B)) *right = 0;
    }
    __syncthreads();
    close_columns();
  }
  for (int pair = 0; pair < pairs; pair++) {
    close_rows();
    close_columns();
  }
  if (flags & CLOSES_ROWS) close_rows();
  for (int j = threadIdx.x; j < KEYS; j += THREADS)
    if (!(columns[j] == columns[j])) *right = 0;
  if (LATE) copies_arrived();
  __syncthreads();
  if (threadIdx.x == 0) done[head] = *right;

  // The weights, rounded as the values are, times the values.
  const float factor = __int_as_float(factor_bits) * (flags & HAS_FACTORS ? factors[i_b] : 1.0f);
#pragma unroll
  for (int s = 0; s < STRIPS; s++) {
    forget();
#pragma unroll 1
    for (int first = 0; first < VALUE_DIM / 8; first += VALUES) {
      float4 sums[VALUES] = {};
#pragma unroll
      for (int step = 0; step < KEYS; step += STEP) {
        Rows rows;
#pragma unroll
        for (int i = 0; i < STEP / 8; i++) {
          const float2 b = *reinterpret_cast<const float2*>(columns + step + 8 * i + 2 * t);
          const float4 x = matrix.get(step / 8 + i, s);
          const float upper[2] = {a[2 * s] * (x.x * b.x), a[2 * s] * (x.y * b.y)};
          const float lower[2] = {a[2 * s + 1] * (x.z * b.x), a[2 * s + 1] * (x.w * b.y)};
#if KIND == 0
          rows.set(0, upper[0]);  // column 2 t is this product's feature t, and 2 t + 1 is t + 4
          rows.set(1, lower[0]);
          rows.set(2, upper[1]);
          rows.set(3, lower[1]);
#else
          rows.words[2 * i] = packed(upper[0], upper[1]);
          rows.words[2 * i + 1] = packed(lower[0], lower[1]);
#endif
        }
#pragma unroll
        for (int i = 0; i < VALUES; i++) {
          if (first + i >= VALUE_DIM / 8) continue;
          const int e = 8 * (first + i);
#if KIND == 0
          const Element* value = value_rows + (step + 2 * t) * VALUE_PITCH + e + g;
          multiply(sums[i], rows, Split(value[0]), Split(value[VALUE_PITCH]));
#else
          const uint2 pair = turned(value_rows + (step + lane % 16) * VALUE_PITCH + e);
          multiply(sums[i], rows.words, pair.x, pair.y);
#endif
        }
      }
#pragma unroll
      for (int i = 0; i < VALUES; i++) {
        const int e = 8 * (first + i) + 2 * t;
        const float2 halves[2] = {make_float2(sums[i].x, sums[i].y), make_float2(sums[i].z, sums[i].w)};
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int r = 2 * s + half;
          Element* to = out + (head * queries + row[r]) * value_dim + e;
#if KIND == 0
          const Pair pair = make_float2(factor * halves[half].x, factor * halves[half].y);
#else
          const unsigned word = packed(factor * halves[half].x, factor * halves[half].y);
          const Pair pair = make_ushort2(word, word >> 16);
#endif
          if (!exists[r] || e >= value_dim) continue;
          if (value_dim % 2 == 0) {
            *reinterpret_cast<Pair*>(to) = pair;
          } else {
            to[0] = pair.x;
            if (e + 1 < value_dim) to[1] = pair.y;
          }
        }
      }
    }
  }
}
