// Convolution as an implicit product by Hopper's tensor cores (wgmma, sm_90a): float16 and bfloat16, summed
// in float32. c (outputs x pixels) = a (outputs x K) b (K x pixels), K = (window's row and column, channel).
//
// x has adjacent channels (images, height, width, channels): 64 channels of a pixel are 128 bytes, a row of a
// K-major operand, and the copy engine moves a box of `wide` pixels of a row of the image to any place, with
// zeros outside. A tile is `tall` rows of `wide` pixels, a multiple of 8. For a column of the window its tile
// and the rows below are loaded once, and serve all rows of the window from another row of the tile: whole
// atoms of 8 pixels further on. With POINTWISE (a window of one place) x has adjacent pixels as it comes: b
// is then MN-major, 64 pixels by 64 channels a box.
//
// Persistent blocks of three warp groups. A thread of group 0 fills two rings: tiles of b, and of the weights
// (OUT x 64 for each place of the window). Groups 1 and 2 have 64 outputs each of the same BN pixels, or with
// PIXEL_GROUPS 2 the same 64 outputs of BN pixels each. A step takes KSTEPS times 16 channels.
// Bytes of a step and SM: 64 outputs x 2 x 128 of the weights, and b's tile (1 + (R - 1) / tall) / R times.
#include "hopper/barrier.cuh"
#include "hopper/warp_roles.cuh"
#include "hopper/wgmma.cuh"
#include "hopper/wgmma_pixel_shapes.cuh"
#include "numeric.cuh"

#ifndef BN
#define BN 224
#define PIXEL_GROUPS 1
#define POINTWISE 0
#define KSTEPS 4
#endif

using namespace hopper;

#ifndef WEFT_CONV2D_PTX  // which an emulator defines
// 16 bytes in one access: the compiler splits the store of a structure.
__device__ __forceinline__ uint4 load_16(unsigned from) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from) : "memory");
  return v;
}
__device__ __forceinline__ void store_16(void* to, uint4 v) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
#endif

namespace {

using T = WEFT_T;
constexpr int CONSUMERS = 2, THREADS = GROUP_THREADS * (1 + CONSUMERS);
constexpr int CHUNK = 64;  // channels of a box
constexpr int OUT = PIXEL_GROUPS == 2 ? 64 : 128, B_MAJOR = POINTWISE ? MN_MAJOR : K_MAJOR;
constexpr int B_ROWS = POINTWISE ? BN : PIXEL_GROUPS == 2 ? 576 : 336;  // pixels that a stage has room for
constexpr int A_BYTES = OUT * 128, B_BYTES = B_ROWS * 128;
constexpr int A_STAGES = 4, B_STAGES = POINTWISE ? 4 : PIXEL_GROUPS == 2 ? 2 : 3;
constexpr int PART = 64, PARTS = (BN + PART - 1) / PART;  // pixels of a buffer; buffers of a tile
constexpr int BUFFER_BYTES = 64 * PART * 2;               // 64 outputs
constexpr int B_AT = A_STAGES * A_BYTES, BUFFERS_AT = B_AT + B_STAGES * B_BYTES;
constexpr int BARRIERS_AT = BUFFERS_AT + CONSUMERS * 2 * BUFFER_BYTES;
constexpr int SHARED_BYTES = BARRIERS_AT + Pipeline<A_STAGES>::BYTES + Pipeline<B_STAGES>::BYTES;
constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;
static_assert(SHARED_BYTES <= 227 << 10, "too much shared memory");
static_assert(!POINTWISE || (PIXEL_GROUPS == 1 && BN % 64 == 0), "boxes of 64 pixels, for both groups");

}  // namespace

struct alignas(64) ConvArguments {
  TensorMap x;       // (images, height, width, channels), or with POINTWISE (1, images, channels, pixels)
  TensorMap weight;  // (places of the window * outputs, channels)
  T* y;              // (images, outputs, rows, columns) contiguous
  int outputs, rows, columns;  // with POINTWISE one row
  int tall, wide;              // of a group's pixels
  int down, across, output_blocks, units;
  int window_rows, window_columns, padding, chunks;
  int row_group;  // rows of the window that a tile of b serves
};

