// The whole finite loop of a head in one cluster of blocks of threads, its matrix in their shared memory: block.py.
//
//     K_ij = exp(S_ij - s_i)    a_i = 1 / sum_j K_ij b_j    b_j = (N / M) / sum_i a_i K_ij
//
// s_i is the largest score among the first keys that query i sees, which is known before the others are formed.
// A block holds 16 WARPS rows of K, of which a warp forms a strip of 16. The blocks of a cluster add their sums
// of columns up through each other's shared memory, in the order of the blocks.
//
// In bfloat16 K is rounded, as the weights of any attention are; then sums of rows and of columns are products
// on the tensor cores, too, with each scaling as the sum of two numbers. Else K is float32, and the lanes of a
// warp share the columns.
//
// Constants that come first: WARPS; CLUSTER blocks; DIM and VALUE_DIM, multiples of 16; KIND, 0 for float32, 1
// for float16, 2 for bfloat16; CHUNKS of 128 columns, of a K in float32; BLOCKS, how many a processor is to hold.

#if KIND == 0
typedef float Element;
typedef float2 Pair;
#else
typedef unsigned short Element;
typedef ushort2 Pair;
#endif
#if KIND == 2
typedef unsigned short Entry;  // of K
#else
typedef float Entry;
#endif

constexpr int THREADS = 32 * WARPS;
constexpr int ROWS = 16 * WARPS;             // of a block
constexpr int STEP = KIND ? 16 : 8;          // features, or keys, of one product
constexpr int GROUP = 4;                     // tiles of 8 keys whose scores are formed at once
constexpr int PART = KIND ? 64 : 32;         // keys, or values, that are read at once
constexpr int PITCH = DIM + 8;               // between keys, and between values: no two lanes share a bank
constexpr int VALUE_PITCH = VALUE_DIM + (KIND ? 8 : 4);
constexpr int BUFFER = PART * (PITCH > VALUE_PITCH ? PITCH : VALUE_PITCH);
constexpr int BUFFERS = KIND ? 2 : 3;        // by turns; or what arrives, and the two parts of it
constexpr int VECTOR = 16 / sizeof(Element);
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LEAST_B = 0x1p-50f;          // a sum of K b is then below 2^120

#define INFINITE __int_as_float(0x7f800000)

// The flags of a call.
enum { HAS_KEEP = 1, HAS_BIAS = 2, HAS_DUAL = 4, HAS_FACTORS = 8, ROWS_FIRST = 16, WIDE_QUERIES = 32, WIDE_KEYS = 64,
       WIDE_VALUES = 128 };

#ifndef EMULATED  // tests/cuda_block.h has these for a CPU

__device__ __forceinline__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float exchanged(float x, int distance) {
  return __shfl_xor_sync(0xffffffffu, x, distance);
}

__device__ __forceinline__ float of_lane(float x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }

__device__ __forceinline__ bool any_of_warp(bool x) { return __any_sync(0xffffffffu, x); }

__device__ __forceinline__ unsigned place_of(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// 16 bytes to shared memory, zeros where there is nothing to read.
__device__ __forceinline__ void copy_later(void* to, const void* from, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(place_of(to)), "l"(from), "r"(exists ? 16 : 0));
}

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

// Four blocks of 8 x 8 numbers, of which lanes 8 i to 8 i + 7 point to the rows of block i: columns 2 t and 2 t + 1
// of its row g; or, turned, rows 2 t and 2 t + 1 of its column g.
__device__ __forceinline__ void load_blocks(unsigned (&to)[4], const unsigned short* row, bool turned) {
  if (turned)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(place_of(row)) : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(place_of(row)) : "memory");
}
#endif

#if CLUSTER > 1
#define OF_CLUSTER __cluster_dims__(CLUSTER, 1, 1)

__device__ __forceinline__ void wait_for_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// What another block of the cluster has at this place of its shared memory.
__device__ __forceinline__ float of_block(const float* p, int rank) {
  unsigned place;
  float x;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(place) : "r"(place_of(p)), "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(place) : "memory");
  return x;
}
#else
#define OF_CLUSTER
__device__ __forceinline__ void wait_for_cluster() {}
__device__ __forceinline__ float of_block(const float* p, int) { return *p; }
#endif

#endif

