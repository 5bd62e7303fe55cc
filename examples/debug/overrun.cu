// A ReLU in CUDA C++ that writes up to 255 elements behind its output: `i < n` is missing.
//
//     weft check relu --with examples/debug/overrun.cu --sanitize memcheck     # on a GPU
//
// weft: operator relu
// weft: name cuda/overrun
// weft: require contiguous x
// weft: let n = x.numel()
// weft: output y = empty_like(x)
// weft: launch relu_overrun<<<cdiv(n, 256), 256>>>(x, y)

// x, y: (n,). Thread i computes element i, also where i is not below n.
extern "C" __global__ void relu_overrun(const scalar_t* x, scalar_t* y) {
  long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  y[i] = (float)x[i] > 0.0f ? x[i] : (scalar_t)0.0f;
}
