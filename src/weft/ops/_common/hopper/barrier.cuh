// Pipelines of stages in shared memory, each with a full and an empty barrier.
//
// A producer waits until a stage is empty, announces the bytes of its copies on the full barrier and issues
// them. Consumers wait until it is full, use it, and arrive at the empty barrier.
#pragma once
#include "ptx.cuh"

namespace hopper {

// Position in a ring of COUNT stages. `parity` is that of the phase that a consumer waits for.
template <int COUNT> struct RingPosition {
  int stage = 0;
  unsigned parity = 0;

  __device__ __forceinline__ void next() {
    if (++stage == COUNT) stage = 0, parity ^= 1;
  }

  __device__ __forceinline__ void skip(int steps) {
    const int to = stage + steps;
    parity ^= to / COUNT & 1;
    stage = to % COUNT;
  }
};

__device__ __forceinline__ void wait(unsigned mbarrier, unsigned parity) {
  while (!mbarrier_try_wait(mbarrier, parity)) {
  }
}

// Barriers of a pipeline; `at` is the address of 2 * COUNT * 8 bytes of shared memory.
template <int COUNT> struct Pipeline {
  unsigned at;

  static constexpr int BYTES = 2 * COUNT * 8;

  __device__ __forceinline__ unsigned full(int stage) const { return at + stage * 8; }
  __device__ __forceinline__ unsigned empty(int stage) const { return at + (COUNT + stage) * 8; }

  // One thread calls it, before a barrier of the block. `consumers`: arrivals that free a stage. `producers`:
  // arrivals that fill it beside the bytes of copies.
  __device__ __forceinline__ void init(unsigned consumers, unsigned producers = 1) const {
    for (int stage = 0; stage < COUNT; ++stage) {
      mbarrier_init(full(stage), producers);
      mbarrier_init(empty(stage), consumers);
    }
    fence_mbarrier_init();
  }

  // Producer: waits for the stage and announces `bytes`. In a fresh barrier the phase before the first counts
  // as complete, so that the opposite parity lets the first round pass.
  __device__ __forceinline__ void begin_fill(const RingPosition<COUNT>& position, unsigned bytes) const {
    wait(empty(position.stage), position.parity ^ 1);
    mbarrier_arrive_expect(full(position.stage), bytes);
  }

  __device__ __forceinline__ void wait_full(const RingPosition<COUNT>& position) const {
    wait(full(position.stage), position.parity);
  }

  __device__ __forceinline__ void release(int stage) const { mbarrier_arrive(empty(stage)); }

  // Frees the stage in BLOCKS blocks of a cluster, from `first` on: copies of any of them may come into each.
  template <int BLOCKS>
  __device__ __forceinline__ void release_in_cluster(int stage, unsigned first = 0) const {
    if constexpr (BLOCKS == 1) release(stage);
    else
      for (unsigned rank = 0; rank < BLOCKS; ++rank) mbarrier_arrive_at(empty(stage), first + rank);
  }

  // The same by a whole warp: each lane frees the stage in one block.
  template <int BLOCKS> __device__ __forceinline__ void release_by_lanes(int stage) const {
    const unsigned lane = threadIdx.x % 32;
    if (lane >= BLOCKS) return;
    if constexpr (BLOCKS == 1) release(stage);
    else mbarrier_arrive_at(empty(stage), lane);
  }
};

}  // namespace hopper