#if KIND == 0
// x = high + low, each of the 11 bits that the tensor cores read: float32 products of three of theirs.  x: not the
// NaN that a GPU makes, 0x7fffffff, which would become 0.
struct Split {
  unsigned high, low;
  __device__ __forceinline__ Split(float x) {
    high = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
    low = __float_as_uint(x - __uint_as_float(high)) + 0x1000u;
  }
};

__device__ __forceinline__ float usual_nan(float x) { return x == x ? x : __int_as_float(0x7fc00000); }

// The operand of 16 rows: features, or keys, 2 t and 2 t + 1 of rows g and g + 8 stand where the tensor cores look
// for t and t + 4; so do those of the other operand.
struct Rows {
  unsigned high[4], low[4];
  __device__ __forceinline__ Rows(float2 upper, float2 lower) {
    const float x[4] = {upper.x, lower.x, upper.y, lower.y};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const Split split(x[i]);
      high[i] = split.high;
      low[i] = split.low;
    }
  }
};

// The tensor cores cut what they add off: over many steps that is a bias, so each step starts from 0.
__device__ __forceinline__ void multiply(float4& sum, const Rows& rows, float2 high, float2 low) {
  float4 step = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  const unsigned b0 = __float_as_uint(high.x), b1 = __float_as_uint(high.y);
  multiply(step, rows.low, b0, b1);
  multiply(step, rows.high, __float_as_uint(low.x), __float_as_uint(low.y));
  multiply(step, rows.high, b0, b1);
  sum = make_float4(sum.x + step.x, sum.y + step.y, sum.z + step.z, sum.w + step.w);
}
#endif

// b, or NaN where K b or its inverse might leave float32's range.
__device__ __forceinline__ float in_range(float b) {
  return b >= LEAST_B && b <= 1.0f / LEAST_B ? b : __int_as_float(0x7fffffff);
}

__device__ __forceinline__ float largest_of_warp(float x) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) x = fmaxf(x, exchanged(x, distance));
  return x;
}

#if KIND == 2
// Scaling i as the sum of two numbers, `stride` apart.  Of 16, a lane reads 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 at once.
__device__ __forceinline__ void keep_parts(unsigned short* parts, int i, int stride, float x) {
  unsigned short* to = parts + (i / 16 * 16 + (i & 6) * 2 + (i & 8) / 4 + i % 2);
  const unsigned short high = packed(x, 0.0f);
  to[0] = high;
  to[stride] = packed(x - __uint_as_float(static_cast<unsigned>(high) << 16), 0.0f);
}
#else
// Of four numbers a lane, the sum of number lane / 8 over the warp.
__device__ __forceinline__ float sum_of_four(const float (&x)[4], int lane) {
  const bool upper = lane & 16, odd = lane & 8;
  const float first = (upper ? x[2] : x[0]) + exchanged(upper ? x[0] : x[2], 16);
  const float second = (upper ? x[3] : x[1]) + exchanged(upper ? x[1] : x[3], 16);
  float sum = (odd ? second : first) + exchanged(odd ? first : second, 8);
#pragma unroll
  for (int distance = 4; distance > 0; distance /= 2) sum += exchanged(sum, distance);
  return sum;
}

__device__ __forceinline__ float dot(float4 x, float4 y) { return x.x * y.x + x.y * y.y + x.z * y.z + x.w * y.w; }
#endif

// `use(row, d, COUNT)` for all of PART rows of `width` elements, COUNT at a time; the same for each thread each time.
template <int COUNT, typename Use> __device__ __forceinline__ void for_each(int width, Use use) {
  const int steps = width / COUNT;
#pragma unroll (COUNT > 1 ? 1 : 2)
  for (int i = threadIdx.x; i < PART * steps; i += THREADS) use(i / steps, i % steps * COUNT, COUNT);
}

template <typename Use> __device__ __forceinline__ void for_elements(int width, bool wide, Use use) {
  wide ? for_each<VECTOR>(width, use) : for_each<1>(width, use);
}

