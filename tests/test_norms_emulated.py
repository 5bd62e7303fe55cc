"""The norms' blocks and teams, executed on a CPU: what a compiler alone does not prove of them.

Barriers, rings and clusters, in an order of threads drawn anew each time, in float32 and against
float64; row counts that no team divides, rows that no access fills, rows far from zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from norm_emulator import COMPILER, Emulated, build
from weft.backends.nvrtc import CudaSource
from weft.ops._shared import norm_cuda, philox_dropout
from weft.ops._shared.norm_candidates import candidates_backward
from weft.ops._shared.norm_configs import Block, Kind, Stay, Walk
from weft.ops._shared.norm_spec import layer_norm64, rms_norm64
from weft.ops.dropout_add_layer_norm import with_eager

EPS = 1e-5
PAIR = Stay(threads=64, team=64, vectors=1, stages=2, cluster=2)  # two blocks a row
TEAMS = Stay(threads=192, team=64, vectors=2, stages=3, held=False)  # three teams of two warps
LEAN = replace(TEAMS, lean=True)
ALONE = Stay(threads=96, team=32, vectors=4, stages=2)  # three teams of a warp
WHOLE = Stay(threads=96, team=96, vectors=1, stages=3, full=True, lean=True)  # a block's row
FILLED = Stay(threads=96, team=32, vectors=3, stages=2, full=True)  # a warp's row, filled
THREE = Block(threads=64, vectors=2, rows=2)  # two rows at a time, the last by itself
TWO = Block(threads=64, vectors=1, cluster=2, rows=2)  # two blocks for two rows
WALK = Walk(threads=64, vectors=2, cluster=2, rows=4, resident=1)  # two blocks, four rows
FLOW = replace(WALK, stages=2)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Two multiprocessors with clusters; kernels run by the emulator, parts added up by torch."""
    properties = SimpleNamespace(
        multi_processor_count=2, shared_memory_per_multiprocessor=228 << 10
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    for asked in (norm_cuda._units, norm_cuda.room):
        asked.cache_clear()

    def kernel(source: CudaSource, name: str) -> Any:
        if name == "norm_backward":  # about what 16-bit rows are summed about
            source = replace(source, defines=(*source.defines, ("EXACT", "0")))
        return _add_up if name == "norm_sum" else Emulated(build(source, name, tmp_path))

    monkeypatch.setattr(CudaSource, "__getitem__", kernel)
    yield
    for asked in (norm_cuda._units, norm_cuda.room):
        asked.cache_clear()


def _add_up(grid: tuple[int, int], _block: int, part: Any, dw: Any, db: Any, *sizes: int) -> None:
    sums = part.view(grid[1], *sizes).sum(1)
    dw.copy_(sums[0])
    if grid[1] > 1:
        db.copy_(sums[1])


def _rows(rows: int, columns: int, far: float = 1e4) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(rows)
    x = torch.randn(rows, columns)
    x[1] += far  # from zero
    x[2, ::61] *= 1e3  # outliers, the first of them in the reference itself
    return x, torch.randn(columns), torch.randn(columns), torch.randn(rows, columns)


def _close(got: torch.Tensor, want: torch.Tensor, units: float) -> None:
    worst = float((got.double() - want).abs().max() / want.square().mean().sqrt())
    assert worst <= units * 2**-24, f"{worst / 2**-24:.1f} units"


needs_compiler = pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")


@needs_compiler
@pytest.mark.usefixtures("emulated")
def test_float32_rows_whose_first_element_lies_far_off_keep_their_digits() -> None:
    torch.manual_seed(5)
    x, weight, bias = torch.randn(15, 67), torch.randn(67), torch.randn(67)
    x[:, 0] = 4.0
    y, _ = norm_cuda.forward(x, None, weight, bias, EPS)
    want = layer_norm64(x.double(), weight.double(), bias.double(), EPS)
    _close(y, want, 14)  # as torch; about the first element it was 40


def test_a_block_has_fifteen_barriers_for_its_teams() -> None:
    """With sixteen teams of two warps the last one's barrier was the block's own."""
    with pytest.raises(ValueError, match="16 teams"):
        Stay(threads=1024, team=64, vectors=2, stages=3)
    Stay(threads=1024, team=32, vectors=2, stages=3)  # warps alone need none
    for columns in (768, 1024, 4096, 16384, 65536):
        kind = Kind(x=torch.bfloat16, w=torch.bfloat16, access=8, centred=False, add=False)
        assert len(candidates_backward(columns, kind, 228 << 10)) > 1


@pytest.mark.slow
@needs_compiler
@pytest.mark.usefixtures("emulated")
def test_layer_norm_by_clusters_answers_what_float64_does() -> None:
    x, weight, bias, grad = _rows(7, 388)
    y, _ = norm_cuda.forward(x, None, weight, bias, EPS, config=TWO)
    wide = [v.double().requires_grad_() for v in (x, weight, bias)]
    want = layer_norm64(wide[0], wide[1], wide[2], EPS)
    _close(y, want.detach(), 40)
    gradients = torch.autograd.grad(want, wide, grad.double())
    dx, _, dw, db = norm_cuda.backward(grad, None, x, weight, EPS, True, config=PAIR)
    for got, expected in zip((dx, dw, db), gradients, strict=True):
        _close(got, expected, 40)


@pytest.mark.slow
@needs_compiler
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        WALK,
        replace(WALK, cluster=1),
        replace(WALK, rows=1),
        FLOW,
        replace(FLOW, stages=3, held=True),
        replace(FLOW, rows=1, stages=1),
    ],
)
def test_clusters_that_take_one_row_after_another_answer_what_float64_does(
    config: Walk, add: bool
) -> None:
    x, weight, bias, more = _rows(11, 388 if config.cluster == 1 else 836)
    y, s = norm_cuda.forward(x, more if add else None, weight, bias, EPS, config=config)
    assert torch.equal(s, x + more if add else x)
    _close(y, layer_norm64(s.double(), weight.double(), bias.double(), EPS), 40)


