// Shared by steps 2 to 5: tables of counters in shared memory.
#pragma once
#include "../bins.cuh"

#ifndef THREADS
#define THREADS 256
#endif

constexpr int TABLE = 8192;  // counters of a block: 32 KiB

// Sets the first `size` counters to 0; the block must meet before it counts.
__device__ __forceinline__ void clear(unsigned* table, int size) {
  for (int i = threadIdx.x; i < size; i += THREADS) table[i] = 0;
}

// Adds the sums of `copies` tables, which lie one after another, to the counts, after the block has met.
__device__ __forceinline__ void add_tables(const unsigned* table, int copies, Count* counts, int bins) {
  for (int bin = threadIdx.x; bin < bins; bin += THREADS) {
    Count sum = 0;
    for (int c = 0; c < copies; ++c) sum += table[c * bins + bin];
    if (sum) atomicAdd(counts + bin, sum);
  }
}