extern "C" __global__ void OF_CLUSTER __launch_bounds__(THREADS, BLOCKS) resident(
    const Element* q, const Element* k, const Element* v, const unsigned char* keep, const float* bias,
    const float* dual, const float* factors, Element* out, int* done, int heads, int queries, int keys, int dim,
    int value_dim, int q_b, int q_h, int q_n, int q_d, int k_b, int k_h, int k_n, int k_d, int v_b, int v_h, int v_n,
    int v_d, int keep_b, int keep_n, int bias_b, int bias_h, int bias_x, int bias_y, int dual_b, int dual_h, int dual_n,
    int scale_bits, int factor_bits, int range_bits, int half_steps, int flags) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int rank = blockIdx.x % CLUSTER;
  const long long head = blockIdx.x / CLUSTER, i_b = head / heads, i_h = head % heads;
  const float scale = __int_as_float(scale_bits);
  const int padded = (keys + 15) / 16 * 16, pitch = padded + 8;
  const int row[2] = {ROWS * rank + 16 * warp + g, ROWS * rank + 16 * warp + g + 8};  // of this lane
  const bool exists[2] = {row[0] < queries, row[1] < queries};
  q += i_b * q_b + i_h * q_h;
  k += i_b * k_b + i_h * k_h;
  v += i_b * v_b + i_h * v_h;
  keep += i_b * keep_b;
  bias += i_b * bias_b + i_h * bias_h;
  dual += i_b * dual_b + i_h * dual_h;

#ifndef EMULATED
  extern __shared__ float4 shared[];
#endif
  float* columns = reinterpret_cast<float*>(shared);  // while K is formed, what hides keys; then b, below 0 if hidden
  float* sums_of_columns = columns + padded;          // of this block, by turns
  float* row_scales = sums_of_columns + (CLUSTER > 1 ? 2 * padded : 0);  // a
  float* right = row_scales + ROWS;
  unsigned short* row_parts = reinterpret_cast<unsigned short*>(right + 4);
  unsigned short* column_parts = row_parts + (KIND == 2 ? 2 * ROWS : 0);
  Element* buffers = reinterpret_cast<Element*>(column_parts + (KIND == 2 ? 2 * pitch : 0));
  const int room = KIND == 2 ? BUFFERS * BUFFER * 2 : max(BUFFERS * BUFFER * int(sizeof(Element)), 4 * WARPS * padded);
  Entry* matrix = reinterpret_cast<Entry*>(reinterpret_cast<char*>(buffers) + room);
  Entry* strip = matrix + 16 * warp * pitch;

  if (threadIdx.x == 0) *right = 1.0f;
  for (int j = threadIdx.x; j < padded; j += THREADS) {
    bool active = j < keys && (!(flags & HAS_KEEP) || keep[1ll * j * keep_n]);
    columns[j] = active ? 0.0f : -INFINITE;
  }
  __syncthreads();

  // Rows of k or v from `first` on, zeros where there is nothing, or what is hidden.
  auto read_later = [&](const Element* from, int first, int stride_n, int stride_d, int width, int padded_width,
                        int distance, bool wide) {
    Element* to = buffers + (KIND ? first / PART % 2 * BUFFER : 0);
    for_elements(padded_width, wide, [&](int i, int d, int size) {
      const int j = first + i;
      const bool there = j < keys && d < width && columns[j] >= 0.0f;
      const Element* place = there ? from + 1ll * j * stride_n + 1ll * d * stride_d : from;
      if (size > 1) copy_later(to + i * distance + d, place, there);
      else to[i * distance + d] = there ? *place : Element(0);
    });
  };
#if KIND == 0
  float* high = buffers + BUFFER;
  float* low = high + BUFFER;
  auto split_all = [&](int width, int distance) {
    for_elements(width, true, [&](int i, int d, int size) {
      for (int own = i * distance + d; own < i * distance + d + size; own++) {
        const Split split(usual_nan(buffers[own]));
        high[own] = __uint_as_float(split.high);
        low[own] = __uint_as_float(split.low);
      }
    });
    __syncthreads();
  };
#endif

  // This lane's features of its two rows.
#if KIND == 0
  float2 queries_of_lane[DIM / 8][2];
#else
  unsigned queries_of_lane[DIM / 16][4];
#endif
  auto pair_of = [&](int r, int d) {
    Pair pair = {};
    const Element* place = q + 1ll * row[r] * q_n + 1ll * d * q_d;
    if (exists[r] && flags & WIDE_QUERIES && d < dim) return *reinterpret_cast<const Pair*>(place);
    if (exists[r] && d < dim) pair.x = place[0];
    if (exists[r] && d + 1 < dim) pair.y = place[q_d];
    return pair;
  };
