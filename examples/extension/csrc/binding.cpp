// The binding to PyTorch: schemas, checks, outputs, device and stream. It uses only the stable ABI of
// libtorch, so a library built once works with this PyTorch and later ones, and compiles in seconds;
// torch/extension.h would take a minute. -DTORCH_TARGET_VERSION=0x020b000000000000 hides functions
// that are newer than 2.11.
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>

// The launchers in csrc/tiles.cu. If a declaration differs from its definition, the library has an
// undefined symbol and does not load.
namespace tiles_kernels {
cudaError_t relu(const float* x, float* y, int64_t n, cudaStream_t stream);
cudaError_t add(const float* a, int64_t a_row, int64_t a_column, const float* b, int64_t b_row,
                int64_t b_column, float* out, int64_t rows, int64_t columns, cudaStream_t stream);
cudaError_t matmul(const float* a, const float* b, float* c, int64_t rows, int64_t columns,
                   int64_t inner, cudaStream_t stream);
}  // namespace tiles_kernels

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using torch::stable::accelerator::DeviceGuard;

#define CUDA_CHECK(call)                                                                \
  do {                                                                                  \
    const cudaError_t status = (call);                                                  \
    STD_TORCH_CHECK(status == cudaSuccess, #call ": ", cudaGetErrorName(status), ", ",  \
                    cudaGetErrorString(status));                                        \
  } while (false)

// Return PyTorch's current stream. The function is looked up by name at run time because it is in
// libtorch_cuda, which a CPU build of PyTorch does not have: a linked library could not be loaded there.
cudaStream_t current_stream(int32_t device) {
  using Getter = AOTITorchError (*)(int32_t, void**);
  static const auto getter = [] {
    void* const torch_cuda = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    void* const from = torch_cuda != nullptr ? torch_cuda : RTLD_DEFAULT;
    return reinterpret_cast<Getter>(dlsym(from, "aoti_torch_get_current_cuda_stream"));
  }();
  STD_TORCH_CHECK(getter != nullptr, "this build of PyTorch has no CUDA streams");
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(getter(device, &stream));
  return static_cast<cudaStream_t>(stream);
}

void check_input(const char* name, const Tensor& x) {
  STD_TORCH_CHECK(x.is_cuda(), name, " must be on a CUDA device; move it with ", name, ".cuda()");
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float, name, " must be float32, got ",
                  torch::headeronly::toString(x.scalar_type()), "; convert it with ", name,
                  ".float()");
}

void check_contiguous(const char* name, const Tensor& x) {
  STD_TORCH_CHECK(x.is_contiguous(), name, " must be contiguous; copy it with ", name,
                  ".contiguous()");
}

void check_matrix(const char* name, const Tensor& x) {
  STD_TORCH_CHECK(x.dim() == 2, name, " must have 2 dimensions, got ", x.dim());
}

void check_same_device(const Tensor& a, const Tensor& b) {
  STD_TORCH_CHECK(a.get_device_index() == b.get_device_index(),
                  "a and b must be on one device, got cuda:", a.get_device_index(), " and cuda:",
                  b.get_device_index());
}

// x: any shape, float32, contiguous -> the same shape.
Tensor relu(const Tensor& x) {
  check_input("x", x);
  check_contiguous("x", x);
  const DeviceGuard guard(x.get_device_index());
  Tensor y = torch::stable::new_empty(x, x.sizes());
  CUDA_CHECK(tiles_kernels::relu(x.const_data_ptr<float>(), y.mutable_data_ptr<float>(), x.numel(),
                                 current_stream(x.get_device_index())));
  return y;
}

// a, b: (rows, columns), float32, any strides -> (rows, columns), contiguous.
Tensor add(const Tensor& a, const Tensor& b) {
  check_input("a", a);
  check_input("b", b);
  check_matrix("a", a);
  check_matrix("b", b);
  check_same_device(a, b);
  STD_TORCH_CHECK(a.size(0) == b.size(0) && a.size(1) == b.size(1),
                  "a and b must have one shape, got (", a.size(0), ", ", a.size(1), ") and (",
                  b.size(0), ", ", b.size(1), ")");
  const DeviceGuard guard(a.get_device_index());
  Tensor out = torch::stable::new_empty(a, a.sizes());
  CUDA_CHECK(tiles_kernels::add(a.const_data_ptr<float>(), a.stride(0), a.stride(1),
                                b.const_data_ptr<float>(), b.stride(0), b.stride(1),
                                out.mutable_data_ptr<float>(), a.size(0), a.size(1),
                                current_stream(a.get_device_index())));
  return out;
}

// a: (rows, inner), b: (inner, columns), float32, contiguous -> (rows, columns).
Tensor matmul(const Tensor& a, const Tensor& b) {
  check_input("a", a);
  check_input("b", b);
  check_matrix("a", a);
  check_matrix("b", b);
  check_contiguous("a", a);
  check_contiguous("b", b);
  check_same_device(a, b);
  STD_TORCH_CHECK(a.size(1) == b.size(0), "a's columns must be as many as b's rows, got ",
                  a.size(1), " and ", b.size(0));
  const DeviceGuard guard(a.get_device_index());
  Tensor c = torch::stable::new_empty(a, {a.size(0), b.size(1)});
  CUDA_CHECK(tiles_kernels::matmul(a.const_data_ptr<float>(), b.const_data_ptr<float>(),
                                   c.mutable_data_ptr<float>(), a.size(0), b.size(1), a.size(1),
                                   current_stream(a.get_device_index())));
  return c;
}

}  // namespace

STABLE_TORCH_LIBRARY(tiles, m) {
  m.def("relu(Tensor x) -> Tensor");
  m.def("add(Tensor a, Tensor b) -> Tensor");
  m.def("matmul(Tensor a, Tensor b) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(tiles, CUDA, m) {
  m.impl("relu", TORCH_BOX(&relu));
  m.impl("add", TORCH_BOX(&add));
  m.impl("matmul", TORCH_BOX(&matmul));
}

// Register the same functions for CPU tensors, so that check_input's message appears: PyTorch's own
// message for a missing backend is a page long.
STABLE_TORCH_LIBRARY_IMPL(tiles, CPU, m) {
  m.impl("relu", TORCH_BOX(&relu));
  m.impl("add", TORCH_BOX(&add));
  m.impl("matmul", TORCH_BOX(&matmul));
}
