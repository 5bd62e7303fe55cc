"""Sorting: the CUDA kernels in an emulator whose blocks run at once, planted faults, and arguments."""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.guarded_pages import place
from helpers.scan_emulator import COMPILER, EmulatorError, emulate
from weft import WeftError, ops
from weft.backends.nvrtc import CudaSource
from weft.ops.sort import ladder, with_cuda, with_eager, with_triton
from weft.ops.sort.spec import BITS

NEEDS_COMPILER = pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")
Sort = Callable[..., tuple[torch.Tensor, torch.Tensor]]
SMALL = with_cuda.Tile(threads=64, bytes_a_thread=16)  # 256 elements of 4 bytes
LENGTHS = (1, 2, 31, 97, 256)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of compiled kernels without a fault, which tests share."""
    return tmp_path_factory.mktemp("sort")


def _rows(dtype: torch.dtype, rows: int, columns: int) -> dict[str, torch.Tensor]:
    """Return adversarial rows; floats have both zeros, infinities, and NaNs of both signs."""
    generator = torch.Generator().manual_seed(rows * columns)
    at = torch.arange(rows * columns).view(rows, columns)
    few = torch.randint(-2, 3, (rows, columns), generator=generator)
    cases = {"sorted": at, "reversed": -at, "equal": torch.full_like(at, -3), "few": few}
    cases = {name: x.to(dtype) for name, x in cases.items()}
    if dtype.is_floating_point:
        x = torch.randn((rows, columns), generator=generator).to(dtype)
        special = x.clone().view(-1)
        signed_nan = torch.tensor(torch.nan, dtype=dtype)
        for step, value in ((5, 0.0), (7, -0.0), (11, torch.nan), (13, -signed_nan), (17, -torch.inf)):
            special[step // 2 :: step] = value
        special[3::19] = torch.inf
        return cases | {"normal": x, "special": special.view(rows, columns)}
    info = torch.iinfo(dtype)
    x = torch.randint(info.min, info.max, (rows, columns), generator=generator, dtype=dtype)
    x.view(-1)[::9], x.view(-1)[1::10] = info.max, info.min
    # All digits are alike but the highest, or but the lowest one.
    digit = torch.randint(0, 256, (rows, columns), generator=generator, dtype=dtype)
    return cases | {"uniform": x, "low": digit - 40, "high": digit << (8 * dtype.itemsize - 8)}


def _is_right(sort: Sort, x: torch.Tensor, descending: bool = False, pairs: bool = True) -> bool:
    """True if the bits of the values are those of the stable order, and the indices too."""
    values, indices = sort(x, descending, pairs)
    # On a CPU: on an H200 the library gave other bits for rows of 33 elements (gpu-suite-2026-11-26.txt).
    expected, order = (t.to(x.device) for t in torch.sort(x.cpu(), stable=True, descending=descending))
    bits = BITS[x.element_size()]
    same = torch.equal(values.view(bits), expected.contiguous().view(bits))
    return same and (not pairs or torch.equal(indices, order))


BY_ROWS = partial(with_cuda.by_rows, threads=32)
BY_PASSES = partial(with_cuda.by_passes, tile=SMALL)


@NEEDS_COMPILER
@pytest.mark.pooled(3, "emulated: sort")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", with_cuda.DTYPES, ids=str)
def test_rows_of_a_block_are_exact_in_the_emulator(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, libraries: Path
) -> None:
    emulate(monkeypatch, libraries)
    for columns in LENGTHS:
        for name, x in _rows(dtype, 2, columns).items():
            for descending in (False, True):
                for pairs in (False, True):
                    assert _is_right(BY_ROWS, x, descending, pairs), (name, columns, descending, pairs)
    several_warps = partial(with_cuda.by_rows, threads=128)
    assert all(_is_right(several_warps, x, True) for x in _rows(dtype, 2, 1021).values())


@NEEDS_COMPILER
@pytest.mark.pooled(3, "emulated: sort")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("wide", [False, True], ids=["narrow", "wide"])
@pytest.mark.parametrize("dtype", with_cuda.DTYPES, ids=str)
def test_passes_over_memory_are_exact_in_the_emulator(
    dtype: torch.dtype, wide: bool, monkeypatch: pytest.MonkeyPatch, libraries: Path
) -> None:
    """Rows of one tile, of exactly two, and of several with a last one of one element."""
    emulate(monkeypatch, libraries)
    sort = partial(BY_PASSES, wide=wide)
    for rows, columns in ((3, 1), (2, 512), (2, 2049)):
        for name, x in _rows(dtype, rows, columns).items():
            for descending, pairs in ((False, True), (True, False), (True, True)):
                assert _is_right(sort, x, descending, pairs), (name, columns, descending, pairs)


@NEEDS_COMPILER
@pytest.mark.pooled(3, "emulated: sort")
def test_strides_and_the_ends_of_pages_in_the_emulator(
    monkeypatch: pytest.MonkeyPatch, libraries: Path
) -> None:
    emulate(monkeypatch, libraries)
    wide = _rows(torch.float32, 4, 1400)["special"]
    for x in (wide[:, :700], wide[:1, :700].expand(3, -1), wide[:, ::2], wide[:, 1:601].T.contiguous().T):
        assert _is_right(BY_PASSES, x) and _is_right(partial(with_cuda.by_rows, threads=128), x)
    for at_end in (False, True):
        x = place(wide[:1, :1025].contiguous(), at_end)
        assert _is_right(BY_PASSES, x) and _is_right(partial(with_cuda.by_rows, threads=256), x)


@NEEDS_COMPILER
@pytest.mark.pooled(3, "emulated: sort")
def test_lanes_may_find_each_other_by_match(monkeypatch: pytest.MonkeyPatch, libraries: Path) -> None:
    emulate(monkeypatch, libraries)
    sort = partial(BY_PASSES, tile=SMALL._replace(match=True))
    assert all(_is_right(sort, x) for x in _rows(torch.int32, 2, 2049).values())


@NEEDS_COMPILER
@pytest.mark.pooled(3, "emulated: sort")
def test_look_back_gives_the_same_in_every_schedule(monkeypatch: pytest.MonkeyPatch, libraries: Path) -> None:
    """Hundreds of tiles, whose blocks start in random order."""
    emulate(monkeypatch, libraries)
    x = _rows(torch.int32, 1, 150 * 256 + 77)["uniform"]
    assert all(_is_right(BY_PASSES, x) for _ in range(3))


def test_the_method_follows_from_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record the launches on a device of 132 SMs, without running them."""
    launches: list[tuple[str, int, int]] = []
    defines: list[dict[str, str]] = []

    def kernel(source: CudaSource, name: str) -> Callable[..., None]:
        defines.append(dict(source.defines))
        return lambda blocks, threads, *arguments: launches.append((name, blocks, threads))

    monkeypatch.setattr(CudaSource, "__getitem__", kernel)
    monkeypatch.setattr(with_cuda, "num_sms", lambda *_, **__: 132)
    with_cuda.run(torch.empty(7, 4096, device="meta"), False, True)
    with_cuda.run(torch.empty(9, 33, device="meta"), False, False)
    assert launches == [("sort_rows", 7, 512), ("sort_rows", 9, 32)]
    for dtype, columns, width in (
        (torch.int32, 4097, 0), (torch.int64, 2049, 0), (torch.bfloat16, 2**28, 1), (torch.int64, 2**27, 1)
    ):  # fmt: skip
        launches.clear()
        with_cuda.run(torch.empty(columns, dtype=dtype, device="meta"), False, False)
        names = [name for name, _, _ in launches]
        assert names == ["count_digits"] + ["sort_pass"] * dtype.itemsize
        assert defines[-1]["WIDE"] == str(width)
        per_tile = int(defines[-1]["ITEMS"]) * int(defines[-1]["THREADS"])
        assert launches[1][1] == -(-columns // per_tile)


FAULTS = {
    # digits.cuh
    "-0 below 0": ("if (bits == SIGN) key = SIGN;", ""),
    "NaN by its bits": ("if ((Key)(bits & (Key)~SIGN) > (Key)INFINITY_BITS) key = (Key)~(Key)0;", ""),
    "the order of equal digits in a warp": (
        "return first + __popc(peers & below)",
        "return first + __popc(peers & ~below) - 1",
    ),
    "the counter is raised before all have read it": (
        "= warp_counts[digit];\n  __syncwarp();",
        "= warp_counts[digit];",
    ),
    "warps before are not counted": ("totals[j] += own;", "totals[j] = own;"),
    "a lane of the sum is left out": ("if (lane >= step) total", "if (lane > step) total"),
    "no barrier in the sum": (
        "if (lane == 31) sums[warp] = total;\n  __syncthreads();",
        "if (lane == 31) sums[warp] = total;",
    ),
    # onesweep.cu
    "tiles in the order of blockIdx": (
        "ticket[0] = (unsigned)atomicAdd(tickets + pass, 1ull);",
        "ticket[0] = gridDim.x - 1 - blockIdx.x;",
    ),
    "the flag is not waited for": (
        "while (value >> COUNT_BITS != partial && value >> COUNT_BITS != inclusive);",
        "while (false);\n    if (!value) return before;",
    ),
    "flags of the pass before": ("2 * (Count)pass + 1, inclusive", "(Count)1, inclusive"),
    "the look-back ends at a partial count": ("if (value >> COUNT_BITS == inclusive) return", "return"),
    "the inclusive count leaves the tile out": (
        "store_word(own_words + j, inclusive << COUNT_BITS | (before[j] + totals[j]));",
        "store_word(own_words + j, inclusive << COUNT_BITS | before[j]);",
    ),
    "past the row's end the first digit": (
        "if (!FULL && first + i * 32 >= size) digits[i] = LAST_DIGIT;",
        "if (!FULL && first + i * 32 >= size) digits[i] = 0;",
    ),
    "no barrier before the exchange of indices": (
        "  __syncthreads();\n  Count* moved_indices",
        "  Count* moved_indices",
    ),
    "no barrier before the exchange is read": (
        "  __syncthreads();\n\n#pragma unroll\n  for (int i = 0; i < ITEMS; ++i) {\n    const int place",
        "#pragma unroll\n  for (int i = 0; i < ITEMS; ++i) {\n    const int place",
    ),
    "a part is counted twice": ("begin + part_columns < columns ? begin + part_columns : columns", "columns"),
    "the last column of counters is left out": ("c < COLUMNS; ++c)", "c < COLUMNS - 1; ++c)"),
}  # fmt: skip
ROW_FAULTS = {
    "elements past the row's end are counted": (
        "if (first + i * 32 >= size) digits[i] = LAST_DIGIT;",
        "if (first + i * 32 >= size) digits[i] = 0;",
    ),
    "the highest digit is left out": (
        "shift + DIGIT_BITS == KEY_BITS) break",
        "shift + 2 * DIGIT_BITS == KEY_BITS) break",
    ),
    "no barrier before the exchange is read": (
        "    __syncthreads();\n    if (shift + DIGIT_BITS",
        "    if (shift + DIGIT_BITS",
    ),
    "indices are not moved": ("indices_of[i] = moved_indices[first + i * 32]", "indices_of[i] += 0"),
}


def _holds_in_a_child(check: Callable[[], bool]) -> bool:
    """Run a check in a forked process: a faulty kernel may write anywhere, or never end."""
    child = os.fork()
    if child == 0:
        signal.alarm(120)
        faulthandler.disable()
        torch.set_num_threads(1)  # the parent's pool of threads does not exist here
        try:
            os._exit(0 if check() else 1)
        except (EmulatorError, IndexError, RuntimeError):
            os._exit(1)
        finally:
            os._exit(77)  # the test itself is wrong
    status = os.waitpid(child, 0)[1]
    assert os.waitstatus_to_exitcode(status) != 77, "the check of the fault raised"
    return status == 0


@NEEDS_COMPILER
@pytest.mark.pooled(1, "faults: sort")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("fault", [None, *FAULTS, *(f"rows: {name}" for name in ROW_FAULTS)])
def test_a_planted_fault_is_caught(
    fault: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    of_rows = fault is not None and fault.startswith("rows: ")
    edit = None if fault is None else ROW_FAULTS[fault[6:]] if of_rows else FAULTS[fault]
    emulate(monkeypatch, tmp_path, edit)
    sort = partial(with_cuda.by_rows, threads=128) if of_rows else BY_PASSES
    if fault in ("the flag is not waited for", "flags of the pass before"):
        # With little work between the two, a tile often looks back before the one before has published.
        sort = partial(BY_PASSES, tile=with_cuda.Tile(threads=64, bytes_a_thread=4))
    rows = _rows(torch.float32, 2, 1000 if of_rows else 40 * 256 + 3)
    # A race shows in some schedules only.
    is_right = _holds_in_a_child(lambda: all(_is_right(sort, x) for _ in range(3) for x in rows.values()))
    assert is_right == (fault is None)


def _step(name: str, x: torch.Tensor, descending: bool, pairs: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if name == "bitonic":
        return ladder.by_bitonic(x, descending, threads=64), torch.empty(0)
    return ladder.by_separate_scan(x, descending, name == "exchange", threads=64), torch.empty(0)


STEPS = ("bitonic", "separate scan", "exchange")


@NEEDS_COMPILER
@pytest.mark.pooled(3, "emulated: sort")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("dtype", with_cuda.DTYPES, ids=str)
def test_each_step_of_the_ladder_is_exact_in_the_emulator(
    dtype: torch.dtype, step: str, monkeypatch: pytest.MonkeyPatch, libraries: Path
) -> None:
    emulate(monkeypatch, libraries)
    sort = partial(_step, step)
    for columns in (1, 100, 512, 1021):
        for name, x in _rows(dtype, 2, columns).items():
            assert _is_right(sort, x, False, False) and _is_right(sort, x, True, False), (name, columns)


STEP_FAULTS = {
    "bitonic: all runs rise": ("is_above != ((i & run) == 0)", "!is_above"),
    "bitonic: equal keys in any order": ("places[i] > places[other])", "false)"),
    "bitonic: no barrier": ("      }\n      __syncthreads();", "      }"),
    "exchange: a scan without its carry": ("before = carry[0];", "before = 0;"),
    "exchange: digits within tiles": ("- starts[j];", "+ 0;"),
    "separate scan: past the row's end": ("(int)place < size", "true"),
    "separate scan: counts of another digit": (
        "(row * DIGITS + d) * tiles + tile] = table",
        "(row * DIGITS + d) * tiles + tile] = 1 + table",
    ),
}


@NEEDS_COMPILER
@pytest.mark.pooled(1, "faults: sort")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("fault", STEP_FAULTS)
def test_a_fault_in_each_step_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    emulate(monkeypatch, tmp_path, STEP_FAULTS[fault])
    sort = partial(_step, fault.partition(":")[0])
    rows = _rows(torch.float32, 2, 1021).values()
    assert not _holds_in_a_child(
        lambda: all(_is_right(sort, x, False, False) for _ in range(3) for x in rows)
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", with_cuda.DTYPES, ids=str)
def test_triton_keeps_every_bit_in_both_directions(dtype: torch.dtype) -> None:
    """In Triton's interpreter: 16-bit floats too, since the kernel reads integers."""
    for name, x in _rows(dtype, 2, 37).items():
        for descending in (False, True):
            for pairs in (False,) if dtype == torch.int64 else (False, True):
                assert _is_right(with_triton.launch, x, descending, pairs), (name, pairs)


def test_eager_has_the_stable_order_in_both_directions() -> None:
    """The bits of a NaN are not compared: torch's gather of bfloat16 may change them on a CPU."""
    for dtype in with_cuda.DTYPES:
        for name, x in _rows(dtype, 3, 101).items():
            for descending in (False, True):
                values, indices = with_eager.forward(x, descending=descending)
                expected, order = torch.sort(x, stable=True, descending=descending)
                assert torch.equal(indices, order), (dtype, name)
                is_zero = values == 0
                assert torch.equal(values.isnan(), expected.isnan())
                assert torch.equal(values[~values.isnan()], expected[~expected.isnan()])
                assert torch.equal(values[is_zero].signbit(), expected[is_zero].signbit())


@pytest.mark.parametrize("impl", ["eager", "torch", "triton"])
def test_integers_are_sorted_by_the_public_function(impl: str) -> None:
    """``sort`` has cases in floats only: a case has a gradient."""
    for dtype in (torch.int32, torch.int64):
        if impl == "triton" and dtype == torch.int64:
            with pytest.raises(WeftError, match="int64 and its index"):
                ops.sort(torch.ones(3, dtype=dtype), impl=impl)
            continue
        for x in _rows(dtype, 2, 50).values():
            values, indices = ops.sort(x, descending=True, impl=impl)
            expected, order = torch.sort(x, stable=True, descending=True)
            assert torch.equal(values, expected) and torch.equal(indices, order)


def test_implementations_differentiate_alike() -> None:
    x, grad = torch.randint(-3, 4, (2, 40)).float(), torch.randn(2, 40)
    for impl in ("eager", "torch", "triton"):
        leaf = x.clone().requires_grad_()
        values, indices = ops.sort(leaf, impl=impl)
        assert not indices.requires_grad
        expected = torch.zeros_like(x).scatter(-1, indices, grad)
        assert torch.equal(torch.autograd.grad(values, leaf, grad)[0], expected)


def test_arguments_without_an_answer_get_one_clear_error() -> None:
    leaf = torch.ones(3, requires_grad=True)
    calls: list[tuple[Callable[..., Any], Any, dict[str, Any]]] = [
        (ops.sort, torch.tensor(1.0), {}),
        (ops.sort, torch.ones(3), {"descending": 1}),
        (ops.sort, torch.ones(3, dtype=torch.uint8), {}),
        (ops.sort, [3.0, 1.0], {}),
        (ops.sort_keys, torch.ones(3), {"descending": None}),
        (ops.sort_keys, leaf, {}),
    ]
    for function, x, options in calls:
        with pytest.raises(WeftError, match="sort") as caught:
            function(x, **options)
        assert caught.value.expected and caught.value.got
    with torch.no_grad():
        assert torch.equal(ops.sort_keys(leaf), leaf)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", with_cuda.DTYPES, ids=str)
def test_cuda_keeps_every_bit_on_a_gpu(dtype: torch.dtype) -> None:
    """Rows of a block, of one tile and of many, with indices and without, integers too."""
    for rows, columns in ((5, 1), (7, 33), (3, 2048), (3, 4096), (3, 4097), (2, 300007), (1, 5000011)):
        for name, x in _rows(dtype, rows, columns).items():
            for pairs in (False, True):
                for descending in (False, True):
                    assert _is_right(with_cuda.run, x.cuda(), descending, pairs), (name, columns, pairs)
    for x in _rows(dtype, 2, 70001).values():
        assert _is_right(partial(with_cuda.by_passes, wide=True), x.cuda(), True)


@pytest.mark.gpu
def test_rows_that_need_wide_words_on_a_gpu() -> None:
    """One row of 2^28 + 5 elements in a 16-bit type, compared with a count of each value."""
    n = 2**28 + 5
    x = torch.randint(-30000, 30000, (n,), device="cuda").short().view(torch.bfloat16)
    x = torch.where(x.isnan(), 1.0, x).to(torch.bfloat16)
    assert with_cuda.needs_wide(x.dtype, n)
    values = with_cuda.run(x, False, False)[0]
    assert bool((values[:-1] <= values[1:]).all())
    key = lambda v: torch.bincount(v.view(torch.int16).int() + 32768, minlength=65536)  # noqa: E731
    assert torch.equal(key(values), key(x))
