// CUDA for one block of threads at a time on a CPU, as far as resident.cu needs it: a thread is a fiber that runs
// until it waits for others.

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

struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct uint2 { unsigned x, y; };
struct ushort2 { unsigned short x, y; };
struct Place { unsigned x; };
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static ushort2 make_ushort2(unsigned short x, unsigned short y) { return {x, y}; }
template <typename To, typename From> static To bits(From x) { To y; memcpy(&y, &x, sizeof y); return y; }
static unsigned __float_as_uint(float x) { return bits<unsigned>(x); }
static float __uint_as_float(unsigned x) { return bits<float>(x); }
static float __int_as_float(int x) { return bits<float>(x); }

constexpr int AFTER = 1 << 17;  // bytes that nothing may write
alignas(16) static float4 shared[(SHARED + AFTER) / 16];
static Place threadIdx, blockIdx;
static ucontext_t scheduler, fibers[32 * WARPS];
static unsigned left_by[32 * WARPS][8];  // what a thread hands to its warp
static int arrived, generation;

static void wait() {
  unsigned own = threadIdx.x;
  swapcontext(&fibers[own], &scheduler);
  threadIdx.x = own;
}

static void __syncthreads() {
  int own = generation;
  if (++arrived == 32 * WARPS) arrived = 0, generation++;
  while (own == generation) wait();
}

static float exp2_of(float x) { return exp2f(x) < 0x1p-126f ? 0.0f : exp2f(x); }
static void copy_later(void* to, const void* from, bool exists) { exists ? memcpy(to, from, 16) : memset(to, 0, 16); }
static void forget() {}
static void copies_arrived() {}

// Runs `use` once all lanes of the warp have left their words; they pass the same such places in the same order.
template <typename Use> static void together(const unsigned* words, int count, Use use) {
  memcpy(left_by[threadIdx.x], words, 4 * count);
  wait();
  use(left_by + threadIdx.x / 32 * 32);
  wait();
}

static float exchanged(float x, int distance) {
  unsigned word = __float_as_uint(x), lane = threadIdx.x % 32;
  float other = 0.0f;
  together(&word, 1, [&](unsigned (*warp)[8]) { other = __uint_as_float(warp[lane ^ distance][0]); });
  return other;
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
static uint2 turned(const unsigned short* row) {
  unsigned long long place = reinterpret_cast<unsigned long long>(row);
  unsigned words[2] = {static_cast<unsigned>(place), static_cast<unsigned>(place >> 32)};
  uint2 pair;
  together(words, 2, [&](unsigned (*warp)[8]) {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    auto at = [&](int i) {
      unsigned long long p = warp[i][0] | static_cast<unsigned long long>(warp[i][1]) << 32;
      return static_cast<unsigned>(reinterpret_cast<const unsigned short*>(p)[g]);
    };
    pair = {at(2 * t) | at(2 * t + 1) << 16, at(8 + 2 * t) | at(9 + 2 * t) << 16};
  });
  return pair;
}
#endif

#define EMULATED
#include SOURCE

static void (*body)();
static std::vector<bool>* ended;
static void run_fiber() {
  body();
  (*ended)[threadIdx.x] = true;
  wait();
}

// All threads of each of `blocks` blocks.
static void run_blocks(int blocks, void (*of_thread)()) {
  std::vector<std::vector<char>> stacks(THREADS, std::vector<char>(1 << 16));
  body = of_thread;
  for (blockIdx.x = 0; blockIdx.x < static_cast<unsigned>(blocks); blockIdx.x++) {
    std::vector<bool> done(THREADS, false);
    ended = &done;
    arrived = generation = 0;
    unsigned char* after = reinterpret_cast<unsigned char*>(shared) + SHARED;
    memset(shared, 0xff, SHARED);  // NaN where nothing was written
    memset(after, 0x55, AFTER);
    for (int i = 0; i < THREADS; i++) {
      getcontext(&fibers[i]);
      fibers[i].uc_stack.ss_sp = stacks[i].data();
      fibers[i].uc_stack.ss_size = stacks[i].size();
      makecontext(&fibers[i], run_fiber, 0);
    }
    for (int running = THREADS; running;) {
      running = 0;
      for (int i = 0; i < THREADS; i++) {
        if (done[i]) continue;
        threadIdx.x = i;
        swapcontext(&scheduler, &fibers[i]);
        running += !done[i];
      }
    }
    for (int i = 0; i < AFTER; i++)
      if (after[i] != 0x55) abort();
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

extern "C" void run(int blocks, void* const* of_call, const int* numbers_of_call) {
  memcpy(pointers, of_call, sizeof pointers);
  memcpy(numbers, numbers_of_call, sizeof numbers);
  run_blocks(blocks, [] { thread(std::make_integer_sequence<int, NUMBERS>()); });
}
