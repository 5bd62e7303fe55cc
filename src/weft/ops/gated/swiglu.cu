// SwiGLU, forward and backward: y = silu(gate) up over n elements.
//
// All tensors are (n,), dense, in the same order. _wide: every pointer is 16-byte aligned; _any: no
// alignment.
#include "gated.cuh"

using Forward = GatedForward<silu>;
using Backward = GatedBackward<silu>;

extern "C" __global__ void __launch_bounds__(THREADS)
swiglu_forward_wide(const WEFT_T* gate, const WEFT_T* up, WEFT_T* y, index_t n) {
  elementwise_wide<2, 1>({{gate, up}}, {{y}}, n, Forward{});
}

extern "C" __global__ void __launch_bounds__(THREADS)
swiglu_forward_any(const WEFT_T* gate, const WEFT_T* up, WEFT_T* y, index_t n) {
  elementwise_any<2, 1>({{gate, up}}, {{y}}, n, Forward{});
}

extern "C" __global__ void __launch_bounds__(THREADS)
swiglu_backward_wide(const WEFT_T* grad, const WEFT_T* gate, const WEFT_T* up, WEFT_T* dgate,
                     WEFT_T* dup, index_t n) {
  elementwise_wide<3, 2>({{grad, gate, up}}, {{dgate, dup}}, n, Backward{});
}

extern "C" __global__ void __launch_bounds__(THREADS)
swiglu_backward_any(const WEFT_T* grad, const WEFT_T* gate, const WEFT_T* up, WEFT_T* dgate,
                    WEFT_T* dup, index_t n) {
  elementwise_any<3, 2>({{grad, gate, up}}, {{dgate, dup}}, n, Backward{});
}
