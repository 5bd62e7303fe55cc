"""Slips of people who know Python and begin with C++ are refused, with a message that names them."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from weft.learn import cuda_hints
from weft.learn.candidate import Candidate
from weft.learn.exercise import find, path
from weft.learn.grading import Refused

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

MALLOC = "cudaMalloc(&a, n * sizeof(float))"
FOUR = "    v.x *= a;\n    v.y *= a;\n    v.z *= a;\n    v.w *= a;\n"
LOOP = "for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {"
LAUNCH_2D = "label<<<dim3(bx, by), dim3(tx, ty)>>>"
REVERSED = "tile[count - 1 - t]"
# exercise, text of its answer, what stands there instead, what the reason must say
RUNS = [
    # Each of these passed, or was refused for another array or another cause.
    (
        "shared_tile",
        "float tile[64]",
        "float tile[32]",
        "line 7: thread 32 of block 0 writes tile[32], outside of tile: it has 32 elements, 0 to 31",
    ),
    ("shared_tile", "float tile[64]", "float tile[1]", "thread 1 of block 0 writes tile[1], outside of tile"),
    (
        "shared_tile",
        REVERSED,
        "tile[count - t]",
        "line 9: thread 0 of block 0 reads tile[64], outside of tile: it has 64 elements, 0 to 63",
    ),
    ("shared_tile", REVERSED, "tile[-t - 1]", "thread 0 of block 0 reads tile[-1], outside of tile"),
    ("shared_tile", REVERSED, "*(tile + count - t)", "reads tile[64], outside of tile: it has 64 elements"),
    ("shared_tile", REVERSED, "*(tile - t - 1)", "reads tile[-1], outside of tile: it has 64 elements"),
    ("shared_tile", REVERSED, "x[start + count - 1 - t]", "it is written, and nothing reads it"),
    ("shared_tile", REVERSED, f"{REVERSED} + 0 * x[start + t]", "load each once into tile"),
    ("shared_tile", "__shared__ float", "float", "tile is a local array: each thread has its own"),
    (
        "shared_tile",
        "if (t < count) tile[t] = x[start + t]",
        "if (t + 1 < count) tile[t] = x[start + t]",
        "reads element 63 of tile, which nothing has written: no thread of the block writes it; it writes 63 "
        "elements, 0 to 62",
    ),
    ("bank_padding", "tile[32][33]", "tile[16][33]", "writes tile[16], outside of tile: it has 16 rows"),
    ("bank_padding", "tile[32][33]", "tile[32][31]", "tile[r][31], outside of its row: it has 31 elements"),
    ("bank_padding", "tile[32][33]", "tile[33][32]", "A row is still 32 words: pad the second size"),
    ("dynamic_shared", "= row[columns", "= source[columns", "it is written, and nothing reads it"),
    ("who_runs_where", "  cudaFree(a);\n", "", "a was not freed: cudaFree(a);"),
    ("who_runs_where", MALLOC, "cudaMalloc(&a, n)", f"a has 1 byte, and one float needs 4: {MALLOC}"),
    (
        "who_runs_where",
        "cudaMemcpy(a, x",
        "cudaMemcpy((void*)x, a",
        "the target comes first, then the source",
    ),
    ("coalescing", "<<<rows, 64>>>", "<<<rows, columns>>>", "threads a block; 1 to 1024 are possible"),
    (
        "coalescing",
        "f * x[row * columns + column]",
        "f * x[row * columns + column] + 0 * x[column * rows]",
        "sectors of 32 bytes of x",
    ),
    ("matrix_index", "row < rows && ", "", "is the mask true for a row beyond the edge?"),
    ("matrix_index", " && column < columns", "", "Is the mask true for a column beyond the edge?"),
]
# Exact tests need no whole numbers: an int that should be a float must not pass.
RUNS += [
    (name, old, new, "All results are whole numbers: is a variable an int that should be a float?")
    for name, old, new in (
        ("reduce_tree", "__shared__ float s", "__shared__ int s"),
        ("scan_hillis_steele", "__shared__ float s", "__shared__ int s"),
        ("tiled_matmul", "float sum = 0", "int sum = 0"),
    )
]
RUNS += [
    ("warp_scan", "v += w;", "v += w;\n    __shfl_sync(~0u, v, 0);", "each lane calls 10 shuffles"),
    (
        "convolution",
        "k = threadIdx.x; k < 136; k += 128",
        "k = threadIdx.x ? 136 : 0; k < 136; ++k",
        "only 18%",
    ),
    ("tiled_matmul", "float sum = 0", "float sum", "Does a variable start without a value"),
]
SLIPS = [  # refused when it is compiled, or before
    ("ragged_mask", "(n + THREADS - 1) / THREADS", "-(-n // THREADS)", "hint: // starts a comment in C++"),
    ("ragged_mask", "threadIdx.x;", "threadIdx.x", "line 5: expected ',' or ';'"),
    ("ragged_mask", "/ THREADS;", "/ THREADS", "hint: a statement ends with ;"),
    ("ragged_mask", "x[i];", "x[i]", "hint: a statement ends with ;"),
    ("ragged_mask", "<<<blocks, THREADS>>>", "[blocks, THREADS]", "written scale<<<blocks, threads>>>(...)"),
    ("ragged_mask", "<<<blocks, THREADS>>>", "", "line 11: scale is called without <<< >>>"),
    ("ragged_mask", "<<<blocks, THREADS>>>", "<<<blocks>>>", "the launch has one number, and needs two"),
    ("ragged_mask", "(x, y, a, n);", "(x, y, n);", "line 11: scale takes 4 arguments, got 3"),
    ("ragged_mask", "(x, y, a, n);", "(n, x, y, a);", "the launch of scale does not fit its kernel"),
    ("ragged_mask", "if (i < n)", "if i < n:", "hint: an if is written: if (i < n) statement;"),
    ("ragged_mask", "if (i < n)", "# mask\n  if (i < n)", "hint: a comment starts with // in C++"),
    ("ragged_mask", "y[i] = a", "return a", "hint: a kernel returns nothing: assign to y[i]"),
    ("ragged_mask", "int i =", "i =", "hint: a variable's first line names its type: int i"),
    ("grid_stride", LOOP, "for i in range(n):", "hint: a loop is written: for (int i = start; i < n; i +="),
    ("matrix_index", "y[i] =", "y[row][column] =", "y is one-dimensional: y[row * columns + column]"),
    ("matrix_index", "y[i] =", "y[row, column] =", "y[row, column] is y[column] in C++"),
    ("launch_geometry", LAUNCH_2D, "label<<<(bx, by), (tx, ty)>>>", "(bx, by) is only by in C++; write dim3"),
    ("launch_geometry", LAUNCH_2D, "dim3 grid = (bx, by);\n  label<<<grid, 1>>>", "write dim3 grid(bx, by)"),
    ("launch_geometry", "blockIdx.y * gridDim.x + blockIdx.x", "blockIdx", "choose blockIdx.x or blockIdx.y"),
    ("who_runs_where", MALLOC, "a = cudaMalloc(n)", "takes two arguments: cudaMalloc(&a, bytes)"),
    (
        "who_runs_where",
        MALLOC,
        "cudaMalloc(a, n)",
        "takes the address of the variable: cudaMalloc(&a, bytes)",
    ),
    (
        "who_runs_where",
        "cudaMemcpy(a, x",
        "cudaMemcpy(x, a",
        "the target comes first, and x may only be read",
    ),
    ("who_runs_where", "cudaFree(a)", "cudaFree(&a)", "takes the pointer itself: cudaFree(a)"),
    ("shared_tile", "__syncthreads()", "__syncthreads", "a call has parentheses: __syncthreads();"),
    ("float4_tail", "float4* y4", "const float4* y4", "y4 points to const, which may only be read"),
    ("float4_tail", FOUR, "    v = a * v;\n", "a float4 has no arithmetic: v.x *= a;"),
    ("ragged_mask", "if (i < n)", "if (0 <= i < n)", "0 <= i < n compares twice"),
    ("ragged_mask", "if (i < n)", "if (i = n - 1 = 3)", "hint: = assigns, == compares"),
    ("reduce_tree", "__shared__ float s[256]", "__shared__ float s[256] = {0}", "has no first value"),
    ("reduce_tree", "__shared__ float s[256]", "__shared__ float s[blockDim.x]", "known before the launch"),
    ("reduce_blocks", "atomicAdd(sum, v)", "atomicAdd(sum[0], v)", "takes an address, and a value of the"),
    ("warp_vote", "__popc", "popc", "this name starts with two underscores: __popc"),
    ("scan_blelloch", "s[k] += a;", "s[k], a = s[k] + a, 0;", "an assignment to two at once"),
    ("register_tile", "tb[j][x]", "tb[j, x]", "tb[j, x] is tb[x] in C++; write tb[j][x]"),
    ("convolution", "cudaMemcpyToSymbol(w", "cudaMemcpyToSymbol(&w", "takes the array itself"),
    ("streams", "128, 0, ", "128, ", "a stream is the fourth"),
]


def refusal(folder: Path, name: str, old: str, new: str) -> str:
    exercise = find(name)
    answer = exercise.source_file("answer").read_text()
    assert old in answer, f"{name}: the answer has no longer {old!r}"
    file = folder / "solution.cu"
    file.write_text(answer.replace(old, new))
    with pytest.raises(Refused) as caught:
        list(exercise.grader().grade(Candidate(file), np.random.default_rng(1)))
    return str(caught.value)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("name", "old", "new", "reason"), RUNS)
def test_a_wrong_program_is_refused_for_its_cause(
    name: str, old: str, new: str, reason: str, tmp_path: Path
) -> None:
    assert reason in refusal(tmp_path, name, old, new)


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("name", "old", "new", "reason"), SLIPS)
def test_a_slip_from_python_has_a_hint(name: str, old: str, new: str, reason: str, tmp_path: Path) -> None:
    message = refusal(tmp_path, name, old, new)
    assert reason in message
    assert "eft_" not in message and "WeftL" not in message, "an internal name"
    assert message.startswith("compile: line ") and len(message.splitlines()) == 3


def test_right_files_have_no_slips() -> None:
    for exercise in path():
        for kind in ("answer", "start", "wrong", "lucky") if exercise.track == "cuda" else ():
            text = exercise.source_file(kind).read_text()
            assert not cuda_hints.find_slip(text), f"{exercise.id}, {kind}"


def test_comments_are_no_slips() -> None:
    code = "__global__ void k(int n) {}\nvoid f() { k<<<1, 2>>>(3); }\n"
    slip = "void g() { k[1, 2](3); }\n"
    assert not cuda_hints.find_slip(f"{code}// {slip}")
    assert cuda_hints.find_slip(code + slip).startswith("line 3: k is a kernel")
