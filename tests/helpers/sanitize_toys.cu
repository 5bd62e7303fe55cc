// y = 2 x with one planted fault a kernel, of the kind that one tool of compute-sanitizer reports.
// x, y: n floats; one thread an element; reads n, writes n. The last block is not full. The result is
// right on most runs: only the access is wrong.

#define BLOCK 64

extern "C" __global__ void doubled_clean(
    const float* x, float* y, const float* unused, long long n) {
    __shared__ float staged[BLOCK];
    long long i = (long long)blockIdx.x * BLOCK + threadIdx.x;
    staged[threadIdx.x] = i < n ? x[i] : 0.0f;
    __syncthreads();
    float other = staged[BLOCK - 1 - threadIdx.x];
    if (i < n) y[i] = 2.0f * staged[threadIdx.x] + other * 0.0f;
}

extern "C" __global__ void doubled_past_the_end(
    const float* x, float* y, const float* unused, long long n) {
    long long i = (long long)blockIdx.x * BLOCK + threadIdx.x;
    y[i] = i < n ? 2.0f * x[i] : 0.0f;  // no mask on the store
}

extern "C" __global__ void doubled_no_barrier(
    const float* x, float* y, const float* unused, long long n) {
    __shared__ float staged[BLOCK];
    long long i = (long long)blockIdx.x * BLOCK + threadIdx.x;
    staged[threadIdx.x] = i < n ? x[i] : 0.0f;
    // the barrier is missing: the other half of the block may not have stored yet
    if (i < n) y[i] = 2.0f * x[i] + staged[BLOCK - 1 - threadIdx.x] * 0.0f;
}

extern "C" __global__ void doubled_unwritten(
    const float* x, float* y, const float* scratch, long long n) {
    long long i = (long long)blockIdx.x * BLOCK + threadIdx.x;
    if (i < n) y[i] = 2.0f * x[i] + (scratch[i] == 1234.5f ? 1.0f : 0.0f);  // nothing wrote scratch
}

extern "C" __global__ void doubled_divergent(
    const float* x, float* y, const float* unused, long long n) {
    __shared__ float staged[BLOCK];
    long long i = (long long)blockIdx.x * BLOCK + threadIdx.x;
    float v = i < n ? x[i] : 0.0f;
    staged[threadIdx.x] = v;
    if (threadIdx.x < BLOCK * 3 / 4) {
        __syncthreads();  // half of the second warp does not reach this barrier
        v += staged[threadIdx.x ^ 1] * 0.0f;
    } else {
        v += 0.0f * staged[threadIdx.x];
    }
    if (i < n) y[i] = 2.0f * v;
}