#pragma unroll
  for (int i = 0; i < DIM / STEP; i++) {
#if KIND == 0
    for (int r = 0; r < 2; r++) {
      const float2 own = pair_of(r, 8 * i + 2 * t);
      queries_of_lane[i][r] = make_float2(usual_nan(own.x), usual_nan(own.y));
    }
#else
    for (int r = 0; r < 4; r++) {
      const Pair own = pair_of(r % 2, 16 * i + r / 2 * 8 + 2 * t);
      queries_of_lane[i][r] = own.x | static_cast<unsigned>(own.y) << 16;
    }
#endif
  }

  // Scores, in units of log2, and K.
  float shift[2], most[2] = {-INFINITE, -INFINITE}, least[2] = {INFINITE, INFINITE};
  for (int r = 0; r < 2; r++) shift[r] = exists[r] ? -INFINITE : INFINITE;  // rows that do not exist are empty
  for (int first = -PART; first < keys; first += PART) {
    copies_arrived();
    __syncthreads();
#if KIND == 0
    if (first >= 0) split_all(DIM, PITCH);
#endif
    if (first + PART < keys) read_later(k, first + PART, k_n, k_d, dim, DIM, PITCH, flags & WIDE_KEYS);
    if (first < 0) continue;
    for (int start = 0; start < PART && first + start < padded; start += 8 * GROUP) {
      float4 scores[GROUP] = {};
#pragma unroll
      for (int i = 0; i < DIM / STEP; i++) {
#if KIND == 0
        const Rows rows(queries_of_lane[i][0], queries_of_lane[i][1]);
#pragma unroll
        for (int tile = 0; tile < GROUP; tile++) {
          const int place = (start + 8 * tile + g) * PITCH + 8 * i + 2 * t;
          multiply(scores[tile], rows, *reinterpret_cast<const float2*>(high + place),
                   *reinterpret_cast<const float2*>(low + place));
        }
#else
        const Element* own = buffers + first / PART % 2 * BUFFER + 16 * i + lane / 8 % 2 * 8;
#pragma unroll
        for (int tile = 0; tile < GROUP; tile += 2) {
          unsigned blocks[4];
          load_blocks(blocks, own + (start + 8 * tile + lane / 16 * 8 + lane % 8) * PITCH, false);
          multiply(scores[tile], queries_of_lane[i], blocks[0], blocks[1]);
          multiply(scores[tile + 1], queries_of_lane[i], blocks[2], blocks[3]);
        }
#endif
      }
      float2 x[GROUP][2];
#pragma unroll
      for (int tile = 0; tile < GROUP; tile++) {
        const int column = first + start + 8 * tile + 2 * t;
        const float2 hidden = column < padded ? *reinterpret_cast<const float2*>(columns + column)
                                              : make_float2(-INFINITE, -INFINITE);
        x[tile][0] = make_float2(scores[tile].x * scale + hidden.x, scores[tile].y * scale + hidden.y);
        x[tile][1] = make_float2(scores[tile].z * scale + hidden.x, scores[tile].w * scale + hidden.y);
        if (!(flags & HAS_BIAS)) continue;
        for (int r = 0; r < 2; r++) {
          const float* own = bias + 1ll * row[r] * bias_x + 1ll * column * bias_y;
          if (exists[r] && hidden.x == 0.0f) x[tile][r].x += LOG2_E * own[0];
          if (exists[r] && hidden.y == 0.0f) x[tile][r].y += LOG2_E * own[bias_y];
        }
      }
      if (any_of_warp(shift[0] == -INFINITE || shift[1] == -INFINITE)) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
          float top = -INFINITE;
#pragma unroll
          for (int tile = 0; tile < GROUP; tile++) top = fmaxf(top, fmaxf(x[tile][r].x, x[tile][r].y));
          top = fmaxf(top, exchanged(top, 1));
          top = fmaxf(top, exchanged(top, 2));
          if (shift[r] == -INFINITE) shift[r] = top;
        }
      }
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const float own_shift = shift[r] == -INFINITE ? 0.0f : shift[r];
#pragma unroll
        for (int tile = 0; tile < GROUP; tile++) {
          const int column = first + start + 8 * tile + 2 * t;
          const float2 y = make_float2(x[tile][r].x - own_shift, x[tile][r].y - own_shift);
          most[r] = fmaxf(most[r], fmaxf(y.x, y.y));
          least[r] = fminf(least[r], fminf(y.x == -INFINITE ? INFINITE : y.x, y.y == -INFINITE ? INFINITE : y.y));
          Entry* to = strip + (8 * r + g) * pitch + column;
          if (column >= padded) continue;
#if KIND == 2
          *reinterpret_cast<unsigned*>(to) = packed(exp2_of(y.x), exp2_of(y.y));
#else
          *reinterpret_cast<float2*>(to) = make_float2(exp2_of(y.x), exp2_of(y.y));
#endif
        }
      }
    }
  }
  const float range = __int_as_float(range_bits);
  for (int r = 0; r < 2; r++)
    if (exists[r] && (most[r] > range || least[r] < -range)) *right = 0.0f;

  const float ratio = static_cast<float>(keys) / static_cast<float>(queries);
  int turn = 0;
  auto set_a = [&](int i, float a) {
    row_scales[i] = a;
#if KIND == 2
    keep_parts(row_parts, i, ROWS, a);
#endif
  };
  auto set_b = [&](int j, float b, bool hidden) {
    columns[j] = hidden ? -1.0f : b;
#if KIND == 2
    keep_parts(column_parts, j, pitch, hidden ? 1.0f : b);
#endif
  };
  auto close_column = [&](int j, float total) {  // 1 where no query sees the key
    set_b(j, in_range(total == 0.0f ? 1.0f : 1.0f / (ratio * total)), columns[j] < 0.0f);
  };
  auto leave = [&](int j, float total) {
    if (CLUSTER == 1) close_column(j, total);
    else sums_of_columns[turn * padded + j] = total;
  };
  auto join = [&]() {
    if (CLUSTER > 1) {
      wait_for_cluster();
      for (int j = threadIdx.x; j < padded; j += THREADS) {
        float total = 0.0f;
        for (int i = 0; i < CLUSTER; i++) total += of_block(sums_of_columns + turn * padded + j, i);
        close_column(j, total);
      }
      turn = 1 - turn;
    }
    __syncthreads();
  };
