// Bandwidth by streaming reads of 16-byte vectors, neighbouring threads reading neighbours, four
// loads in flight a thread, 1024 threads an SM: 64 KiB in flight in each, more than latency times
// bandwidth of any level. What is read is added up, and the sum is stored if it is a value that no
// data give: the compiler cannot know, and keeps the loads, which are volatile besides.
typedef long long index_t;

constexpr int THREADS = 1024;
constexpr int UNROLL = 4;
constexpr float NEVER = -1.2345e30f;

struct L1Load {
  static __device__ __forceinline__ float4 at(const float4* p) {
    float4 v;
    asm volatile("ld.global.ca.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(p));
    return v;
  }
};

struct L2Load {
  static __device__ __forceinline__ float4 at(const float4* p) {
    float4 v;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(p));
    return v;
  }
};

struct SharedLoad {
  static __device__ __forceinline__ float4 at(const float4* p) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"((unsigned int)__cvta_generic_to_shared(p)));
    return v;
  }
};

__device__ __forceinline__ void add(float4& sum, const float4& v) {
  sum.x += v.x;
  sum.y += v.y;
  sum.z += v.z;
  sum.w += v.w;
}

__device__ __forceinline__ void keep(const float4& sum, float* sink) {
  const float all = sum.x + sum.y + sum.z + sum.w;
  if (all == NEVER) *sink = all;
}

// The block reads `vectors` vectors in a circle, `rounds` times UNROLL a thread.
template <class Load>
__device__ __forceinline__ void circle(float4& sum, const float4* data, int vectors, int rounds) {
  int at = threadIdx.x % vectors;
  const int step = THREADS % vectors;
  for (int i = 0; i < rounds; ++i) {
    float4 in[UNROLL];
#pragma unroll
    for (int k = 0; k < UNROLL; ++k) {
      in[k] = Load::at(data + at);
      at += step;
      if (at >= vectors) at -= vectors;
    }
#pragma unroll
    for (int k = 0; k < UNROLL; ++k) add(sum, in[k]);
  }
}

// cycles: (gridDim.x,). Every block, one an SM, reads all of data: `warm` rounds untimed, then
// `rounds` whose cycles it takes, rounds x UNROLL x THREADS x 16 bytes.
template <class Load>
__device__ __forceinline__ void timed(const float4* data, int vectors, int warm, int rounds,
                                      float* sink, long long* cycles) {
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
  circle<Load>(sum, data, vectors, warm);
  __syncthreads();
  const long long first = clock64();
  circle<Load>(sum, data, vectors, rounds);
  __syncthreads();
  const long long last = clock64();
  if (threadIdx.x == 0) cycles[blockIdx.x] = last - first;
  keep(sum, sink);
}

// data: (vectors,), the same for all SMs, so that what leaves the L1 is sure to be in the L2.
extern "C" __global__ void __launch_bounds__(THREADS)
read_l1(const float4* data, index_t vectors, index_t warm, index_t rounds, float* sink,
        long long* cycles) {
  timed<L1Load>(data, (int)vectors, (int)warm, (int)rounds, sink, cycles);
}

// The same from shared memory, into which the block copies data first.
extern "C" __global__ void __launch_bounds__(THREADS)
read_shared(const float4* data, index_t vectors, index_t warm, index_t rounds, float* sink,
            long long* cycles) {
  extern __shared__ float4 room[];
  for (int i = threadIdx.x; i < vectors; i += THREADS) room[i] = data[i];
  __syncthreads();
  timed<SharedLoad>(room, (int)vectors, (int)warm, (int)rounds, sink, cycles);
}

// data: (vectors,), vectors a multiple of gridDim.x * THREADS: one block an SM, all together read
// data `passes` times. A vector is read by the same SM in every pass, so that an L2 in two
// halves has to keep as few lines twice as can be. Bytes: passes * vectors * 16 read.
extern "C" __global__ void __launch_bounds__(THREADS)
read_all(const float4* data, index_t vectors, index_t passes, float* sink) {
  const index_t wide = (index_t)gridDim.x * THREADS;
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
  for (index_t pass = 0; pass < passes; ++pass) {
    index_t i = (index_t)blockIdx.x * THREADS + threadIdx.x;
    for (; i + (UNROLL - 1) * wide < vectors; i += UNROLL * wide) {
      float4 in[UNROLL];
#pragma unroll
      for (int k = 0; k < UNROLL; ++k) in[k] = L2Load::at(data + i + k * wide);
#pragma unroll
      for (int k = 0; k < UNROLL; ++k) add(sum, in[k]);
    }
    for (; i < vectors; i += wide) add(sum, L2Load::at(data + i));
  }
  keep(sum, sink);
}

// from, to: (vectors,), one vector a thread. Bytes: 16 vectors read + as many written.
extern "C" __global__ void copy_all(const float4* __restrict__ from, float4* __restrict__ to,
                                    index_t vectors) {
  const index_t i = (index_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < vectors) to[i] = from[i];
}
