// Latency by pointer chase: each load's address is the value that the load before it brought, so
// that nothing overlaps and the time is hops x latency.
//
// data: 128-byte lines; the first 8 bytes of each hold the address of another, so that all of them
// are one cycle in random order, which no prefetcher follows. One thread hops: 8 bytes a hop are
// used, a sector of 32 is moved, and one line is taken up in each cache on the way. The loads are
// volatile assembly: no compiler drops, merges or reorders them, nor the clocks about them.
typedef long long index_t;

constexpr int UNROLL = 16;  // hops between two looks at the loop's counter

struct L1Load {  // through the SM's L1
  static __device__ __forceinline__ void hop(unsigned long long& at) {
    asm volatile("ld.global.ca.u64 %0, [%0];" : "+l"(at) : : "memory");
  }
};

struct L2Load {  // past the L1, which .cg does not look into
  static __device__ __forceinline__ void hop(unsigned long long& at) {
    asm volatile("ld.global.cg.u64 %0, [%0];" : "+l"(at) : : "memory");
  }
};

struct SharedLoad {
  static __device__ __forceinline__ void hop(unsigned long long& at) {
    unsigned int address = (unsigned int)at, next;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(next) : "r"(address) : "memory");
    at = next;
  }
};

__device__ __forceinline__ unsigned long long nanoseconds() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now) : : "memory");
  return now;
}

template <class Load> __device__ __forceinline__ void hops(unsigned long long& at, index_t count) {
  for (index_t i = 0; i < count; i += UNROLL) {
#pragma unroll
    for (int k = 0; k < UNROLL; ++k) Load::hop(at);
  }
}

// state: (3,), the address to start at, which is replaced by the one arrived at; cycles; ns.
template <class Load>
__device__ __forceinline__ void chase(unsigned long long at, unsigned long long* state,
                                      index_t warm, index_t count) {
  hops<Load>(at, warm);
  const unsigned long long began = nanoseconds();
  const long long first = clock64();
  hops<Load>(at, count);
  const long long last = clock64();
  const unsigned long long ended = nanoseconds();
  state[0] = at;
  state[1] = (unsigned long long)(last - first);
  state[2] = ended - began;
}

// warm hops untimed, then count timed ones, both multiples of UNROLL, by a grid of one thread.
extern "C" __global__ void chase_l1(unsigned long long* state, index_t warm, index_t count) {
  chase<L1Load>(state[0], state, warm, count);
}

extern "C" __global__ void chase_l2(unsigned long long* state, index_t warm, index_t count) {
  chase<L2Load>(state[0], state, warm, count);
}

// next: (lines,), for each line the one that follows. The block writes the cycle into its shared
// memory, and its first thread hops. state[0] is returned as the line arrived at, from line 0.
extern "C" __global__ void chase_shared(const unsigned int* next, index_t lines,
                                        unsigned long long* state, index_t warm, index_t count) {
  extern __shared__ unsigned int room[];
  const unsigned int base = (unsigned int)__cvta_generic_to_shared(room);
  for (index_t i = threadIdx.x; i < lines; i += blockDim.x) room[i * 32] = base + next[i] * 128;
  __syncthreads();
  if (threadIdx.x > 0) return;
  chase<SharedLoad>(base, state, warm, count);
  state[0] = (state[0] - base) / 128;
}

// What a launch costs when there is nothing to do.
extern "C" __global__ void nothing() {}
