// y = 2 x with what compute-sanitizer is there for, one kernel a mistake. x, y: n floats;
// one thread an element; reads n, writes n. The last block is not full. Each answer is right on
// most runs: it is the access that is wrong.

#define BLOCK 64

extern "C" __global__ void doubled_clean(
    const float* x, float* y, const float* unused, long long n) {
    __shared__ float held[BLOCK];
    long long i = (long long)blockIdx.x * BLOCK + threadIdx.x;
    held[threadIdx.x] = i < n ? x[i] : 0.0f;
    __syncthreads();
    float other = held[BLOCK - 1 - threadIdx.x];
    if (i < n) y[i] = 2.0f * held[threadIdx.x] + other * 0.0f;
}

extern "C" __global__ void doubled_past_the_end(
    const float* x, float* y, const float* unused, long long n) {
    long long i = (long long)blockIdx.x * BLOCK + threadIdx.x;
    y[i] = i < n ? 2.0f * x[i] : 0.0f;  // no mask on the store
}

extern "C" __global__ void doubled_no_barrier(
    const float* x, float* y, const float* unused, long long n) {
    __shared__ float held[BLOCK];
    long long i = (long long)blockIdx.x * BLOCK + threadIdx.x;
    held[threadIdx.x] = i < n ? x[i] : 0.0f;
    // the barrier is missing: the other half of the block may not have stored yet
    if (i < n) y[i] = 2.0f * x[i] + held[BLOCK - 1 - threadIdx.x] * 0.0f;
}

extern "C" __global__ void doubled_unwritten(
    const float* x, float* y, const float* scratch, long long n) {
    long long i = (long long)blockIdx.x * BLOCK + threadIdx.x;
    if (i < n) y[i] = 2.0f * x[i] + (scratch[i] == 1234.5f ? 1.0f : 0.0f);  // nothing wrote scratch
}

extern "C" __global__ void doubled_divergent(
    const float* x, float* y, const float* unused, long long n) {
    __shared__ float held[BLOCK];
    long long i = (long long)blockIdx.x * BLOCK + threadIdx.x;
    float v = i < n ? x[i] : 0.0f;
    held[threadIdx.x] = v;
    if (threadIdx.x < BLOCK * 3 / 4) {
        __syncthreads();  // half of the second warp does not come here
        v += held[threadIdx.x ^ 1] * 0.0f;
    } else {
        v += 0.0f * held[threadIdx.x];
    }
    if (i < n) y[i] = 2.0f * v;
}
