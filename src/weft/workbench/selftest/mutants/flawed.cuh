// The faults that a kernel of this folder can be launched with; with NONE it is right. They come at
// run time, so that one program an element type serves every mutant.
#pragma once
#include "numeric.cuh"
#include "reduce.cuh"

enum Fault {
  NONE,
  NOTHING,         // W01: computes, and stores nothing
  LAST_TILE,       // W04: leaves out the last tile
  NO_LOAD_MASK,    // W05: loads past the end and uses it
  NO_STORE_MASK,   // W05: stores past the end
  ANY_STRIDES,     // W06: takes any strides for rows
  HALF_SUMS,       // W08: sums in half precision
  NO_MAXIMUM,      // W09: no maximum taken away
  NO_SCALE,        // W10: a constant dropped
  NO_NAN,          // W12: takes NaN for a number
  TEXTBOOK_TANH,   // W13: tanh as (e - 1) / (e + 1)
  NO_BARRIER,      // W14: a barrier is missing
  ONE_CELL,        // W14: all blocks write one cell
  ADDS,            // W15: adds to what is not zeroed
  INT32,           // W17: counts elements in 32 bits
};

__device__ __forceinline__ double widen(double v) { return v; }
template <typename T> __device__ __forceinline__ float widen(T v) { return to_float(v); }

__device__ __forceinline__ void barrier(index_t fault) {
  if (fault != NO_BARRIER) __syncthreads();
}
