"""Observed kernels: their names are parsed correctly, and a candidate may run only kernels of its backend."""

from __future__ import annotations

import ast
import ctypes
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from weft import backends
from weft.core import FORWARD, registry
from weft.workbench.calls import inputs
from weft.workbench.calls.bind import bind
from weft.workbench.kernels.names import demangle, is_library, origin, plain
from weft.workbench.kernels.provenance import (
    NOT_LISTED,
    Kernels,
    compare,
    is_same_without_kernels,
    kernels,
    observed,
    unnamed_work,
    verdict,
)

import triton  # isort: skip  # after weft.backends, which decides whether it interprets
import triton.language as tl  # isort: skip
from triton.runtime.interpreter import InterpreterError  # isort: skip

interpreted = pytest.mark.skipif(
    not backends.backend_support("triton", "cpu"), reason="with a GPU nothing is interpreted"
)

GELU = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl("
    "at::TensorIteratorBase&, at::native::GeluType)::{lambda()#1}::operator()() const::"
    "{lambda(float)#1}, std::array<char*, 2ul> >(int, std::array<char*, 2ul>)"
)
COPY = (
    "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda("
    "at::TensorIteratorBase&)::{lambda()#3}::operator()() const::{lambda(float)#1}, "
    "std::array<char*, 2ul>, 4>(int)"
)
FILL = "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorIfEESt5arrayIPcLm1EEEEviT0_T1_"
WARP = (
    "_ZN43_GLOBAL__N__d8ceb000_10_SoftMax_cu_9f978f6320softmax_warp_forwardIfffLi7ELb0ELb0EEE"
    "vPT0_PKT_iiiPKbib"
)
SIMT = "cutlass_80_simt_sgemm_128x32_8x5_nn_align1"
NUMBA = (
    "_ZN6cudapy8__main__15softmax_forwardB2v1B8cw51cXTLE5ArrayIfLi2E1C7mutable7alignedE"
    "5ArrayIfLi2E1C7mutable7alignedE"
)

# Kernel names of profilers and drivers on three generations of GPUs.
NAMES = [
    (GELU, "aten", "at::native::vectorized_elementwise_kernel<GeluCUDAKernelImpl>"),
    (COPY, "memory", "at::native::unrolled_elementwise_kernel<direct_copy_kernel_cuda>"),
    (FILL, "memory", "at::native::vectorized_elementwise_kernel<FillFunctor>"),
    (WARP, "aten", "(anonymous namespace)::softmax_warp_forward"),
    (
        "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float, "
        "at::native::(anonymous namespace)::SoftMaxForwardEpilogue>(float*, float const*, int)",
        "aten",
        "at::native::(anonymous namespace)::cunn_SoftMaxForward",
    ),
    (
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps"
        "<float, float, float, float>, unsigned int, float, 4, 4> >(at::native::ReduceOp<float>)",
        "aten",
        "at::native::reduce_kernel<MeanOps>",
    ),
    ("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NNT", "cublas", None),
    ("nvjet_sm90_hss_64x8_64x16_1x1_h_bz_splitK_NNT", "cublas", None),
    (
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __half, float, false, true>("
        "cublasLt::cublasSplitKParams<float>, float const*)",
        "cublas",
        "cublasLt::splitKreduce_kernel",
    ),
    (
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64_warpgroupsize1x1x1_"
        "execute_segment_k_off_kernel__5x_cublas",
        "cublas",
        None,
    ),
    ("ampere_sgemm_32x128_nn", "cublas", None),
    ("ampere_fp16_s16816gemm_fp16_256x128_ldg8_f2f_stages_32x3_tn", "cublas", None),
    ("volta_sgemm_32x128_nn", "cublas", None),
    (
        "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false, "
        "cublasGemvParamsEx<int, cublasGemvTensorStridedBatched<float const> > >(float)",
        "cublas",
        "gemv2T_kernel_val",
    ),
    (f"void cutlass::Kernel2<{SIMT}>({SIMT}::Params)", "cutlass", f"cutlass::Kernel2<{SIMT}>"),
    (
        "void cudnn::ops::nchwToNhwcKernel<__half, __half, float, false, true>(int)",
        "cudnn",
        "cudnn::ops::nchwToNhwcKernel",
    ),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x64x128", "cudnn", None),
    ("sm80_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nchw", "cudnn", None),
    ("triton_poi_fused_gelu_0", "inductor", None),
    ("triton_red_fused__softmax_1", "inductor", None),
    ("triton_mm_12", "inductor", None),
    ("void at_cuda_detail::cub::DeviceReduceKernel<at_cuda_detail::cub::P, int*>(int*)", "aten", 0),
    ("void cub::CUB_200200_900_NS::DeviceReduceSingleTileKernel<cub::P, float*>(int)", "cub", 0),
    ("Memcpy DtoD (Device -> Device)", "memory", None),
    ("Memset (Device)", "memory", None),
    ("triton:softmax_tile", "triton", None),
    (NUMBA, "numba", "cudapy::__main__::softmax_forward"),
    # Kernels of users, with names similar to a library's.
    ("softmax_warp_forward", "unknown", None),
    ("triton_softmax_kernel", "unknown", None),
    ("beats_cublas_kernel", "unknown", None),
    ("hopper_gemm_128x128", "unknown", None),
    ("sgemm_shared_tile", "unknown", None),
    ("gelu_forward_float(float const*, float*, long)", "unknown", "gelu_forward_float"),
]


@pytest.mark.parametrize(("name", "expected_origin", "short"), NAMES, ids=lambda v: str(v)[:40])
def test_a_name_shows_the_origin_of_a_kernel(name, expected_origin, short):
    assert origin(name) == expected_origin
    if short != 0:
        assert plain(name) == (short or name)


def test_a_mangled_name_and_the_same_one_demangled_are_one():
    assert plain(FILL) == plain(demangle(FILL)) and origin(FILL) == origin(demangle(FILL))
    assert demangle(FILL).startswith("void at::native::vectorized_elementwise_kernel<4, ")
    assert demangle("_Z") == "_Z"


def test_no_kernel_of_weft_is_mistaken_for_a_library_s():
    kernel_names = []
    for operator in registry.operator_names():
        folder = Path(registry.__file__).parents[1] / "ops" / registry.entry(operator).package
        for path in folder.rglob("*.py"):
            kernel_names += [
                node.name
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.FunctionDef) and node.decorator_list
            ]
        for one in registry.implementations(operator):
            kernel_names += [k for s in one.aot_kernels for k in getattr(s, "kernels", ())]
    assert len(kernel_names) > 30
    assert {origin(name) for name in kernel_names} == {"unknown"}


