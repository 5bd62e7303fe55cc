// Programs of scaled_matmul.cu with STAGED: the scales of blocks come through the ring, too, and a group may
// compute two halves of 64 rows, one after the other, or take turns with the other group.
//
// Before this, each thread loaded its scales from global memory between two steps, and computed the products'
// descriptors anew: of the 161 instructions of a step 64 are additions. Here they are 111, of which 64.
#pragma once

namespace {

constexpr int TURN_BARRIER = 4;  // of group 0; the next is group 1's. The first three are those of buffers

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

// With STAGED: the products of a step's 64 rows (a part), from their issue to their addition.
struct StagedPart {
  int stage;
  float factors[2];  // of the thread's two rows
};

struct StagedSum {
  float (&total)[HALVES][BN / 2];
  const int group;
  const Pipeline<STAGES> pipeline;
  RingPosition<STAGES>& ring;       // of the next part to issue
  const unsigned long long a, b;    // descriptors of the group's rows, and of b, in the first stage
  const unsigned factors_at;        // of the thread's first row there

  // Issues the next part's products into `sums`. Their descriptors are one addition each: between two steps
  // the tensor cores would wait for a longer computation.
  __device__ __forceinline__ StagedPart issue(float (&sums)[BN / 2], int half) {
    StagedPart part{ring.stage, {}};
    const unsigned stage_bytes = ring.stage * STAGE_BYTES;
    const unsigned long long a_half = advance(a, stage_bytes + half * 64 * BK);
    const unsigned long long b_stage = advance(b, stage_bytes);
    if (half == 0) pipeline.wait_full(ring);
    if constexpr (PINGPONG) named_barrier(TURN_BARRIER + group, 2 * GROUP_THREADS);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < BK / 32; ++k) {
      // The last product is a group of its own, which runs while the turn goes to the other group.
      if (PINGPONG && k == BK / 32 - 1) wgmma_commit();
      constexpr int STEP_BYTES = K_STEP_BYTES<K_MAJOR>;
      WgmmaFp8<A_TYPE, B_TYPE, BN>::run(sums, advance(a_half, k * STEP_BYTES),
                                        advance(b_stage, k * STEP_BYTES), k > 0);
    }
    wgmma_commit();
    if constexpr (BLOCK_SCALES)
#pragma unroll
      for (int row = 0; row < 2; ++row)
        part.factors[row] = __uint_as_float(
            load_word(factors_at + ring.stage * SCALES_BYTES + (half * 64 + row * 8) * 4));
    if (half == HALVES - 1) ring.next();
    return part;
  }

  // Waits until at most PENDING younger parts run, and adds this one's sums.
  template <int PENDING>
  __device__ __forceinline__ void add(const float (&sums)[BN / 2], const StagedPart& part, int half) {
    if constexpr (PINGPONG) {
      wgmma_wait<1>();
      named_barrier_arrive(TURN_BARRIER + 1 - group, 2 * GROUP_THREADS);
    }
    wgmma_wait<PENDING>();
    if (half == HALVES - 1) pipeline.release_by_lanes<CLUSTER>(part.stage);
#pragma unroll
    for (int i = 0; i < BN / 2; ++i) {
      if constexpr (BLOCK_SCALES) total[half][i] += part.factors[i / 2 % 2] * sums[i];
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
  StagedSum sum{total, group, pipeline, ring, kept(descriptor<K_MAJOR>(stages + group * HALVES * 64 * BK)),
                kept(descriptor<K_MAJOR>(stages + A_BYTES)), stages + SCALES_AT + row * 4};
  float first[BN / 2];
  if constexpr (SETS == 1) {
    for (int step = unit.first; step < unit.end; ++step)
#pragma unroll
      for (int half = 0; half < HALVES; ++half) sum.add<0>(first, sum.issue(first, half), half);
  } else {
    float second[BN / 2];
    StagedPart first_part = sum.issue(first, 0), second_part;
    int step = unit.first;
    for (; step + 2 < unit.end; step += 2) {
      second_part = sum.issue(second, 0);
      sum.add<1>(first, first_part, 0);
      first_part = sum.issue(first, 0);
      sum.add<1>(second, second_part, 0);
    }
    if (step + 1 < unit.end) {
      second_part = sum.issue(second, 0);
      sum.add<1>(first, first_part, 0);
      sum.add<0>(second, second_part, 0);
    } else {
      sum.add<0>(first, first_part, 0);
    }
  }
}

}  // namespace
