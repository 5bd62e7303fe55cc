"""The histogram: CUDA kernels in an emulator, planted faults, values at the edges of bins, and arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from helpers.guarded_pages import place
from helpers.scan_emulator import COMPILER, emulate
from weft import WeftError, ops
from weft.core import registry
from weft.ops.histogram import ladder, with_cuda, with_triton
from weft.ops.histogram.spec import MAX_BINS, float_range, reference
from weft.workbench.calls.inputs import make

NEEDS_COMPILER = pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")
Arguments = tuple[torch.Tensor, int, float | None, float | None]


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of compiled kernels without a fault, which tests share."""
    return tmp_path_factory.mktemp("histogram")


def _expected(x: torch.Tensor, bins: int, low: float | None, high: float | None) -> torch.Tensor:
    return reference(x.double() if x.is_floating_point() else x, bins=bins, low=low, high=high)


def _bytes(n: int, order: str = "random") -> torch.Tensor:
    x = torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(n)).byte()
    return {"random": x, "equal": torch.full_like(x, 255), "sorted": x.sort().values}[order]


def _floats(n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return normal values with NaN, infinities, both zeros, the limits, and a stretch of equal values."""
    x = torch.randn(n, generator=torch.Generator().manual_seed(n))
    x[:7] = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, -2.5, 2.5])
    x[n // 2 : n // 2 + 40] = 1.25
    return x.to(dtype)


CALLS: dict[str, Callable[[], Arguments]] = {
    "bytes": lambda: (_bytes(3 * 4096 + 77), 256, None, None),
    "equal bytes": lambda: (_bytes(2 * 4096 + 5, "equal"), 256, None, None),
    "sorted bytes, few bins": lambda: (_bytes(4096, "sorted"), 100, None, None),
    "bytes, bins that none has": lambda: (_bytes(1000), 1000, None, None),
    "float32": lambda: (_floats(5003), 64, -2.5, 2.5),
    "float32, 16 columns": lambda: (_floats(2001), 512, -2.5, 2.5),
    "float32, 1 column": lambda: (_floats(1501), 8000, -2.5, 2.5),
    "float32, in memory": lambda: (_floats(1501), 9000, -2.5, 2.5),
    "float16": lambda: (_floats(4097, torch.float16), 10, -2.5, 2.5),
    "bfloat16": lambda: (_floats(4097, torch.bfloat16), 7, -2.5, 2.5),
    "int32": lambda: (torch.arange(-500, 3000, dtype=torch.int32), 1000, None, None),
}


@NEEDS_COMPILER
@pytest.mark.sampled(1)
@pytest.mark.parametrize("call", CALLS)
def test_each_kind_of_call_is_exact_in_the_emulator(
    call: str, monkeypatch: pytest.MonkeyPatch, libraries: Path
) -> None:
    """At both ends of a page no load leaves x; x begins at each distance from a multiple of 16 bytes."""
    emulate(monkeypatch, libraries)
    x, *arguments = CALLS[call]()
    for part in (place(x, False), place(x[1:], True), place(x, False)[3:], x[:5], x[:1]):
        counts = with_cuda.count(part, *arguments, threads=64)
        assert torch.equal(counts, _expected(part, *arguments)), (call, part.numel())


@NEEDS_COMPILER
def test_strided_elements_in_the_emulator(monkeypatch: pytest.MonkeyPatch, libraries: Path) -> None:
    emulate(monkeypatch, libraries)
    x = _bytes(4000).view(40, 100)
    for view in (x.T, x[:, ::3], x[:1].expand(9, 100), x[2:, 1:]):
        counts = with_cuda.count(view, 256, None, None, threads=64)
        assert torch.equal(counts, _expected(view, 256, None, None))


FAULTS = {
    "counters are not cleared": ("i < rows * COLUMNS; i += THREADS", "i < THREADS; i += THREADS"),
    "no barrier before the counters are read": (
        "  __syncthreads();\n  for (int bin = threadIdx.x; bin < min",
        "  for (int bin = threadIdx.x; bin < min",
    ),
    "a column is left out": ("c < COLUMNS; ++c) sum", "c < COLUMNS - 1; ++c) sum"),
    "the start is left out": ("threadIdx.x; i < head +", "threadIdx.x + head; i < head +"),
    "the end is left out": ("i < head + (n - tail); i", "i < head; i"),
    "equal bytes count once": ("* COLUMNS + lane), 16u)", "* COLUMNS + lane), 1u)"),
    "equal words are taken for equal bytes": (" && v.x == (v.x << 8 | v.x >> 24)", ""),
    "every block counts the ends": ("if (blockIdx.x == 0) count_ends", "count_ends"),
    "a byte's top bit is lost": ("shifted & 255u << SHIFT", "shifted & 127u << SHIFT"),
}


@NEEDS_COMPILER
@pytest.mark.sampled(1)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    emulate(monkeypatch, tmp_path, FAULTS[fault])
    calls = [torch.cat((_bytes(5003), _bytes(512, "equal"), _bytes(4).repeat(200), _bytes(3)))[1:]]
    # A race shows in some schedules only.
    counts = [with_cuda.count(x, 256, None, None, threads=64) for x in calls * 4]
    assert any(not torch.equal(c, _expected(calls[0], 256, None, None)) for c in counts)


FLOAT_FAULTS = {
    "the limit high is left out": ("v <= bins.high ?", "v < bins.high ?"),
    "the product at high is past the last bin": ("min((int)product, bins.count - 1)", "(int)product"),
    "rounded, not truncated": ("(int)product, bins", "(int)(product + 0.5f), bins"),
    "a quotient of other bits": (
        "__fmul_rn(__fsub_rn(v, bins.low), bins.scale)",
        "(v - bins.low) / (bins.high - bins.low) * bins.count",
    ),
    "fused": (
        "__fmul_rn(__fsub_rn(v, bins.low), bins.scale)",
        "fmaf(v, bins.scale, -bins.low * bins.scale)",
    ),
}


@NEEDS_COMPILER
@pytest.mark.sampled(1)
@pytest.mark.parametrize("fault", FLOAT_FAULTS)
def test_another_definition_of_a_bin_is_caught(
    fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Values at the edges of bins differ by the definition, as does an end that rounds past the last bin."""
    emulate(monkeypatch, tmp_path, FLOAT_FAULTS[fault])
    caught = False
    for bins, low, high in ((10, 0.1, 0.7), (63, -2.5, 2.5), (1000, -1e-3, 1e4)):
        x = _edges(bins, low, high)
        counts = with_cuda.count(x, bins, low, high, threads=64)
        caught |= not torch.equal(counts, _expected(x, bins, low, high))
    assert caught


def _edges(bins: int, low: float, high: float) -> torch.Tensor:
    """Return the edges of all bins in float32, and the nearest numbers on either side of each."""
    x = (low + torch.arange(bins + 1).double() * ((high - low) / bins)).float()
    infinity = torch.tensor(math.inf)
    return torch.cat((x, torch.nextafter(x, infinity), torch.nextafter(x, -infinity)))


@pytest.mark.parametrize("impl", ["eager", "torch", "triton"])
def test_values_at_edges_have_the_same_bin_everywhere(impl: str) -> None:
    for bins, low, high in ((10, 0.1, 0.7), (63, -2.5, 2.5), (1000, -1e-3, 1e4), (3, 1.0, 1.0 + 2**-22)):
        x = _edges(bins, low, high)
        assert torch.equal(ops.histogram(x, bins, low, high, impl=impl), _expected(x, bins, low, high))


def test_the_reference_rounds_each_result_once() -> None:
    """The bin of each element by exact fractions, each result of which is rounded to float32 once."""

    def rounded(value: Fraction) -> Fraction:
        # Of two float32 neighbours of a fraction, the nearer; the cases have no ties that matter here.
        near = torch.tensor(float(value), dtype=torch.float64).float()
        sides = [
            near,
            torch.nextafter(near, torch.tensor(math.inf)),
            torch.nextafter(near, -torch.tensor(math.inf)),
        ]
        return min((Fraction(s.item()) for s in sides), key=lambda s: abs(s - value))

    for bins, low, high in ((10, 0.1, 0.7), (63, -2.5, 2.5)):
        limits = float_range(bins, low, high)
        assert limits.scale == rounded(bins / (Fraction(limits.high) - Fraction(limits.low)))
        counts = torch.zeros(bins, dtype=torch.int64)
        x = _edges(bins, low, high)
        for value in x.tolist():
            if limits.low <= value <= limits.high:
                product = rounded(rounded(Fraction(value) - Fraction(limits.low)) * Fraction(limits.scale))
                counts[min(int(product), bins - 1)] += 1
        assert torch.equal(counts, _expected(x, bins, low, high))


@NEEDS_COMPILER
@pytest.mark.sampled(1)
@pytest.mark.parametrize("step", ladder.MAX_BINS)
def test_each_step_of_the_ladder_is_exact_in_the_emulator(
    step: str, monkeypatch: pytest.MonkeyPatch, libraries: Path
) -> None:
    emulate(monkeypatch, libraries)
    for x, *arguments in ((_bytes(1003), 256, None, None), (_bytes(130, "equal"), 256, None, None)):
        counts = ladder.count(step, x, *arguments, threads=64)
        assert torch.equal(counts, _expected(x, *arguments)), arguments


STEP_FAULTS = {
    "01_global_atomics": ("bin != NONE", "bin > 0"),
    "02_shared": ("  __syncthreads();\n  add_tables", "  add_tables"),
    "03_privatised": ("add_tables(table, WARPS,", "add_tables(table, WARPS - 1,"),
    "04_warp_aggregated": ("(unsigned)__popc(peers)", "1u"),
    "05_sorted": ("a > b == rising", "a > b"),
}


@NEEDS_COMPILER
@pytest.mark.sampled(1)
@pytest.mark.parametrize("step", STEP_FAULTS)
def test_a_fault_in_each_step_is_caught(step: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    emulate(monkeypatch, tmp_path, STEP_FAULTS[step])
    x = torch.cat((_bytes(1003), _bytes(40, "equal"), torch.zeros(3, dtype=torch.uint8)))
    counts = [ladder.count(step, x, 256, None, None, threads=64) for _ in range(4)]
    assert any(not torch.equal(c, _expected(x, 256, None, None)) for c in counts)


def test_a_step_says_how_many_bins_it_has_room_for() -> None:
    case = registry.operator("histogram").case("int32-2500-5000")
    supports = {
        s: registry.implementation("histogram", f"cuda/{s.replace('_', '-')}").supports
        for s in ladder.MAX_BINS
    }
    refused = [s for s, f in supports.items() if not f(case, "cuda")]
    assert refused == ["03_privatised"] and "1024 bins" in supports["03_privatised"](case, "cuda").reason


def test_columns_of_counters_fit_a_block() -> None:
    expected = {1: 32, 256: 32, 257: 16, 512: 16, 1024: 8, 8192: 1, 8193: 0}
    assert {bins: with_cuda.columns_of(torch.float32, bins) for bins in expected} == expected
    assert with_cuda.columns_of(torch.uint8, MAX_BINS) == 32


def test_many_bins_in_triton_are_counted_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(with_triton, "MAX_BINS", 8)
    x = _floats(3000)
    assert torch.equal(with_triton.forward(x, bins=100, low=-2.5, high=2.5), _expected(x, 100, -2.5, 2.5))


def test_cases_of_integers_have_the_order_that_their_name_says() -> None:
    operator = registry.operator("histogram")
    rising, falling, equal = (
        make(operator.case(f"uint8-2051-256-{order}"), "cpu", 3)[0]
        for order in ("sorted", "reversed", "equal")
    )
    assert (rising.int().diff() >= 0).all() and (falling.int().diff() <= 0).all()
    assert rising.unique().numel() > 200 and equal.unique().numel() == 1


@pytest.mark.slow
def test_it_is_traced_whole() -> None:
    x = _floats(300)
    torch._dynamo.reset()
    traced = torch.compile(
        lambda x: ops.histogram(x, 10, -1.0, 1.0, impl="triton"), fullgraph=True, backend="eager"
    )
    assert torch.equal(traced(x), _expected(x, 10, -1.0, 1.0))


def test_arguments_without_an_answer_get_one_clear_error() -> None:
    x, k = torch.ones(3), torch.ones(3, dtype=torch.int32)
    assert ops.histogram(x, 1, 1, 2).tolist() == [3]  # True is refused after 1 has been accepted
    grad = torch.ones(3, requires_grad=True)
    wrong = [
        *((x, bins, 0.0, 1.0) for bins in (0, -1, 1.5, True, MAX_BINS + 1, None)),
        *((x, 4, low, high) for low, high in ((1.0, 1.0), (2.0, 1.0), (math.nan, 1.0), (0.0, math.inf))),
        *(
            (x, 4, low, high)
            for low, high in ((None, 1.0), (0.0, None), (0.0, 1e-40), (0.0, 1e39), ("0", 1.0))
        ),
        *((x, 4, low, 1.0) for low in (True, 10**400)),
        (k, 4, 0.0, 1.0),
        (x.double(), 4, 0.0, 1.0),
        (k.bool(), 4, None, None),
        (grad, 4, 0.0, 1.0),
        ([1.0], 4, 0.0, 1.0),
    ]
    for arguments in wrong:
        with pytest.raises(WeftError, match="histogram") as caught:
            ops.histogram(*arguments)  # type: ignore[arg-type]
        assert caught.value.expected and caught.value.got
    with torch.no_grad():
        assert ops.histogram(grad, 2, 0, 1).tolist() == [0, 3]
