"""The emulator of CUDA C++ computes what a GPU computes, counts accesses, and refuses what a GPU forbids."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from weft.core.errors import WeftError
from weft.learn import cuda_program
from weft.learn.candidate import Candidate
from weft.learn.cuda_program import Counts, Program
from weft.learn.grading import Refused, compare

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def program(tmp_path: Path, text: str, signature: str = "void run(float* x, float* y, int n)") -> Program:
    file = tmp_path / "solution.cu"
    file.write_text(text)
    return Program(Candidate(file), signature)


def kernel(body: str, launch: str = "<<<1, n>>>") -> str:
    return (
        f"__global__ void k(float* x, float* y, int n) {{\n  int i = threadIdx.x;\n{body}\n}}\n"
        f"void run(float* x, float* y, int n) {{ k{launch}(x, y, n); }}\n"
    )


def run(tmp_path: Path, body: str, n: int = 64, launch: str = "<<<1, n>>>") -> tuple[np.ndarray, Counts]:
    built = program(tmp_path, kernel(body, launch))
    x, y = built.array("x", np.arange(4 * n, dtype=np.float32)), built.empty("y", 4 * n)
    counts = built.call("run", x, y, n, case="n")
    return y.read(partial=True), counts


def refusal(tmp_path: Path, body: str, n: int = 64, launch: str = "<<<1, n>>>") -> str:
    with pytest.raises(Refused) as caught:
        run(tmp_path, body, n, launch)
    return caught.value.reason


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("y[i + 4 * n] = 0;", "line 3: thread 0 of block 0 writes outside of y: element 256 of 256"),
        ("y[i] = x[i - 1];", "line 3: thread 0 of block 0 reads outside of x: element -1 of 256"),
        ("y[i] = y[i + 1];", "line 3: thread 0 of block 0 reads element 1 of y, which nothing has written"),
        ("y[0] = x[i];", "race: thread 1 of block 0 and thread 0 write element 0 of y"),
        (
            "__shared__ float s[64];\n y[i] = s[i];",
            "line 4: thread 0 of block 0 reads element 0 of s, which nothing has written: no thread of",
        ),
        (
            "__shared__ float s[64];\n y[i] = s[63 - i];\n __syncthreads();\n s[i] = x[i];",
            "line 4: thread 0 of block 0 reads element 63 of s, which nothing has written yet. Is a barrier "
            "missing? (line 6)",
        ),
        (
            "float s[4];\n s[i] = x[i];\n y[i] = s[0];",
            "line 4: thread 4 of block 0 writes s[4], outside of s",
        ),
        (
            "__shared__ float s[4][8];\n s[i % 4][i] = x[i];",
            "line 4: thread 8 of block 0 writes s[i % 4][8], outside of its row: it has 8 elements, 0 to 7",
        ),
        (
            "__shared__ float s[64];\n s[i] = x[i];\n y[i] = s[i ? i - 1 : 0];",
            "line 5: race: thread 1 of block 0 reads element 0 of s, which thread 0 writes with no "
            "barrier between "
            "(line 4)",
        ),
        (
            "__shared__ float s[64];\n s[i] = x[i];\n __syncthreads();\n float v = s[63 - i];\n s[i] = v;",
            "line 6: race: thread 32 of block 0 reads element 31 of s, which thread 31 writes with "
            "no barrier between (line 7)",
        ),
        ("if (i < 5) __syncthreads();", "barrier: thread 0 of block 0 waits in __syncthreads, and thread 5"),
        (
            "if (i < 5) __syncthreads();\n else\n __syncthreads();",
            "waits in another __syncthreads than thread 0",
        ),
        ("if (i < 5) __shfl_sync(~0u, 1, 0);", "waits for lane 5, which its mask names and which has ended"),
        ("for (;;) x[i] += 0;", "line 3: endless loop: thread 0 of block 0"),
        ("for (;;) __syncthreads();", "line 3: endless loop: thread 0 of block 0 does not leave a loop with"),
        ("float4 v = *(float4*)(x + 1);\n y[i] = v.x;", "16 bytes at an address that is no multiple of 16"),
        ("y[i] = *(float*)0;", "memory that is not the device's"),
        (
            "extern __shared__ float s[];\n s[i] = 0;",
            "writes s[0], outside of s: the launch gives 0 bytes of shared memory",
        ),
        ("y[i] = undefined;", "line 3: 'undefined' was not declared in this scope"),
    ],
)
def test_a_wrong_access_has_a_reason(tmp_path: Path, body: str, reason: str) -> None:
    assert reason.replace("'", "") in refusal(tmp_path, body).replace("‘", "").replace("’", "").replace(
        "'", ""
    )


def test_an_index_far_beyond_the_edge_belongs_to_its_array(tmp_path: Path) -> None:
    reason = refusal(tmp_path, "x[5000 + i] = 0;")  # y lies behind x
    assert "writes outside of x: element 5000 of 256" in reason


def test_the_end_of_an_array_is_a_right_address(tmp_path: Path) -> None:
    body = "__shared__ float s[64];\n s[i] = x[i];\n __syncthreads();\n float sum = 0;\n"
    output, _ = run(tmp_path, body + "for (float* p = s; p < &s[64]; ++p) sum += *p;\n y[i] = sum;")
    assert output[5] == 63 * 32


def test_a_race_between_blocks_is_found(tmp_path: Path) -> None:
    reason = refusal(tmp_path, "if (blockIdx.x == 0) y[i] = 1;\nelse x[i] = y[i];", launch="<<<2, n>>>")
    assert "thread 0 of block 1 reads element 0 of y, which thread 0 of block 0 writes" in reason


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        # Blocks run one after another here, so that these give the right sum; on a GPU they need not.
        (
            "if (blockIdx.x == 0 && i == 0) *y = 0;\n __syncthreads();\n if (i == 0) atomicAdd(y, x[0]);",
            "line 5: race: thread 0 of block 1 updates element 0 of y, which thread 0 of block 0 writes",
        ),
        (
            "if (i == 0) atomicExch(y, 0.f);\n __syncthreads();\n if (blockIdx.x == 1 && i == 0) x[1] = *y;",
            "line 5: race: thread 0 of block 1 reads element 0 of y, which several threads update",
        ),
    ],
)
def test_an_atomic_hides_no_plain_access_of_another_block(tmp_path: Path, body: str, reason: str) -> None:
    text = kernel(body).replace("k<<<1, n>>>(x, y, n);", "cudaMemset(y, 0, 4); k<<<2, n>>>(x, y, n);")
    built = program(tmp_path, text)
    with pytest.raises(Refused) as caught:
        built.call("run", built.array("x", np.ones(64, np.float32)), built.empty("y", 1), 64, case="sum")
    assert reason in caught.value.reason


def test_the_last_block_may_use_what_all_blocks_updated(tmp_path: Path) -> None:
    body = "__threadfence();\n if (i == 0 && atomicAdd(y, 1.f) == 2) { x[0] = *y; *y = 0; }"
    text = kernel(body).replace("k<<<1, n>>>(x, y, n);", "cudaMemset(y, 0, 4); k<<<3, n>>>(x, y, n);")
    built = program(tmp_path, text)
    x, y = built.empty("x", 1), built.empty("y", 1)
    built.call("run", x, y, 64, case="ticket")
    assert x.read()[0] == 3 and y.read()[0] == 0


@pytest.mark.skipif(
    cuda_program.UNSET_LOCALS not in cuda_program._learner_options(shutil.which("g++") or "g++"),
    reason="needs GCC 12",
)
def test_a_local_variable_without_a_value_is_no_zero(tmp_path: Path) -> None:
    output, _ = run(tmp_path, "float sum;\n if (i < 5) sum = 0;\n sum += x[i];\n y[i] = sum;")
    assert output[4] == 4 and abs(output[5]) > 1e38
    with pytest.raises(Refused, match="Does a variable start without a value"):
        compare("n", output[:64], np.arange(64, dtype=np.float32))


def test_atomics_and_second_launches_are_no_races(tmp_path: Path) -> None:
    body = "if (y[0] >= 0) atomicAdd(y, x[i]);"
    text = kernel(body).replace("k<<<1, n>>>(x, y, n);", "cudaMemset(y, 0, 4); k<<<3, n>>>(x, y, n);")
    built = program(tmp_path, text.replace("if (y[0] >= 0) ", ""))
    y = built.empty("y", 1)
    counts = built.call("run", built.array("x", np.arange(64, dtype=np.float32)), y, 64, case="sum")
    assert y.read()[0] == 3 * 63 * 32 and counts.global_atomics == 192
    mixed = program(tmp_path, text)
    with pytest.raises(Refused, match="race"):
        mixed.call("run", mixed.array("x", np.ones(64, np.float32)), mixed.empty("y", 1), 64, case="sum")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("index", "sectors"),
    [("i", 8), ("i * 2", 16), ("i * 4 % 256", 32), ("(i ^ 31)", 8), ("0", 2), ("i + 1", 10)],
)
def test_sectors_of_global_loads(tmp_path: Path, index: str, sectors: int) -> None:
    output, counts = run(tmp_path, f"y[i] = x[{index}];")
    assert counts.load_requests == 2 and counts.load_sectors == sectors
    assert counts.store_sectors == counts.store_ideal_sectors == 8
    assert output[5] == {"i": 5, "i * 2": 10, "i * 4 % 256": 20, "(i ^ 31)": 26, "0": 0, "i + 1": 6}[index]
    assert counts.worst_load == (0 if sectors in (2, 8) else 3)


def test_a_float4_is_one_access(tmp_path: Path) -> None:
    body = (
        "float4 v = ((const float4*)x)[i];\n v.x += 1;\n ((float4*)y)[i] = make_float4(v.x, v.y, v.z, v.w);"
    )
    output, counts = run(tmp_path, body)
    assert (output == np.arange(256) + (np.arange(256) % 4 == 0)).all()
    assert (counts.load_requests, counts.load_sectors, counts.store_requests) == (2, 32, 2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("index", "conflicts"),
    [("i", 0), ("i * 2 % 64", 2), ("i * 32 % 1024 + i / 32", 62), ("i * 33 % 1056", 0), ("0 * i", 0)],
)
def test_bank_conflicts(tmp_path: Path, index: str, conflicts: int) -> None:
    body = "__shared__ float s[2048];\n if (i == 0) for (int j = 0; j < 2048; ++j) s[j] = j;\n"
    body += " __syncthreads();\n"
    _, counts = run(tmp_path, body + f"y[i] = s[{index}];")
    assert counts.bank_conflicts == conflicts and counts.barriers == 1
    assert counts.worst_shared == (6 if conflicts else 0)


def test_active_lanes(tmp_path: Path) -> None:
    _, full = run(tmp_path, "y[i] = x[i];")
    _, half = run(tmp_path, "for (int j = 0; j < (i % 2 ? 0 : 200); ++j) y[i] = x[i];")
    assert full.active_lanes == 1 and 0.5 < half.active_lanes < 0.52


def test_warp_functions(tmp_path: Path) -> None:
    body = """
      float v = x[i];
      for (int d = 16; d; d /= 2) v += __shfl_down_sync(~0u, v, d);
      float up = __shfl_up_sync(~0u, x[i], 1), xor_ = __shfl_xor_sync(~0u, x[i], 3, 8);
      unsigned votes = __ballot_sync(~0u, i % 2);
      y[i] = v, y[i + n] = up, y[i + 2 * n] = xor_, y[i + 3 * n] = __popc(votes) + __any_sync(~0u, i == 40);
    """
    output, counts = run(tmp_path, body)
    down, up, xor_, votes = output.reshape(4, 64)
    assert down[0] == sum(range(32)) and down[32] == sum(range(32, 64))
    assert (up == np.where(np.arange(64) % 32 == 0, np.arange(64), np.arange(64) - 1)).all()
    assert (xor_ == (np.arange(64) ^ 3)).all() and (votes == 16 + (np.arange(64) >= 32)).all()
    assert counts.shuffles == 64 * 9


def test_lanes_of_a_warp_share_memory_after_syncwarp(tmp_path: Path) -> None:
    body = "__shared__ float s[64];\n s[i] = x[i];\n {}\n y[i] = s[i ^ 1];"
    assert "Is a barrier missing?" in refusal(tmp_path, body.format(""))
    output, _ = run(tmp_path, body.format("__syncwarp();"))
    assert (output[:64] == (np.arange(64) ^ 1)).all()


def test_dynamic_shared_and_constant_memory(tmp_path: Path) -> None:
    text = """__constant__ float weights[2];
