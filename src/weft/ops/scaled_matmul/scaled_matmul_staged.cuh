// The main loop of scaled_matmul.cu for tiles of more than 128 rows. Scales of blocks come through the ring,
// too, and a group may compute two halves of 64 rows, one after the other, with one set of sums.
//
// With scales loaded by each thread between two steps, and the products' descriptors computed anew, 64 of the
// 161 instructions of a step are additions. Here they are 64 of 111.
#pragma once

namespace {

// Writes the scales of each step's rows, multiplied by that of the tile's block of b, beside the step's
// stage: those of SCALE_ROWS rows, by warp `part` of SCALE_WARPS. A lane loads one of SCALE_STEPS steps, for
// every eighth row, so that both orders of the scales are read in whole sectors.
__device__ __forceinline__ void produce_scales(const ScaledArguments& arguments, Pipeline<STAGES> pipeline,
                                               unsigned scales, int part) {
  RingPosition<STAGES> ring;
  const Scale &of_a = arguments.scale_a, &of_b = arguments.scale_b;
  const int lane = threadIdx.x % 32, own_step = lane % SCALE_STEPS;
  const int own_row = part * SCALE_ROWS + lane / SCALE_STEPS;
  for_each_unit(arguments, [&](const Unit& unit) {
    const int block = min(unit.column, arguments.columns - 1) / SCALE_BLOCK;
    for (int first = unit.first; first < unit.end; first += SCALE_STEPS) {
      const int step = min(first + own_step, unit.end - 1);
      const float factor_b = scale_at(of_b, step, block);
      float factors[SCALE_ROWS / 8];
#pragma unroll
      for (int i = 0; i < SCALE_ROWS / 8; ++i)
        factors[i] = scale_at(of_a, min(unit.row + own_row + i * 8, arguments.rows - 1), step);
#pragma unroll
      for (int i = 0; i < SCALE_ROWS / 8; ++i) factors[i] *= factor_b;
      for (int at = 0; at < SCALE_STEPS && first + at < unit.end; ++at, ring.next()) {
        wait(pipeline.empty(ring.stage), ring.parity ^ 1);
        if (at == own_step)
#pragma unroll
          for (int i = 0; i < SCALE_ROWS / 8; ++i)
            store_word(scales + ring.stage * SCALES_BYTES + (own_row + i * 8) * 4,
                       __float_as_uint(factors[i]));
        __syncwarp();
        if (lane == 0) mbarrier_arrive(pipeline.full(ring.stage));
      }
    }
  });
}

struct StagedSum {
  float (&total)[HALVES][BN / 2];
  const Pipeline<STAGES> pipeline;
  RingPosition<STAGES>& ring;
  const unsigned long long a, b;    // descriptors of the group's rows, and of b, in the first stage
  const unsigned factors_at;        // of the thread's first row there

  // Multiplies this step's 64 rows, and adds their sums. The products' descriptors are one addition each:
  // between two steps the tensor cores would wait for a longer computation.
  __device__ __forceinline__ void add(float (&sums)[BN / 2], int half) {
    const int stage = ring.stage;
    const unsigned long long a_half = advance(a, stage * STAGE_BYTES + half * 64 * BK);
    const unsigned long long b_stage = advance(b, stage * STAGE_BYTES);
    if (half == 0) pipeline.wait_full(ring);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < BK / 32; ++k) {
      constexpr int STEP_BYTES = K_STEP_BYTES<K_MAJOR>;
      WgmmaFp8<A_TYPE, B_TYPE, BN>::run(sums, advance(a_half, k * STEP_BYTES),
                                        advance(b_stage, k * STEP_BYTES), k > 0);
    }
    wgmma_commit();
    float factors[2];  // of the thread's two rows
    if constexpr (BLOCK_SCALES)
#pragma unroll
      for (int row = 0; row < 2; ++row)
        factors[row] = __uint_as_float(
            load_word(factors_at + stage * SCALES_BYTES + (half * 64 + row * 8) * 4));
    if (half == HALVES - 1) ring.next();
    wgmma_wait<0>();
    if (half == HALVES - 1) pipeline.release_by_lanes<CLUSTER>(stage);
#pragma unroll
    for (int i = 0; i < BN / 2; ++i) {
      if constexpr (BLOCK_SCALES) total[half][i] += factors[i / 2 % 2] * sums[i];
      else total[half][i] += sums[i];
    }
  }
};

// The descriptor from a shuffle, which the compiler does not compute again before each step.
__device__ __forceinline__ unsigned long long kept(unsigned long long descriptor) {
  return (descriptor >> 32 << 32) | (unsigned)__shfl_sync(0xffffffff, (int)descriptor, 0);
}

__device__ __forceinline__ void multiply_staged(float (&total)[HALVES][BN / 2], const Unit& unit, int group,
                                                Pipeline<STAGES> pipeline, RingPosition<STAGES>& ring,
                                                unsigned stages) {
#pragma unroll
  for (int i = 0; i < HALVES * BN / 2; ++i) total[i / (BN / 2)][i % (BN / 2)] = 0.0f;
  const int row = group * HALVES * 64 + accumulator_row(threadIdx.x % GROUP_THREADS, 0);
  StagedSum sum{total, pipeline, ring, kept(descriptor<K_MAJOR>(stages + group * HALVES * 64 * BK)),
                kept(descriptor<K_MAJOR>(stages + A_BYTES)), stages + SCALES_AT + row * 4};
  float sums[BN / 2];
  for (int step = unit.first; step < unit.end; ++step)
#pragma unroll
    for (int half = 0; half < HALVES; ++half) sum.add(sums, half);
}

}  // namespace
