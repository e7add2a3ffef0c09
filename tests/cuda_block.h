// CUDA for one cluster of blocks of threads at a time on a CPU, as far as resident.cu needs it: a thread is a fiber
// that runs until it waits for others.

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __forceinline__
#define __launch_bounds__(...)
#define __shared__
#define OF_CLUSTER

struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(4) ushort2 { unsigned short x, y; };
struct Place { unsigned x; };
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static ushort2 make_ushort2(unsigned short x, unsigned short y) { return {x, y}; }
static int max(int x, int y) { return x < y ? y : x; }
template <typename To, typename From> static To bits(From x) { To y; memcpy(&y, &x, sizeof y); return y; }
static unsigned __float_as_uint(float x) { return bits<unsigned>(x); }
static float __uint_as_float(unsigned x) { return bits<float>(x); }
static float __int_as_float(int x) { return bits<float>(x); }

constexpr int AFTER = 1 << 17;  // bytes that nothing may write
constexpr int FIBERS = 32 * WARPS * CLUSTER;
alignas(16) static float4 all_shared[CLUSTER][(SHARED + AFTER) / 16];
static float4* shared;  // of the block of the thread that runs
static Place threadIdx, blockIdx;
static ucontext_t scheduler, fibers[FIBERS];
static unsigned left_by[FIBERS][8];  // what a thread hands to its warp
static std::vector<bool> ended(FIBERS);

static void demand(bool holds) {
  if (!holds) abort();
}
static bool is_aligned(const void* p) { return reinterpret_cast<unsigned long long>(p) % 16 == 0; }

static int rank() { return blockIdx.x % CLUSTER; }
static unsigned own_fiber() { return 32 * WARPS * rank() + threadIdx.x; }

static void go_on(unsigned fiber, unsigned cluster) {
  threadIdx.x = fiber % (32 * WARPS);
  blockIdx.x = CLUSTER * cluster + fiber / (32 * WARPS);
  shared = all_shared[rank()];
}

static void wait() {
  unsigned own = own_fiber(), cluster = blockIdx.x / CLUSTER;
  swapcontext(&fibers[own], &scheduler);
  go_on(own, cluster);
}

struct Barrier {
  int arrived, generation;
  void pass(int all) {
    int own = generation;
    if (++arrived == all) arrived = 0, generation++;
    while (own == generation) wait();
  }
};
static Barrier of_blocks[CLUSTER], of_all;

static void __syncthreads() { of_blocks[rank()].pass(32 * WARPS); }
static void wait_for_cluster() { of_all.pass(FIBERS); }
static float of_block(const float* p, int other) {
  for (int i = 0; i < 32 * WARPS; i++) demand(!ended[32 * WARPS * other + i]);
  return *reinterpret_cast<const float*>(reinterpret_cast<const char*>(p) - reinterpret_cast<const char*>(shared) +
                                         reinterpret_cast<const char*>(all_shared[other]));
}

static float exp2_of(float x) { return exp2f(x) < 0x1p-126f ? 0.0f : exp2f(x); }
static void copy_later(void* to, const void* from, bool exists) {
  demand(is_aligned(to) && is_aligned(from));
  exists ? memcpy(to, from, 16) : memset(to, 0, 16);
}
static void copies_arrived() {}

// Runs `use` once all lanes of the warp have left their words; they pass the same such places in the same order.
template <typename Use> static void together(const unsigned* words, int count, Use use) {
  memcpy(left_by[own_fiber()], words, 4 * count);
  wait();
  use(left_by + own_fiber() / 32 * 32);
  wait();
}

static float of_lane(float x, int lane) {
  unsigned word = __float_as_uint(x);
  float other = 0.0f;
  together(&word, 1, [&](unsigned (*warp)[8]) { other = __uint_as_float(warp[lane][0]); });
  return other;
}
static float exchanged(float x, int distance) { return of_lane(x, threadIdx.x % 32 ^ distance); }
static bool any_of_warp(bool x) {
  unsigned word = x, any = 0;
  together(&word, 1, [&](unsigned (*warp)[8]) { for (int i = 0; i < 32; i++) any |= warp[i][0]; });
  return any;
}

static float number(unsigned bits, int part) {  // of an operand of the tensor cores
#if KIND == 0
  return __uint_as_float(bits & 0xffffe000u);
#elif KIND == 1
  return static_cast<float>(::bits<_Float16>(static_cast<unsigned short>(bits >> 16 * part)));
#else
  return __uint_as_float((bits >> 16 * part) << 16);
#endif
}