@pytest.mark.slow
@needs_compiler
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("config", "centred"), [(TEAMS, False), (ALONE, True), (LEAN, True), (LEAN, False)]
)
def test_the_backward_of_a_sum_by_teams_of_a_block_answers_what_float64_does(
    config: Stay, centred: bool
) -> None:
    # A lean row's mean is one float: no 16-bit row lies as far from zero as this float32 row.
    x, weight, bias, grad = _rows(23, 420, 16.0 if config.lean else 1e4)
    more = torch.randn_like(x)
    wide = [v.double().requires_grad_() for v in (x, weight, bias)[: 2 + centred]]
    s, scale = wide[:2]
    y = layer_norm64(s, scale, wide[2], EPS) if centred else rms_norm64(s, scale, EPS)
    want = torch.autograd.grad(y, wide, grad.double())
    dx, dr, dw, db = norm_cuda.backward(grad, more, x, weight, EPS, centred, config=config)
    _close(dx, want[0] + more, 40)
    assert torch.equal(dx, dr)
    for got, expected in zip((dw, db), want[1:], strict=False):
        _close(got, expected, 40)


@pytest.mark.slow
@needs_compiler
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("columns", "way", "config"),
    [(388, THREE, PAIR), (420, None, TEAMS), (384, None, FILLED), (384, None, WHOLE)],
)
def test_what_is_dropped_on_the_way_is_what_eager_drops(
    columns: int, way: Block | None, config: Stay
) -> None:
    """Every bit of the sum and of which gradients are 0: rows of 97, 105 and 96 accesses, so that
    those of odd rows begin in the middle of a block of random words."""
    p, seed = 0.3, 2**62 + 12345
    x, weight, bias, residual = _rows(19, columns)
    grad, more = torch.randn_like(x), torch.randn_like(x)
    dropout = (seed, philox_dropout.rule(p))
    y, s = norm_cuda.forward(x, residual, weight, bias, EPS, config=way, dropout=dropout)
    _, eager = with_eager.forward(x, residual, weight, bias, p=p, seed=seed, eps=EPS)
    assert torch.equal(s, eager)
    _close(y, layer_norm64(s.double(), weight.double(), bias.double(), EPS), 40)
    found = norm_cuda.backward(grad, more, s, weight, EPS, True, config=config, dropout=dropout)
    kept = philox_dropout.kept(x, p, seed)
    assert torch.equal(found[0] != 0, kept)
    assert torch.equal(found[0], torch.where(kept, found[1] * philox_dropout.scale(p), 0.0))
    wide = [v.double().requires_grad_() for v in (s, weight, bias)]
    want = torch.autograd.grad(layer_norm64(wide[0], wide[1], wide[2], EPS), wide, grad.double())
    for got, expected in zip(found[1:], (want[0] + more, *want[1:]), strict=True):
        _close(got, expected, 40)
