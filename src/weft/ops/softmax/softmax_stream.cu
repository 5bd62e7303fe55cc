// Softmax by blocks that stay, fed by the bulk copy engine (compute capability 9.0 and later).
//
// A block takes row after row. Its rows come through a ring of SLOTS chunks in shared memory, of
// THREADS 16-byte accesses each, so that the copies of the next rows run while this one is computed
// and written: loads are always in flight. A thread moves its accesses of a row from the ring to
// registers as their chunks arrive. The one barrier of a row, which merges its statistics, also
// says that every thread has done so, and its chunks are filled again at once.
// Rows, row strides and pointers are multiples of 16 bytes; a row is VECTORS chunks, the last one
// maybe in part; SLOTS >= VECTORS. Bytes: n read + n written (backward: 2n read + n written).
#define ACCESS (16 / sizeof(WEFT_T))
#include "softmax.cuh"

#ifndef VECTORS
#define VECTORS 2
#endif
#ifndef SLOTS
#define SLOTS 4
#endif

static_assert(SLOTS >= VECTORS, "a whole row must fit in the ring");
constexpr bool KEEP = VECTORS * N <= 32;  // hold the exponentials, or take them again
constexpr int CHUNK = THREADS * 16;       // bytes

#if __CUDA_ARCH__ >= 900

__device__ __forceinline__ unsigned address(const void* shared) {
  return (unsigned)__cvta_generic_to_shared(shared);
}

// One arrival, by the thread that issues the copy, and the copy's bytes complete a phase.
__device__ __forceinline__ void prepare(unsigned long long* full) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address(full)) : "memory");
}

__device__ __forceinline__ void copy(void* to, const void* from, int bytes,
                                     unsigned long long* full) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(full)),
               "r"(bytes)
               : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1], %2, [%3];" ::"r"(address(to)),
      "l"(from), "r"(bytes), "r"(address(full))
      : "memory");
}

__device__ __forceinline__ void wait(unsigned long long* full, unsigned phase) {
  unsigned done = 0;
  while (!done)
    asm volatile(
        "{\n .reg .pred p;\n"
        " mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        " selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(address(full)), "r"(phase)
        : "memory");
}

// This block's rows of one tensor, as a ring of chunks: the block's chunk number c, part c %
// VECTORS of its row number c / VECTORS, lies in slot c % SLOTS. Every place is reached by
// counting up.
struct Ring {
  unsigned char* slots;
  unsigned long long* full;
  const unsigned char* tensor;  // at this block's first row
  index_t pitch;                // bytes from one of this block's rows to its next
  int bytes;                    // of a row
  int rows;                     // that are this block's
  int slot;                     // of the row that is being taken, its first chunk
  unsigned phase;               // how often the ring has gone round, modulo 2

  __device__ __forceinline__ void fetch(int row, int part, int to) const {
    if (row < rows)
      copy(slots + to * CHUNK, tensor + row * pitch + part * CHUNK,
           min(CHUNK, bytes - part * CHUNK), full + to);
  }

  // This thread's access of chunk `part` of the row, once it has come; past the row's end `past`.
  __device__ __forceinline__ Pack take(int part, float past) const {
    const bool round = slot + part >= SLOTS;
    const int from = slot + part - (round ? SLOTS : 0);
    wait(full + from, phase ^ round);
    if (part * CHUNK + (int)threadIdx.x * 16 >= bytes) return filled(past);
    return reinterpret_cast<const Pack*>(slots + from * CHUNK)[threadIdx.x];
  }

  // Every thread has taken row number `row`: one fills its slots again, all go on to the next.
  __device__ __forceinline__ void next(int row) {
    if (threadIdx.x == 0) {
#pragma unroll
      for (int part = 0; part < VECTORS; ++part) {
        const int to = slot + part - (slot + part >= SLOTS ? SLOTS : 0);
        fetch(row + (part + SLOTS) / VECTORS, (part + SLOTS) % VECTORS, to);
      }
    }
    slot += VECTORS;
    if (slot >= SLOTS) {
      slot -= SLOTS;
      phase ^= 1;
    }
  }
};