static void multiply(float4& c, const unsigned (&a)[4], unsigned b0, unsigned b1) {
  unsigned words[6] = {a[0], a[1], a[2], a[3], b0, b1};
  together(words, 6, [&](unsigned (*warp)[8]) {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    float* out[2][2] = {{&c.x, &c.y}, {&c.z, &c.w}};
    for (int i = 0; i < 2; i++)
      for (int j = 0; j < 2; j++)
        for (int step = 0; step < 2; step++)
          for (int lane = 0; lane < 4; lane++)
            for (int part = 0; part < (KIND ? 2 : 1); part++)
              *out[i][j] += number(warp[4 * g + lane][2 * step + i], part) *
                            number(warp[4 * (2 * t + j) + lane][4 + step], part);
  });
}

#if KIND != 0
static unsigned rounded(float x) {
#if KIND == 1
  return bits<unsigned short>(static_cast<_Float16>(x));
#else
  unsigned word = __float_as_uint(x);
  return x == x ? (word + 0x7fffu + (word >> 16 & 1)) >> 16 : 0x7fffu;
#endif
}
static unsigned packed(float first, float second) { return rounded(first) | rounded(second) << 16; }
static void load_blocks(unsigned (&to)[4], const unsigned short* row, bool turned) {
  demand(is_aligned(row));
  unsigned long long place = reinterpret_cast<unsigned long long>(row);
  unsigned words[2] = {static_cast<unsigned>(place), static_cast<unsigned>(place >> 32)};
  together(words, 2, [&](unsigned (*warp)[8]) {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    auto at = [&](int block, int i, int j) {
      unsigned* own = warp[8 * block + i];
      unsigned long long p = own[0] | static_cast<unsigned long long>(own[1]) << 32;
      return static_cast<unsigned>(reinterpret_cast<const unsigned short*>(p)[j]);
    };
    for (int i = 0; i < 4; i++)
      to[i] = turned ? at(i, 2 * t, g) | at(i, 2 * t + 1, g) << 16 : at(i, g, 2 * t) | at(i, g, 2 * t + 1) << 16;
  });
}
#endif

#define EMULATED
#include SOURCE

static void (*body)();
static void run_fiber() {
  body();
  ended[own_fiber()] = true;
  wait();
}

// All threads of each of `clusters` clusters.
static void run_clusters(int clusters, void (*of_thread)()) {
  std::vector<std::vector<char>> stacks(FIBERS, std::vector<char>(1 << 16));
  body = of_thread;
  for (int cluster = 0; cluster < clusters; cluster++) {
    ended.assign(FIBERS, false);
    of_all = {};
    for (int i = 0; i < CLUSTER; i++) {
      of_blocks[i] = {};
      memset(all_shared[i], 0xff, SHARED);  // NaN where nothing was written
      memset(reinterpret_cast<char*>(all_shared[i]) + SHARED, 0x55, AFTER);
    }
    for (int i = 0; i < FIBERS; i++) {
      getcontext(&fibers[i]);
      fibers[i].uc_stack.ss_sp = stacks[i].data();
      fibers[i].uc_stack.ss_size = stacks[i].size();
      makecontext(&fibers[i], run_fiber, 0);
    }
    int held_up = 0;  // a bit of some warps, for a while: what no barrier orders comes in any order
    for (int running = FIBERS, round = 0; running; round++) {
      if (round % 16 == 0) held_up = rand();
      running = 0;
      for (int i = 0; i < FIBERS; i++) {
        running += !ended[i];
        if (ended[i] || held_up >> i / 32 % 31 & 1) continue;
        go_on(i, cluster);
        swapcontext(&scheduler, &fibers[i]);
      }
    }
    for (int i = 0; i < CLUSTER; i++)
      for (int j = 0; j < AFTER; j++)
        demand(reinterpret_cast<unsigned char*>(all_shared[i])[SHARED + j] == 0x55);
  }
}

constexpr int NUMBERS = 31;
static void* pointers[9];
static int numbers[NUMBERS];

template <int... I> static void thread(std::integer_sequence<int, I...>) {
  auto floats = [](int i) { return static_cast<const float*>(pointers[i]); };
  auto elements = [](int i) { return static_cast<const Element*>(pointers[i]); };
  resident(elements(0), elements(1), elements(2), static_cast<const unsigned char*>(pointers[3]), floats(4), floats(5),
           floats(6), static_cast<Element*>(pointers[7]), static_cast<int*>(pointers[8]), numbers[I]...);
}

extern "C" void run(int clusters, void* const* of_call, const int* numbers_of_call) {
  memcpy(pointers, of_call, sizeof pointers);
  memcpy(numbers, numbers_of_call, sizeof numbers);
  run_clusters(clusters, [] { thread(std::make_integer_sequence<int, NUMBERS>()); });
}