namespace {

struct Unit { int image, output, row, column; };

// Calls `body` with each unit of this block. Neighbours have the same pixels and other outputs.
template <typename Body>
__device__ __forceinline__ void for_each_unit(const ConvArguments& arguments, Body body) {
  for (int index = blockIdx.x; index < arguments.units; index += gridDim.x) {
    const int pixels = index / arguments.output_blocks, output = index % arguments.output_blocks;
    const int line = pixels / arguments.across, column = pixels % arguments.across;
    const int image = line / arguments.down, row = line % arguments.down;
    body(Unit{image, output * OUT, row * PIXEL_GROUPS * arguments.tall, column * arguments.wide});
  }
}

// Calls `body` with each tile of b: a chunk of channels, a column of the window, and rows of it from `first`
// on, `count` of them.
template <typename Body>
__device__ __forceinline__ void for_each_tile(const ConvArguments& arguments, Body body) {
#pragma unroll 1
  for (int chunk = 0; chunk < arguments.chunks; ++chunk)
#pragma unroll 1
    for (int column = 0; column < arguments.window_columns; ++column)
#pragma unroll 1
      for (int first = 0; first < arguments.window_rows; first += arguments.row_group)
        body(chunk, column, first, min(arguments.row_group, arguments.window_rows - first));
}

__device__ __forceinline__ void produce(const ConvArguments& arguments, Pipeline<A_STAGES> a_pipeline,
                                        Pipeline<B_STAGES> b_pipeline, unsigned memory_at) {
  RingPosition<A_STAGES> a_ring;
  RingPosition<B_STAGES> b_ring;
  tma_prefetch(&arguments.x);
  tma_prefetch(&arguments.weight);
  const int row_bytes = arguments.wide * 128, padding = arguments.padding;
  for_each_unit(arguments, [&](const Unit& unit) {
    for_each_tile(arguments, [&](int chunk, int column, int first, int count) {
      const unsigned b_at = memory_at + B_AT + b_ring.stage * B_BYTES, full = b_pipeline.full(b_ring.stage);
      if constexpr (POINTWISE) {
        b_pipeline.begin_fill(b_ring, B_BYTES);
#pragma unroll
        for (int block = 0; block < BN / 64; ++block)
          tma_load(b_at + block * BLOCK_BYTES, &arguments.x, unit.column + block * 64, chunk * CHUNK,
                   unit.image, 0, full);
      } else {
        const int lines = PIXEL_GROUPS * arguments.tall + count - 1;
        b_pipeline.begin_fill(b_ring, lines * row_bytes);
#pragma unroll 1
        for (int line = 0; line < lines; ++line)
          tma_load(b_at + line * row_bytes, &arguments.x, chunk * CHUNK, unit.column + column - padding,
                   unit.row + first + line - padding, unit.image, full);
      }
      b_ring.next();
#pragma unroll 1
      for (int row = first; row < first + count; ++row, a_ring.next()) {
        const int place = row * arguments.window_columns + column;
        a_pipeline.begin_fill(a_ring, A_BYTES);
        // Rows beyond the last output are those of the next place: their products are not stored.
        tma_load(memory_at + a_ring.stage * A_BYTES, &arguments.weight, chunk * CHUNK,
                 place * arguments.outputs + unit.output, a_pipeline.full(a_ring.stage));
      }
    });
  });
}

// Writes the group's 64 outputs of BN pixels to `sums`, and leaves both rings behind their last stages.
__device__ __forceinline__ void multiply(float (&sums)[BN / 2], const ConvArguments& arguments, int group,
                                         Pipeline<A_STAGES> a_pipeline, RingPosition<A_STAGES>& a_ring,
                                         Pipeline<B_STAGES> b_pipeline, RingPosition<B_STAGES>& b_ring,
                                         unsigned memory_at) {
  const bool releases = threadIdx.x % 32 == 0;
  const unsigned a_first = memory_at + (PIXEL_GROUPS == 2 ? 0 : group * BLOCK_BYTES);
  const int row_bytes = arguments.wide * 128;
  const unsigned b_first = memory_at + B_AT + (PIXEL_GROUPS == 2 ? group * arguments.tall * row_bytes : 0);
  int a_previous = -1, b_previous = -1, accumulate = 0;
  for_each_tile(arguments, [&](int, int, int, int count) {
    b_pipeline.wait_full(b_ring);
#pragma unroll 1
    for (int row = 0; row < count; ++row) {
      const unsigned a_at = a_first + a_ring.stage * A_BYTES;
      const unsigned b_at = b_first + b_ring.stage * B_BYTES + row * row_bytes;
      a_pipeline.wait_full(a_ring);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < KSTEPS; ++k) {
        Wgmma<T, K_MAJOR, B_MAJOR, BN>::run(
            sums, descriptor<K_MAJOR>(a_at + k * K_STEP_BYTES<K_MAJOR>),
            descriptor<B_MAJOR>(b_at + k * K_STEP_BYTES<B_MAJOR>), accumulate);
        accumulate = 1;
      }
      wgmma_commit();
      // The products of this step run on; those of the step before have read their stages.
      wgmma_wait<1>();
      if (releases && a_previous >= 0) a_pipeline.release(a_previous);
      if (releases && row == 0 && b_previous >= 0) b_pipeline.release(b_previous);
      a_previous = a_ring.stage;
      a_ring.next();
    }
    b_previous = b_ring.stage;
    b_ring.next();
  });
  wgmma_wait<0>();
  if (releases) a_pipeline.release(a_previous), b_pipeline.release(b_previous);
}