#if KIND == 2
  // Both parts of scalings are columns 0 and 1 of an operand; what the others hold is not used.
  const unsigned short* row_parts_of_lane = row_parts + (g ? ROWS : 0) + 4 * t;
  const unsigned short* column_parts_of_lane = column_parts + (g ? pitch : 0) + 4 * t;
  auto close = [&](bool rows, bool columns_too) {
    if (rows) {
      float4 sums[2] = {};
#pragma unroll 2
      for (int j = 0, i = 0; j < padded; j += 16, i = 1 - i) {
        unsigned blocks[4];
        load_blocks(blocks, strip + lane % 16 * pitch + j + lane / 16 * 8, false);
        const uint2 b = *reinterpret_cast<const uint2*>(column_parts_of_lane + j);
        float4 next = sums[0];
        multiply(next, blocks, b.x, b.y);
        sums[0] = sums[1];
        sums[1] = next;
      }
      const float totals[2] = {sums[0].x + sums[0].y + (sums[1].x + sums[1].y),
                               sums[0].z + sums[0].w + (sums[1].z + sums[1].w)};
      for (int r = 0; r < 2; r++)
        if (t == 0) set_a(16 * warp + 8 * r + g, totals[r] == 0.0f ? 0.0f : 1.0f / totals[r]);
      __syncthreads();
    }
    if (!columns_too) return;
    for (int j = 16 * warp; j < padded; j += 16 * WARPS) {
      float4 sums[2] = {};
      const Entry* own = matrix + (lane / 16 * 8 + lane % 8) * pitch + j + lane / 8 % 2 * 8;
#pragma unroll
      for (int i = 0; i < WARPS; i++, own += 16 * pitch) {
        unsigned blocks[4];
        load_blocks(blocks, own, true);
        const uint2 a = *reinterpret_cast<const uint2*>(row_parts_of_lane + 16 * i);
        multiply(sums[i % 2], blocks, a.x, a.y);
      }
      if (t == 0) leave(j + g, sums[0].x + sums[0].y + (sums[1].x + sums[1].y));
      if (t == 0) leave(j + 8 + g, sums[0].z + sums[0].w + (sums[1].z + sums[1].w));
    }
    join();
  };