def kernels_of(*rows: tuple[str, float]) -> Kernels:
    return Kernels(
        names=tuple(plain(name) for name, _ in rows),
        shares=tuple(share for _, share in rows),
        origins=tuple(origin(name) for name, _ in rows),
    )


@pytest.mark.parametrize(
    ("backend", "rows", "accused"),
    [
        ("triton", [("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NNT", 1.0)], True),
        ("cuda", [(GELU, 0.9), ("mine", 0.1)], True),
        ("cuda", [(GELU, 0.4), ("mine", 0.6)], False),
        ("triton", [("triton_poi_fused_gelu_0", 1.0)], True),
        ("triton", [(NUMBA, 1.0)], True),
        ("numba", [(NUMBA, 1.0)], False),
        ("cuda", [("void cutlass::device_kernel<Mine>(Mine)", 1.0)], False),
        ("cuda", [(f"void cutlass::Kernel2<{SIMT}>({SIMT}::Params)", 1.0)], True),
        ("triton", [("void cutlass::device_kernel<Mine>(Mine)", 1.0)], True),
        ("triton", [(COPY, 0.8), ("softmax_tile", 0.2)], False),
        ("triton", [(COPY, 0.8), (GELU, 0.2)], True),
        ("triton", [(COPY, 1.0)], False),
        ("triton", [], False),
        ("torch", [(GELU, 1.0)], False),
        ("eager", [(GELU, 1.0)], False),
        ("compile", [("triton_poi_fused_gelu_0", 1.0)], False),
    ],
)
def test_a_backend_must_match_the_kernels_that_take_the_time(backend, rows, accused):
    violation = verdict(backend, kernels_of(*rows))
    assert bool(violation) == accused
    if accused:
        assert violation.startswith(f"declared {backend}, but ") and "a library's" in violation


def test_an_implementation_around_a_library_s_products_needs_kernels_of_its_own():
    product = ("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NNT", 0.8)
    assert verdict("cuda", kernels_of(product, ("mine", 0.2)), "cublas") == ""
    assert "no kernel of its own ran" in verdict("cuda", kernels_of(product), "cublas")
    assert verdict("cuda", kernels_of(product, (GELU, 0.15), ("mine", 0.05)), "cublas") != ""


def test_what_a_cuda_candidate_may_not_have_written():
    assert is_library("numba", "cudapy::__main__::f", "cuda")
    assert not is_library("cub", "cub::DeviceReduceKernel", "cuda")
    assert is_library("cub", "cub::DeviceReduceKernel", "triton")
    assert not is_library("unknown", "mine", "triton")