// Stores the group's outputs: rounded into a buffer with 64 pixels of each, and from it 16 bytes a lane. Two
// buffers by turns, also across tiles, need one barrier each: a thread writes a buffer again behind the
// barrier of the other one, which all threads pass after their reads.
__device__ __forceinline__ void store(const float (&sums)[BN / 2], const ConvArguments& arguments, int group,
                                      Unit unit, unsigned buffers, unsigned& turn) {
  const int thread = threadIdx.x % GROUP_THREADS, lane = thread % 32, warp = thread / 32;
  const int tall = arguments.tall, wide = arguments.wide, columns = arguments.columns;
  if (PIXEL_GROUPS == 2) unit.row += group * tall;
  else unit.output += group * 64;
  const long long area = (long long)arguments.rows * columns;
  T* const y = arguments.y + ((long long)unit.image * arguments.outputs + unit.output) * area;
  const int outputs = arguments.outputs - unit.output;
#pragma unroll
  for (int part = 0; part < PARTS; ++part) {
    const unsigned buffer = buffers + turn * BUFFER_BYTES;
    turn ^= 1;
    const int matrix_row = warp * 16 + lane % 16;  // which lane l gives the address of, l / 16 chunks on
#pragma unroll
    for (int pair = 0; pair < PART / 16; ++pair) {
      if (part * PART + pair * 16 >= BN) continue;
      unsigned words[4];
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        const int i = (part * PART + pair * 16) / 2 + word * 2;
        words[word] = rounded_pair<T>(sums[i], sums[i + 1]);
      }
      const int chunk = (pair * 2 + lane / 16) ^ (matrix_row & 7);
      store_matrices(buffer + matrix_row * 128 + chunk * 16, words[0], words[1], words[2], words[3]);
    }
    named_barrier(1 + group, GROUP_THREADS);
    const bool whole = columns % 8 == 0;  // each 8 pixels are 16 aligned bytes
    const int pixel = part * PART + (whole ? thread % 8 * 8 : lane * 2);
    const int row = unit.row + pixel / wide, column = unit.column + pixel % wide;
    if (pixel >= tall * wide || row >= arguments.rows || column >= columns) continue;
    T* const to = y + (long long)row * columns + column;
    if (whole) {
#pragma unroll
      for (int output = thread / 8; output < 64; output += GROUP_THREADS / 8)
        if (output < outputs)
          store_16(to + output * area, load_16(buffer + output * 128 + ((thread % 8 ^ (output & 7)) << 4)));
    } else {
#pragma unroll 4
      for (int output = warp; output < 64; output += 4) {
        const int chunk = lane / 4 ^ (output & 7);
        const unsigned word = load_word(buffer + output * 128 + chunk * 16 + lane % 4 * 4);
        T two[2];
        memcpy(two, &word, 4);
        if (output < outputs) to[output * area] = two[0];
        if (output < outputs && column + 1 < columns) to[output * area + 1] = two[1];
      }
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    conv2d(const __grid_constant__ ConvArguments arguments) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const unsigned memory_at = shared_address(memory);
  const Pipeline<A_STAGES> a_pipeline{memory_at + BARRIERS_AT};
  const Pipeline<B_STAGES> b_pipeline{memory_at + BARRIERS_AT + Pipeline<A_STAGES>::BYTES};
  if (threadIdx.x == 0) {
    a_pipeline.init(CONSUMERS * 4);
    b_pipeline.init(CONSUMERS * 4);
  }
  __syncthreads();
  const int role = group_index();
  if (role == 0) {
    registers_decrease<PRODUCER_REGISTERS>();
    if (is_issuer()) produce(arguments, a_pipeline, b_pipeline, memory_at);
  } else {
    registers_increase<CONSUMER_REGISTERS>();
    const int group = role - 1;
    const unsigned buffers = memory_at + BUFFERS_AT + group * 2 * BUFFER_BYTES;
    RingPosition<A_STAGES> a_ring;
    RingPosition<B_STAGES> b_ring;
    unsigned turn = 0;
    for_each_unit(arguments, [&](const Unit& unit) {
      float sums[BN / 2];
      multiply(sums, arguments, group, a_pipeline, a_ring, b_pipeline, b_ring, memory_at);
      store(sums, arguments, group, unit, buffers, turn);
    });
  }
}