// Ring number `which` of this block, its first chunks on their way. All threads call.
__device__ __forceinline__ Ring open_ring(int which, unsigned char* memory,
                                          unsigned long long* full, const WEFT_T* tensor,
                                          index_t rows, index_t columns, index_t stride) {
  Ring ring;
  ring.slots = memory + which * SLOTS * CHUNK;
  ring.full = full + which * SLOTS;
  ring.tensor = reinterpret_cast<const unsigned char*>(tensor + blockIdx.x * stride);
  ring.pitch = (index_t)gridDim.x * stride * sizeof(WEFT_T);
  ring.bytes = (int)(columns * sizeof(WEFT_T));
  ring.rows = (int)((rows - blockIdx.x + gridDim.x - 1) / gridDim.x);
  ring.slot = 0;
  ring.phase = 0;
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < SLOTS; ++slot) prepare(ring.full + slot);
    // The copy engine must see the barriers before the first copy counts on them.
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    for (int slot = 0; slot < SLOTS; ++slot) ring.fetch(slot / VECTORS, slot % VECTORS, slot);
  }
  __syncthreads();
  return ring;
}

#ifndef BACKWARD

// x: (rows, columns), rows `stride` apart; y: (rows, columns) contiguous. gridDim.x <= rows.
extern "C" __global__ void __launch_bounds__(THREADS)
softmax_stream(const WEFT_T* __restrict__ x, WEFT_T* __restrict__ y, index_t rows,
               index_t columns, index_t stride) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ unsigned long long full[SLOTS];
  __shared__ Statistics scratch[2][32];
  Ring ring = open_ring(0, memory, full, x, rows, columns, stride);
  y += blockIdx.x * columns;
  for (int i = 0; i < ring.rows; ++i, y += gridDim.x * columns) {
    Pack in[VECTORS];
    float e[KEEP ? VECTORS * N : 1];
    Statistics mine = {LEAST, 0.0f};
#pragma unroll
    for (int part = 0; part < VECTORS; ++part) {
      in[part] = ring.take(part, minus_infinity());
      mine.top = fmaxf(mine.top, pack_max(in[part]));
    }
    mine.top = warp_max(mine.top);
#pragma unroll
    for (int part = 0; part < VECTORS; ++part) {
      if (!KEEP) forget(in[part]);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float v = exp_of_difference(element(in[part], j), mine.top);
        if (KEEP) e[KEEP ? part * N + j : 0] = v;
        mine.total += v;
      }
    }
    mine.total = warp_sum(mine.total);
    const Statistics whole = block_merge(mine, scratch[i % 2]);
    ring.next(i);
    float scale = __frcp_rn(whole.total);
    if (KEEP) scale *= exp_of_difference(mine.top, whole.top);
#pragma unroll
    for (int part = 0; part < VECTORS; ++part) {
      if (!KEEP) forget(in[part]);
      const Pack out = packed([&](int j) {
        const float v = KEEP ? e[KEEP ? part * N + j : 0]
                             : exp_of_difference(element(in[part], j), whole.top);
        return v * scale;
      });
      const int at = part * THREADS + (int)threadIdx.x;
      if (at * 16 < ring.bytes) reinterpret_cast<Pack*>(y)[at] = out;
    }
  }
}

#else

// grad: (rows, columns), rows `stride` apart; y, dx: (rows, columns) contiguous. Two rings.
extern "C" __global__ void __launch_bounds__(THREADS)
softmax_backward_stream(const WEFT_T* __restrict__ grad, const WEFT_T* __restrict__ y,
                        WEFT_T* __restrict__ dx, index_t rows, index_t columns, index_t stride) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ unsigned long long full[2 * SLOTS];
  __shared__ float scratch[2][32];
  Ring gradients = open_ring(0, memory, full, grad, rows, columns, stride);
  Ring outputs = open_ring(1, memory, full, y, rows, columns, columns);
  dx += blockIdx.x * columns;
  for (int i = 0; i < outputs.rows; ++i, dx += gridDim.x * columns) {
    Pack g[VECTORS], out[VECTORS];
    float dot = 0.0f;
#pragma unroll
    for (int part = 0; part < VECTORS; ++part) {
      g[part] = gradients.take(part, 0.0f);
      out[part] = outputs.take(part, 0.0f);
      dot += pack_dot(g[part], out[part]);
    }
    dot = block_sum(dot, scratch[i % 2]);
    gradients.next(i);
    outputs.next(i);
#pragma unroll
    for (int part = 0; part < VECTORS; ++part) {
      forget(g[part]);
      forget(out[part]);
      const Pack made = packed(
          [&](int j) { return element(out[part], j) * (element(g[part], j) - dot); });
      const int at = part * THREADS + (int)threadIdx.x;
      if (at * 16 < outputs.bytes) reinterpret_cast<Pack*>(dx)[at] = made;
    }
  }
}

#endif
#endif