def softmax_call(name: str, shape: tuple[int, ...], seed: int = 1) -> Callable[[], object]:
    operator, implementation = (
        registry.operator("softmax"),
        registry.implementation("softmax", name),
    )
    case = next(c for c in operator.cases if c.inputs[0].shape == shape)
    return bind(operator, implementation, case, FORWARD, inputs.make(case, "cpu", seed))


@pytest.mark.parametrize(
    ("name", "kernel", "shape"),
    [
        pytest.param("triton", "triton:softmax_tile", (3, 7), marks=interpreted),
        pytest.param("numba", "numba:softmax_forward", (3, 7), marks=interpreted),
        # On a busy core the allocation of the output may take longer than 21 exponentials.
        ("numba/parallel", "numba:softmax_forward_parallel", (270, 16384)),
    ],
)
def test_an_interpreted_kernel_is_seen_with_a_profiler_and_without(name, kernel, shape):
    call = softmax_call(name, shape)
    profiled, again = kernels(call, "cpu"), observed(call, "cpu")
    assert profiled.names[0] == kernel and profiled.source == "torch.profiler" and not profiled.note
    assert sum(profiled.shares) == pytest.approx(1.0) and profiled.shares[0] > 0.3
    assert kernel in again.names
    assert verdict(name.split("/")[0], profiled) == "" and compare(profiled, again) == ""
    assert set(profiled.origins) <= {"memory", kernel.split(":")[0]}


@interpreted
def test_what_is_hooked_for_the_pass_is_as_before_after_it():
    softmax_call("numba/parallel", (3, 7))()
    from numba.core.dispatcher import Dispatcher
    from numba.cuda.simulator.kernel import FakeCUDAKernel
    from triton.runtime.interpreter import GridExecutor

    kinds = (GridExecutor, FakeCUDAKernel, Dispatcher)
    before = [(k.__call__, "__call__" in vars(k)) for k in kinds]
    kernels(softmax_call("triton", (3, 7)), "cpu")
    with pytest.raises(ZeroDivisionError):
        observed(lambda: 1 / 0, "cpu")
    assert [(k.__call__, "__call__" in vars(k)) for k in kinds] == before


X = torch.randn(16, 33)


def in_a_thread() -> torch.Tensor:
    out: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: out.append(torch.softmax(X, -1)))
    thread.start()
    thread.join()
    return out[0]