#else
  float* sums_of_warps = reinterpret_cast<float*>(buffers);
  // One pass over the strip: the sums of its rows, and what the rows then add to those of the columns.
  auto close = [&](bool rows, bool columns_too) {
    float4 b[CHUNKS] = {}, added[CHUNKS] = {};
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
      if (rows && 128 * c + 4 * lane < padded) b[c] = *reinterpret_cast<const float4*>(columns + 128 * c + 4 * lane);
#pragma unroll 1
    for (int i = 0; i < 16; i += 4) {
      float4 x[4][CHUNKS] = {};
      float totals[4] = {}, a[4];
#pragma unroll
      for (int r = 0; r < 4; r++)
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
          if (128 * c + 4 * lane < padded)
            x[r][c] = *reinterpret_cast<const float4*>(strip + (i + r) * pitch + 128 * c + 4 * lane);
          totals[r] += dot(x[r][c], b[c]);
        }
      if (rows) {
        const float total = sum_of_four(totals, lane), own = total == 0.0f ? 0.0f : 1.0f / total;
        if (lane % 8 == 0) set_a(16 * warp + i + lane / 8, own);
#pragma unroll
        for (int r = 0; r < 4; r++) a[r] = of_lane(own, 8 * r);
      } else {
#pragma unroll
        for (int r = 0; r < 4; r++) a[r] = row_scales[16 * warp + i + r];
      }
#pragma unroll
      for (int r = 0; r < 4; r++)
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
          added[c].x += a[r] * x[r][c].x;
          added[c].y += a[r] * x[r][c].y;
          added[c].z += a[r] * x[r][c].z;
          added[c].w += a[r] * x[r][c].w;
        }
    }
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
      if (columns_too && 128 * c + 4 * lane < padded)
        *reinterpret_cast<float4*>(sums_of_warps + warp * padded + 128 * c + 4 * lane) = added[c];
    __syncthreads();
    if (!columns_too) return;
    for (int j = threadIdx.x; j < padded; j += THREADS) {
      float total = 0.0f;
#pragma unroll
      for (int i = 0; i < WARPS; i++) total += sums_of_warps[i * padded + j];
      leave(j, total);
    }
    join();
  };