__global__ void k(float* x, float* y, int n) {
  extern __shared__ float s[];
  s[threadIdx.x] = x[threadIdx.x] * weights[1];
  __syncthreads();
  y[threadIdx.x] = s[n - 1 - threadIdx.x];
}
void run(float* x, float* y, int n) {
  float w[2] = {3, 5};
  cudaMemcpyToSymbol(weights, w, sizeof w);
  k<<<1, n, n * sizeof(float)>>>(x, y, n);
}"""
    built = program(tmp_path, text)
    y = built.empty("y", 7)
    built.call("run", built.array("x", np.arange(7, dtype=np.float32)), y, 7, case="7")
    assert (y.read() == 5 * np.arange(6, -1, -1)).all()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("x[0] = 1;", "host code writes x, which is device memory"),
        (
            "float* d; cudaMalloc(&d, 4 * n); cudaMemcpy(d, y, 8 * n, cudaMemcpyDeviceToDevice);",
            "the copy's target",
        ),
        ("float h[4]; cudaMemcpy(h, y, 16, cudaMemcpyDeviceToHost);", "which nothing has written"),
        ("float h[4]; cudaMemcpy(h, x, 16, cudaMemcpyHostToDevice);", "the copy's target is host memory"),
        ("k<<<1, 2000>>>(x, y, n);", "2000 threads a block"),
        (
            "cudaStream_t s; k<<<1, 1, 0, s>>>(x, y, n);",
            "the launch of k (line 3): the stream is not created",
        ),
        ("k<<<0, 32>>>(x, y, n);", "the launch of k (line 3): a grid of 0 x 1 x 1 blocks is invalid"),
        (
            "float h[64]; k<<<1, 1>>>(h, y, n);",
            "line 1: thread 0 of block 0 reads memory that is not the device's",
        ),
    ],
)
def test_mistakes_of_host_code(tmp_path: Path, body: str, reason: str) -> None:
    text = "__global__ void k(float* x, float* y, int n) { y[0] = x[0]; }\n"
    built = program(tmp_path, text + f"void run(float* x, float* y, int n) {{\n{body}\n}}")
    with pytest.raises(Refused) as caught:
        built.call("run", built.array("x", np.ones(8, np.float32)), built.empty("y", 8), 8, case="host")
    assert reason in caught.value.reason


STREAMS = """__global__ void twice(float* x, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] *= 2;
}
void run(float* x, float* y, int n) {
  cudaStream_t s[2];
  float* d;
  cudaMalloc(&d, 4 * n);
  for (int i = 0; i < 2; ++i) cudaStreamCreate(&s[i]);
  for (int c = 0; c < 4; ++c) {
    float* part = d + c * n / 4;
    cudaMemcpyAsync(part, x + c * n / 4, n, cudaMemcpyHostToDevice, s[c % 2]);
    twice<<<n / 4 / 64, 64, 0, s[c % 2]>>>(part, n / 4);
    cudaMemcpyAsync(y + c * n / 4, part, n, cudaMemcpyDeviceToHost, s[c % 2]);
  }
  WAIT
}"""


@pytest.mark.parametrize("is_pinned", [True, False])
def test_streams_overlap_if_the_host_memory_is_pinned(tmp_path: Path, is_pinned: bool) -> None:
    built = program(tmp_path, STREAMS.replace("WAIT", "cudaDeviceSynchronize();"))
    x, y = np.arange(1024, dtype=np.float32), np.zeros(1024, np.float32)
    if is_pinned:
        built.pin(x), built.pin(y)
    counts = built.call("run", x, y, 1024, case="streams")
    assert (y == 2 * x).all()
    assert (counts.timeline < 0.7 * counts.serial_time) == is_pinned


def test_what_nothing_waits_for_has_not_happened(tmp_path: Path) -> None:
    built = program(tmp_path, STREAMS.replace("WAIT", "cudaStreamSynchronize(s[0]);"))
    x, y = np.arange(1024, dtype=np.float32), np.zeros(1024, np.float32)
    built.pin(x), built.pin(y)
    built.call("run", x, y, 1024, case="streams")
    quarters = (y.reshape(4, 256) == 2 * x.reshape(4, 256)).all(axis=1)
    assert quarters.tolist() == [True, False, True, False]


def test_without_a_compiler_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_program.shutil, "which", lambda name: None)
    with pytest.raises(WeftError, match=r"g\+\+.*hint: install"):
        cuda_program.require_compiler()