@torch.library.custom_op("toys_of_provenance::softmax", mutates_args=())
def under_cover(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


@triton.jit
def three_lanes(x):
    tl.load(x + tl.arange(0, 3))


def after_a_failed_launch() -> torch.Tensor:
    try:
        three_lanes[(1,)](X)
    except InterpreterError:
        return torch.softmax(X, -1)
    raise AssertionError("three lanes are no power of two")


DISGUISED_CALLS = {
    "fused": lambda: torch.softmax(X, -1),
    "composed": lambda: (X.exp() / X.exp().sum(-1, True)).clone(),
    "in a thread": in_a_thread,
    "in an operator of its own": lambda: under_cover(X),
}
if backends.backend_support("triton", "cpu"):
    DISGUISED_CALLS["after a launch that failed"] = after_a_failed_launch


@pytest.mark.parametrize("call", DISGUISED_CALLS.values(), ids=DISGUISED_CALLS)
def test_work_of_pytorch_s_under_another_name_is_detected(call):
    profiled = kernels(call, "cpu")
    for backend in ("triton", "numba", "cuda"):
        violation = verdict(backend, profiled)
        assert f"declared {backend}" in violation and "no kernel of its own ran" in violation
        assert "aten::" in violation
    assert verdict("eager", profiled) == verdict("torch", profiled) == ""


@interpreted
def test_a_candidate_that_changes_path_under_a_profiler_differs():
    honest = softmax_call("triton", (3, 7))

    def cheat() -> object:
        if torch.autograd.profiler._is_profiler_enabled:
            return honest()
        return torch.softmax(X, -1)

    profiled = kernels(cheat, "cpu")
    assert verdict("triton", profiled) == ""
    dispatched = kernels(cheat, "cpu", dispatched=True)
    assert verdict("triton", dispatched) == ""
    for difference in (
        compare(profiled, observed(cheat, "cpu")),
        compare(profiled, observed(cheat, "cpu"), dispatched),
    ):
        assert "only under a profiler: triton:softmax_tile" in difference
        assert "only without one: aten::_softmax" in difference


@interpreted
def test_a_kernel_that_computes_nothing_of_the_output_is_detected():
    # A separate seed: freed memory could contain the result for another test's inputs.
    own, seen = softmax_call("triton", (3, 7), seed=20_261_123), torch.randn(3, 7)

    def beside_a_kernel() -> object:
        own()
        return torch.softmax(seen, -1)

    assert is_same_without_kernels(beside_a_kernel)
    assert not is_same_without_kernels(own)
    assert not is_same_without_kernels(lambda: torch.softmax(seen, -1)), "no kernel was launched"


def test_other_operators_of_pytorch_under_a_dispatch_mode_are_no_change_of_path():
    def call() -> object:
        return torch.nn.functional.max_pool1d(X[None], 2)

    profiled, unprofiled = kernels(call, "cpu"), observed(call, "cpu")
    assert "max_pool2d_with_indices" in compare(profiled, unprofiled), "the two paths are one in this torch"
    assert compare(profiled, unprofiled, kernels(call, "cpu", dispatched=True)) == ""


@pytest.mark.parametrize("name", ["eager", "torch"])
def test_autograd_is_no_change_of_path(name):
    operator, implementation = registry.operator("gelu"), registry.implementation("gelu", name)
    case = operator.select("check", "cpu")[0]
    (x,) = inputs.make(case, "cpu", 1)
    call = bind(operator, implementation, case, "backward", [x], torch.randn_like(x))
    profiled = kernels(call, "cpu")
    assert profiled.names and not any("autograd" in n for n in profiled.names)
    assert compare(profiled, observed(call, "cpu")) == ""


def test_an_empty_observation_agrees_with_nothing():
    nothing = kernels(lambda: None, "cpu")
    assert nothing.note.startswith(NOT_LISTED) and nothing.names == ()
    seen = kernels_of(("mine", 1.0))
    for pair in ((nothing, seen), (seen, nothing)):
        assert compare(*pair) == nothing.note
    assert compare(seen, kernels_of(("mine", 0.5), (COPY, 0.5))) == ""
    assert compare(seen, kernels_of(("other", 1.0))) == (
        "only under a profiler: mine; only without one: other"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["triton", "cuda", "numba", "torch"])
def test_on_a_gpu_the_profiler_and_a_graph_name_the_same_kernels(name):
    x = torch.randn(512, 1000, device="cuda")
    implementation = registry.implementation("softmax", name)
    profiled = kernels(lambda: implementation.forward(x), "cuda")
    again = observed(lambda: implementation.forward(x), "cuda")
    assert profiled.names and not profiled.note and not again.note, (profiled, again)
    assert compare(profiled, again) == "", (profiled, again)
    assert verdict(name, profiled) == ""
    assert (verdict("triton", profiled) != "") == (name == "torch"), profiled  # a library's kernel alone
    assert sum(profiled.shares) == pytest.approx(1.0)


@pytest.mark.gpu
def test_on_a_gpu_a_library_s_product_under_another_name_is_detected():
    a = torch.randn(512, 512, device="cuda", dtype=torch.bfloat16)
    violation = verdict("triton", kernels(lambda: a @ a, "cuda"))
    assert "no kernel of its own ran" in violation and ("cublas" in violation or "cutlass" in violation), (
        violation
    )


@pytest.mark.gpu
def test_on_a_gpu_a_change_of_path_under_a_profiler_differs():
    x = torch.randn(512, 1000, device="cuda")
    honest = registry.implementation("softmax", "triton")

    def cheat() -> object:
        under = torch.autograd.profiler._is_profiler_enabled
        return honest.forward(x) if under else torch.softmax(x, -1)

    difference = compare(kernels(cheat, "cuda"), observed(cheat, "cuda"))
    assert "only under a profiler: " in difference and "only without one: " in difference, difference


@pytest.mark.gpu
def test_on_a_gpu_a_call_that_cannot_be_captured_is_reported():
    x = torch.randn(64, 64, device="cuda")
    profiled = kernels(lambda: x.sum(), "cuda")
    unprofiled = observed(lambda: x.sum().item(), "cuda")
    assert unprofiled.note.startswith(NOT_LISTED + "the call cannot be captured"), unprofiled
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert compare(profiled, unprofiled) == unprofiled.note


def test_a_list_in_which_nothing_computes_says_that_compiled_code_has_no_names():
    x = torch.randn(8, 8)
    library = ctypes.CDLL(None)  # a function called by its address appears in no list

    def copied_by_address():
        y = torch.empty(8, 8)
        library.memcpy(
            ctypes.c_void_p(y.data_ptr()), ctypes.c_void_p(x.data_ptr()), ctypes.c_size_t(x.nbytes)
        )
        return y

    assert "called by its address" in unnamed_work(kernels(copied_by_address, "cpu"))
    assert unnamed_work(kernels(lambda: torch.tanh(x), "cpu")) == ""
    assert unnamed_work(kernels_of(("mine", 1.0))) == "" == unnamed_work(kernels(lambda: None, "cpu"))