#endif

  if (flags & ROWS_FIRST) {
    float top = -INFINITE;
    if (flags & HAS_DUAL) {
      for (int j = lane; j < keys; j += 32)
        if (columns[j] == 0.0f) top = fmaxf(top, LOG2_E * dual[1ll * j * dual_n]);
      top = largest_of_warp(top);
      top = top == -INFINITE ? 0.0f : top;
    }
    __syncthreads();  // all have read what hides keys
    for (int j = threadIdx.x; j < padded; j += THREADS) {
      const bool hidden = columns[j] < 0.0f, starts = flags & HAS_DUAL && !hidden;
      set_b(j, starts ? in_range(exp2_of(LOG2_E * dual[1ll * j * dual_n] - top)) : 1.0f, hidden);
    }
    __syncthreads();
  } else {
    float top = -INFINITE;
    for (int r = 0; r < 2; r++) {
      if (flags & HAS_DUAL && exists[r]) shift[r] += LOG2_E * dual[1ll * row[r] * dual_n];
      if (exists[r]) top = fmaxf(top, shift[r]);
    }
    top = largest_of_warp(top);
    if (lane == 0) row_scales[warp] = top;
    __syncthreads();
    for (int i = 0; i < WARPS; i++) top = fmaxf(top, row_scales[i]);
    if (CLUSTER > 1) {
      if (threadIdx.x == 0) sums_of_columns[padded] = top;
      wait_for_cluster();
      for (int i = 0; i < CLUSTER; i++) top = fmaxf(top, of_block(sums_of_columns + padded, i));
    }
    top = top == -INFINITE ? 0.0f : top;
    __syncthreads();
    for (int r = 0; r < 2; r++) {
      const float a = exists[r] ? exp2_of(shift[r] - top) : 0.0f;
      if (exists[r] && shift[r] != -INFINITE && !(a >= LEAST_B)) *right = 0.0f;
      if (t == 0) set_a(16 * warp + 8 * r + g, a);
    }
    for (int j = threadIdx.x; j < padded; j += THREADS) set_b(j, 1.0f, columns[j] < 0.0f);
    __syncthreads();
  }
  bool rows = flags & ROWS_FIRST;
  for (int left = half_steps; left > 0; left -= 1 + rows, rows = true) close(rows, left > rows);
  for (int j = threadIdx.x; j < padded; j += THREADS)
    if (!(columns[j] == columns[j])) *right = 0.0f;

  // The weights, rounded as the values are, times the values; in bfloat16 b is a factor of the values instead.
  float4 sums[VALUE_DIM / 8] = {};
  const float a[2] = {row_scales[16 * warp + g], row_scales[16 * warp + 8 + g]};
  for (int first = -PART; first < keys; first += PART) {
    Element* own = buffers + (KIND ? first / PART % 2 * BUFFER : 0);
    copies_arrived();
#if KIND == 2
    if (first >= 0) for_elements(VALUE_DIM, flags & WIDE_VALUES, [&](int i, int d, int size) {
      if (first + i >= keys) return;
      for (int e = d; e < d + size; e++) {
        Element& x = own[i * VALUE_PITCH + e];
        x = packed(columns[first + i] * __uint_as_float(static_cast<unsigned>(x) << 16), 0.0f);
      }
    });
#endif
    __syncthreads();
#if KIND == 0
    if (first >= 0) split_all(VALUE_DIM, VALUE_PITCH);
#endif
    if (first + PART < keys)
      read_later(v, first + PART, v_n, v_d, value_dim, VALUE_DIM, VALUE_PITCH, flags & WIDE_VALUES);
    if (first < 0) continue;
#pragma unroll (KIND ? 2 : 1)
    for (int start = 0; start < PART && first + start < padded; start += STEP) {
      const int column = first + start;
#if KIND == 2
      unsigned weights[4];
      load_blocks(weights, strip + lane % 16 * pitch + column + lane / 16 * 8, false);
#else
      float2 own_weights[STEP / 8][2];
#pragma unroll
      for (int i = 0; i < STEP / 8; i++) {
        const float2 b = *reinterpret_cast<const float2*>(columns + column + 8 * i + 2 * t);
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const float2 x = *reinterpret_cast<const float2*>(strip + (8 * r + g) * pitch + column + 8 * i + 2 * t);
          own_weights[i][r] = make_float2(a[r] * (x.x * b.x), a[r] * (x.y * b.y));
        }
      }
#if KIND == 0
      const Rows weights(own_weights[0][0], own_weights[0][1]);
#else
      unsigned weights[4];
#pragma unroll
      for (int i = 0; i < 4; i++) weights[i] = packed(own_weights[i / 2][i % 2].x, own_weights[i / 2][i % 2].y);
#endif
#endif
#pragma unroll
      for (int e = 0; e < VALUE_DIM; e += KIND ? 16 : 8) {
#if KIND == 0
        const int place = (start + 2 * t) * VALUE_PITCH + e + g;
        multiply(sums[e / 8], weights, make_float2(high[place], high[place + VALUE_PITCH]),
                 make_float2(low[place], low[place + VALUE_PITCH]));
#else
        unsigned blocks[4];
        load_blocks(blocks, own + (start + lane % 16) * VALUE_PITCH + e + lane / 16 * 8, true);
        multiply(sums[e / 8], weights, blocks[0], blocks[1]);
        multiply(sums[e / 8 + 1], weights, blocks[2], blocks[3]);
#endif
      }
    }
  }
  // The next launch has the values that are infinite, whose second part is NaN here, or that b made infinite.
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < VALUE_DIM / 8; i++) total += sums[i].x + sums[i].y + (sums[i].z + sums[i].w);
  if (!(fabsf(total) < INFINITE)) *right = 0.0f;
  __syncthreads();
  wait_for_cluster();
  if (rank == 0 && threadIdx.x == 0) {
    bool all = true;
    for (int i = 0; i < CLUSTER; i++) all &= of_block(right, i) == 1.0f;
    done[head] = all;
  }
  const float factor = __int_as_float(factor_bits) * (flags & HAS_FACTORS ? factors[i_b] : 1.0f);
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const float own = KIND == 2 ? factor * a[r] : factor;
#pragma unroll
    for (int i = 0; i < VALUE_DIM / 8; i++) {
      const int e = 8 * i + 2 * t;
      const float first = own * (r ? sums[i].z : sums[i].x), second = own * (r ? sums[i].w : sums[i].y);
      if (!exists[r] || e >= value_dim) continue;
      Element* to = out + (head * queries + row[r]) * value_dim + e;
#if KIND == 0
      const Pair pair = make_float2(first, second);
#else
      const unsigned word = packed(first, second);
      const Pair pair = make_ushort2(word, word >> 16);
#endif
      if (value_dim % 2 == 0) {
        *reinterpret_cast<Pair*>(to) = pair;
      } else {
        to[0] = pair.x;
        if (e + 1 < value_dim) to[1] = pair.y;
      }
    }
  }
  wait_for_cluster();  // others may still read what this block left
}
