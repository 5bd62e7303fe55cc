// Latency by pointer chase: a load's address is the value of the load before it, so no two loads
// overlap, and the time is hops x latency.
//
// data: 128-byte lines. The first 8 bytes of a line are the address of the next one; all lines form
// one cycle in random order, which no prefetcher follows. One thread hops. A hop uses 8 bytes, moves a
// sector of 32, and occupies one line of each cache on its path. The loads are volatile assembly, so
// the compiler does not drop, merge or reorder them, nor the clocks around them.
typedef long long index_t;

// Hops in an iteration, so that the loop's own instructions hide behind the latency
constexpr int UNROLL = 16;

struct L1Load {  // through the SM's L1 (.ca: cache at all levels)
  static __device__ __forceinline__ void hop(unsigned long long& at) {
    asm volatile("ld.global.ca.u64 %0, [%0];" : "+l"(at) : : "memory");
  }
};

struct L2Load {  // bypassing the L1 (.cg: cache in the L2 only)
  static __device__ __forceinline__ void hop(unsigned long long& at) {
    asm volatile("ld.global.cg.u64 %0, [%0];" : "+l"(at) : : "memory");
  }
};

struct SharedLoad {
  static __device__ __forceinline__ void hop(unsigned long long& at) {
    unsigned int address = (unsigned int)at, next;  // shared addresses have 32 bits
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

// state: (3,). state[0] is the address to start at and then the one arrived at; state[1] is cycles and
// state[2] ns. Storing the address makes the last load's value used, and lets the host verify the chase.
template <class Load>
__device__ __forceinline__ void chase(unsigned long long at, unsigned long long* state,
                                      index_t warm, index_t count) {
  hops<Load>(at, warm);  // brings the lines, the code and the translations into their caches
  const unsigned long long begin_ns = nanoseconds();
  const long long first = clock64();
  hops<Load>(at, count);
  const long long last = clock64();
  const unsigned long long end_ns = nanoseconds();
  state[0] = at;
  state[1] = (unsigned long long)(last - first);
  state[2] = end_ns - begin_ns;
}

// `warm` untimed hops, then `count` timed ones, both multiples of UNROLL, by a grid of one thread.
extern "C" __global__ void chase_l1(unsigned long long* state, index_t warm, index_t count) {
  chase<L1Load>(state[0], state, warm, count);
}

extern "C" __global__ void chase_l2(unsigned long long* state, index_t warm, index_t count) {
  chase<L2Load>(state[0], state, warm, count);
}

// next: (lines,), the successor of each line. The block writes the cycle into its shared memory, and
// its first thread hops from line 0. state[0] is the number of the line arrived at.
extern "C" __global__ void chase_shared(const unsigned int* next, index_t lines,
                                        unsigned long long* state, index_t warm, index_t count) {
  extern __shared__ unsigned int lines_in_shared[];
  const unsigned int base = (unsigned int)__cvta_generic_to_shared(lines_in_shared);
  for (index_t i = threadIdx.x; i < lines; i += blockDim.x) lines_in_shared[i * 32] = base + next[i] * 128;
  __syncthreads();  // the cycle is complete before the first hop
  if (threadIdx.x > 0) return;
  chase<SharedLoad>(base, state, warm, count);
  state[0] = (state[0] - base) / 128;
}

// An empty kernel: its time is the launch overhead.
extern "C" __global__ void nothing() {}
