"""CUDA norm kernels executed on a CPU by an emulator: barriers, pipelines and clusters.

The emulator switches threads in a random order, another one in each call. Kernels run in float32 and are
compared with float64, on row counts that no team divides, row lengths that no vector divides, and rows far
from zero.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from helpers.guarded_pages import place
from helpers.norm_emulator import COMPILER, Emulated, build
from weft.backends.nvrtc import CudaSource
from weft.ops._common import philox_dropout
from weft.ops.norms import with_cuda, with_eager
from weft.ops.norms.candidates import backward_candidates
from weft.ops.norms.configs import BackwardConfig, BlockConfig, PersistentConfig, RowLoopConfig
from weft.ops.norms.kernel_variant import KernelVariant
from weft.ops.norms.long_configs import LongConfig
from weft.ops.norms.spec import layer_norm64, rms_norm64
from weft.ops.norms.warp_configs import WarpBackwardConfig, WarpConfig, warp_config

EPS = 1e-5
SM90_SMEM = 228 << 10
# Backward: 1, 2, 4 and 16 blocks a row, with a warp that coordinates each; three teams of two warps; the same
# about a single reference; three teams of one warp; one block a row and one warp a row, both without a tail.
ONE_BLOCK = LongConfig(threads=96, vecs_per_thread=2, cluster=1, stages=3)
CLUSTER_OF_TWO = replace(ONE_BLOCK, threads=64, vecs_per_thread=1, cluster=2)
CLUSTER_OF_FOUR = replace(ONE_BLOCK, threads=32, cluster=4, stages=4, weights_in_registers=False)
CLUSTER_OF_SIXTEEN = replace(ONE_BLOCK, threads=32, vecs_per_thread=1, cluster=16)
TEAMS_OF_TWO_WARPS = PersistentConfig(
    threads=192, team=64, vecs_per_thread=2, stages=3, weights_in_registers=False
)
SINGLE_REFERENCE = replace(TEAMS_OF_TWO_WARPS, single_reference=True)
TEAMS_OF_ONE_WARP = PersistentConfig(threads=96, team=32, vecs_per_thread=4, stages=2)
WHOLE_BLOCK = PersistentConfig(
    threads=96, team=96, vecs_per_thread=1, stages=3, no_tail=True, single_reference=True
)
FULL_WARPS = PersistentConfig(threads=96, team=32, vecs_per_thread=3, stages=2, no_tail=True)
# Backward by lanes of a warp: eight rows in a block of two warps, and two rows.
EIGHT_LANES = WarpBackwardConfig(lanes=8, vecs_per_thread=2, threads=64, blocks_per_sm=1)
THIRTY_TWO_LANES = replace(EIGHT_LANES, lanes=32)
# Forward: two rows at a time, the last row alone; two blocks for two rows; two blocks that loop over rows.
TWO_ROWS = BlockConfig(threads=64, vecs_per_thread=2, rows=2)
TWO_ROWS_IN_CLUSTER = BlockConfig(threads=64, vecs_per_thread=1, cluster=2, rows=2)
ROW_LOOP = RowLoopConfig(threads=64, vecs_per_thread=2, cluster=2, rows=4, blocks_per_sm=1)
PIPELINED = replace(ROW_LOOP, stages=2)
# Forward of rows of odd length, with their columns: lanes of a warp, a block, a cluster.
ODD_ROWS = {
    "8-lanes": (WarpConfig(lanes=8, vecs_per_thread=2), 61),
    "32-lanes": (WarpConfig(lanes=32, vecs_per_thread=3), 345),
    "block": (BlockConfig(threads=96, vecs_per_thread=2), 741),
    "cluster": (BlockConfig(threads=64, vecs_per_thread=2, cluster=2), 1001),
    "persistent-block": (LongConfig(threads=96, vecs_per_thread=2, cluster=1, stages=3, backward=False), 741),
    "persistent-cluster": (
        LongConfig(threads=32, vecs_per_thread=2, cluster=4, stages=4, backward=False),
        789,
    ),
}


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulate a device with two SMs and clusters; torch computes norm_sum_partials."""
    monkeypatch.setattr(with_cuda, "num_sms", lambda _: 2)
    monkeypatch.setattr(with_cuda, "smem_per_sm", lambda _: SM90_SMEM)
    monkeypatch.setattr(with_cuda, "has_tma", lambda _: True)
    monkeypatch.setattr(with_cuda, "_float32", lambda n, _: torch.full((n,), torch.nan))

    def kernel(source: CudaSource, name: str) -> Any:
        if name.startswith("norm_backward"):  # the reference that 16-bit rows use
            source = replace(source, defines=(*source.defines, ("EXACT_MEAN", "0")))
        if name == "norm_sum_partials":
            return _sum_partials
        return Emulated(build(source, name))

    monkeypatch.setattr(CudaSource, "__getitem__", kernel)


def _sum_partials(grid: tuple[int, int], _block: int, partials: Any, dw: Any, db: Any, *sizes: int) -> None:
    sums = partials.view(grid[1], *sizes).sum(1)
    dw.copy_(sums[0])
    if grid[1] > 1:
        db.copy_(sums[1])


def _inputs(rows: int, columns: int, offset: float = 1e4) -> tuple[torch.Tensor, ...]:
    """Return x, weight, bias and another tensor like x. Row 1 of x is far from zero, row 2 has outliers."""
    torch.manual_seed(rows)
    x = torch.randn(rows, columns)
    x[1] += offset
    x[2, ::61] *= 1e3  # the first outlier lies in the reference itself
    return x, torch.randn(columns), torch.randn(columns), torch.randn(rows, columns)


def _assert_close(actual: torch.Tensor, expected: torch.Tensor, units: float) -> None:
    """Compare the largest error with ``units`` of 2^-24 of the root mean square."""
    worst = float((actual.double() - expected).abs().max() / expected.square().mean().sqrt())
    assert worst <= units * 2**-24, f"{worst / 2**-24:.1f} units"


needs_compiler = pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")


@needs_compiler
@pytest.mark.parametrize(("parts", "columns"), [(1, 128), (14, 300), (16, 5), (66, 129)])
def test_few_partial_rows_are_added_up(parts: int, columns: int) -> None:
    variant = KernelVariant(
        x_dtype=torch.float32, weight_dtype=torch.float32, vec_width=4, centred=False, residual=False
    )
    kernel = with_cuda.multi_pass_backward_source(variant)
    partials, sums = torch.randn(parts, columns), torch.empty(columns)
    threads = with_cuda.COLUMN_THREADS
    few = Emulated(build(kernel, "norm_sum_few_partials"))
    few(-(-columns // threads), threads, partials, sums, sums, parts, columns)
    _assert_close(sums, partials.double().sum(0), 8)


@needs_compiler
@pytest.mark.usefixtures("emulated")
def test_float32_rows_with_an_outlying_first_element_keep_their_digits() -> None:
    torch.manual_seed(5)
    x, weight, bias = torch.randn(15, 67), torch.randn(67), torch.randn(67)
    x[:, 0] = 4.0
    y, _ = with_cuda.launch_forward(x, None, weight, bias, EPS)
    expected = layer_norm64(x.double(), weight.double(), bias.double(), EPS)
    _assert_close(y, expected, 14)  # as torch; with the first element as reference it was 40


def test_teams_of_several_warps_are_limited_to_fifteen_a_block() -> None:
    """A block has 16 named barriers, and __syncthreads uses one: a sixteenth team would share it."""
    with pytest.raises(ValueError, match="16 teams"):
        PersistentConfig(threads=1024, team=64, vecs_per_thread=2, stages=3)
    PersistentConfig(threads=1024, team=32, vecs_per_thread=2, stages=3)  # teams of one warp need none
    for columns in (768, 1024, 4096, 16384, 65536):
        variant = KernelVariant(
            x_dtype=torch.bfloat16, weight_dtype=torch.bfloat16, vec_width=8, centred=False, residual=False
        )
        assert len(backward_candidates(columns, variant, SM90_SMEM)) > 1


@pytest.mark.slow
@needs_compiler
@pytest.mark.usefixtures("emulated")
def test_layer_norm_by_clusters_agrees_with_float64() -> None:
    x, weight, bias, grad = _inputs(7, 388)
    y, _ = with_cuda.launch_forward(x, None, weight, bias, EPS, config=TWO_ROWS_IN_CLUSTER)
    leaves = [v.double().requires_grad_() for v in (x, weight, bias)]
    expected = layer_norm64(leaves[0], leaves[1], leaves[2], EPS)
    _assert_close(y, expected.detach(), 40)
    gradients = torch.autograd.grad(expected, leaves, grad.double())
    dx, _, dw, db = with_cuda.launch_backward(grad, None, x, weight, EPS, True, config=CLUSTER_OF_TWO)
    for actual, expected_gradient in zip((dx, dw, db), gradients, strict=True):
        _assert_close(actual, expected_gradient, 40)


@pytest.mark.slow
@needs_compiler
@pytest.mark.usefixtures("emulated")
@pytest.mark.sampled(2)  # each configuration is compiled for two seconds
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        ROW_LOOP,
        replace(ROW_LOOP, cluster=1),
        replace(ROW_LOOP, rows=1),
        PIPELINED,
        replace(PIPELINED, stages=3, weights_in_registers=True),
        replace(PIPELINED, rows=1, stages=1),
    ],
)
def test_row_loops_agree_with_float64(config: RowLoopConfig, add: bool) -> None:
    x, weight, bias, residual = _inputs(11, 388 if config.cluster == 1 else 836)
    y, s = with_cuda.launch_forward(x, residual if add else None, weight, bias, EPS, config=config)
    assert torch.equal(s, x + residual if add else x)
    _assert_close(y, layer_norm64(s.double(), weight.double(), bias.double(), EPS), 40)


@pytest.mark.slow
@needs_compiler
@pytest.mark.usefixtures("emulated")
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("config", "centred"),
    [
        (TEAMS_OF_TWO_WARPS, False),
        (TEAMS_OF_ONE_WARP, True),
        (SINGLE_REFERENCE, True),
        (SINGLE_REFERENCE, False),
    ],
)
def test_backward_with_residual_by_teams_agrees_with_float64(config: PersistentConfig, centred: bool) -> None:
    # With a single reference the row's mean is one float: no 16-bit row lies as far from zero as the float32
    # row of the other configurations.
    x, weight, bias, grad = _inputs(23, 420, 16.0 if config.single_reference else 1e4)
    grad_s = torch.randn_like(x)
    leaves = [v.double().requires_grad_() for v in (x, weight, bias)[: 2 + centred]]
    s, scale = leaves[:2]
    y = layer_norm64(s, scale, leaves[2], EPS) if centred else rms_norm64(s, scale, EPS)
    expected = torch.autograd.grad(y, leaves, grad.double())
    dx, dr, dw, db = with_cuda.launch_backward(grad, grad_s, x, weight, EPS, centred, config=config)
    _assert_close(dx, expected[0] + grad_s, 40)
    assert torch.equal(dx, dr)
    for actual, expected_gradient in zip((dw, db), expected[1:], strict=False):
        _assert_close(actual, expected_gradient, 40)
    # Both gradients in one memory: the kernel writes the same bits there twice.
    arguments: Any = (grad, grad_s, x, weight, EPS, centred, config)
    shared = with_cuda.launch_backward(*arguments, shares=True)
    assert shared[0].data_ptr() == shared[1].data_ptr() != dx.data_ptr()
    assert all(torch.equal(a, b) for a, b in zip(shared, (dx, dr, dw, db), strict=True))


@pytest.mark.slow
@needs_compiler
@pytest.mark.usefixtures("emulated")
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("columns", "forward_config", "config"),
    [
        (388, TWO_ROWS, CLUSTER_OF_TWO),
        (420, None, TEAMS_OF_TWO_WARPS),
        (384, None, FULL_WARPS),
        (384, None, WHOLE_BLOCK),
    ],
)
def test_fused_dropout_drops_the_same_elements_as_eager(
    columns: int, forward_config: BlockConfig | None, config: PersistentConfig
) -> None:
    """Compare every bit of the sum and which gradients are 0.

    Rows of 97, 105 and 96 vectors: some odd rows begin in the middle of a block of random words.
    """
    p, seed = 0.3, 2**62 + 12345
    x, weight, bias, residual = _inputs(19, columns)
    grad, grad_s = torch.randn_like(x), torch.randn_like(x)
    dropout = (seed, philox_dropout.pack_threshold_and_scale(p))
    y, s = with_cuda.launch_forward(x, residual, weight, bias, EPS, forward_config, dropout)
    eager = with_eager.DROPOUT_ADD_LAYER_NORM.forward(x, residual, weight, bias, p=p, seed=seed, eps=EPS)
    assert torch.equal(s, eager[1])
    _assert_close(y, layer_norm64(s.double(), weight.double(), bias.double(), EPS), 40)
    dx, *others = with_cuda.launch_backward(grad, grad_s, s, weight, EPS, True, config, dropout)
    keep = philox_dropout.keep_mask(x, p, seed)
    assert torch.equal(dx != 0, keep)
    assert torch.equal(dx, torch.where(keep, others[0] * philox_dropout.keep_scale(p), 0.0))
    leaves = [v.double().requires_grad_() for v in (s, weight, bias)]
    expected = torch.autograd.grad(layer_norm64(leaves[0], leaves[1], leaves[2], EPS), leaves, grad.double())
    expected = (expected[0] + grad_s, *expected[1:])
    for actual, expected_gradient in zip(others, expected, strict=True):
        _assert_close(actual, expected_gradient, 40)


@pytest.mark.slow
@needs_compiler
@pytest.mark.usefixtures("emulated")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("layout", ODD_ROWS)
def test_rows_of_odd_length_agree_with_float64_and_no_load_leaves_them(
    layout: str, centred: bool, add: bool, shifted: bool
) -> None:
    """Rows begin at every element of a vector; ``shifted``: x's and the residual's at different ones."""
    config, columns = ODD_ROWS[layout]
    if add and isinstance(config, LongConfig):
        pytest.skip("rows with a residual are not for this kernel")
    x, weight, bias, residual = _inputs(11, columns)
    x[2, ::61] /= (
        100  # an output near 60 times the root mean square rounds by more than the bound, torch's too
    )
    rows = [place(x, shifted), place(residual, False) if add else None]
    y, s = with_cuda.launch_forward(*rows, weight, bias if centred else None, EPS, config)
    assert torch.equal(s, x + residual if add else x)
    wide = (s.double(), weight.double())
    expected = layer_norm64(*wide, bias.double(), EPS) if centred else rms_norm64(*wide, EPS)
    _assert_close(y, expected, 40)


@pytest.mark.slow
@needs_compiler
@pytest.mark.usefixtures("emulated")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize(
    ("columns", "config"),
    [
        (421, TEAMS_OF_TWO_WARPS),
        (421, SINGLE_REFERENCE),
        (397, TEAMS_OF_ONE_WARP),
        (389, CLUSTER_OF_TWO),
        (741, ONE_BLOCK),
        (789, CLUSTER_OF_FOUR),
        (1997, CLUSTER_OF_SIXTEEN),
        (67, replace(TEAMS_OF_ONE_WARP, vecs_per_thread=1)),
        (61, EIGHT_LANES),
        (345, replace(THIRTY_TWO_LANES, vecs_per_thread=3)),
    ],
)
def test_backward_of_rows_of_odd_length_agrees_with_float64(
    columns: int, config: BackwardConfig, centred: bool, add: bool, shifted: bool
) -> None:
    """A team's rows all begin at the same element of a vector; 45 rows end in the middle of its teams.

    ``shifted``: the rows of x and of the gradient of s begin at other elements than those of dx.
    """
    is_single = isinstance(config, PersistentConfig) and config.single_reference
    x, weight, bias, grad = _inputs(45, columns, 16.0 if is_single else 1e4)
    x[2, ::61] /= 100
    grad_s = torch.randn_like(x)
    expected = _gradients64(x, weight, bias, grad, centred)
    rows = (place(grad, False), place(grad_s, shifted) if add else None, place(x, shifted))
    dx, dr, dw, db = with_cuda.launch_backward(*rows, weight, EPS, centred, config=config)
    _assert_close(dx, expected[0] + grad_s if add else expected[0], 40)
    assert torch.equal(dx, dr)
    for actual, expected_gradient in zip((dw, db), expected[1:], strict=False):
        _assert_close(actual, expected_gradient, 40)


@pytest.mark.slow
@needs_compiler
@pytest.mark.sampled(1)
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("config", [TEAMS_OF_TWO_WARPS, EIGHT_LANES, CLUSTER_OF_TWO])
def test_backward_of_whole_vectors_at_odd_addresses_agrees_with_float64(config: BackwardConfig) -> None:
    """All rows begin equally; the number of blocks or clusters is then no multiple of a vector."""
    columns = 60 if config is EIGHT_LANES else 420
    x, weight, bias, grad = _inputs(7, columns)
    x[2, ::61] /= 100
    shifted = [torch.cat((t.new_zeros(1), t.flatten()))[1:].view(t.shape) for t in (grad, x)]
    assert all(t.data_ptr() % 16 for t in shifted)
    expected = _gradients64(x, weight, bias, grad, True)
    dx, _, dw, db = with_cuda.launch_backward(shifted[0], None, shifted[1], weight, EPS, True, config)
    for actual, expected_gradient in zip((dx, dw, db), expected, strict=True):
        _assert_close(actual, expected_gradient, 40)


def _gradients64(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, grad: torch.Tensor, centred: bool
) -> tuple[torch.Tensor, ...]:
    """Return the float64 gradients of x, weight and (``centred``) bias."""
    leaves = [v.double().requires_grad_() for v in (x, weight, bias)[: 2 + centred]]
    y = layer_norm64(*leaves[:3], EPS) if centred else rms_norm64(*leaves[:2], EPS)
    return torch.autograd.grad(y, leaves, grad.double())


@pytest.mark.slow
@needs_compiler
@pytest.mark.usefixtures("emulated")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize(
    ("rows", "columns", "config"),
    [
        (45, 32, replace(EIGHT_LANES, no_tail=True, vecs_per_thread=1)),
        (45, 28, replace(EIGHT_LANES, lanes=4)),
        (3, 52, EIGHT_LANES),
        (21, 168, replace(THIRTY_TWO_LANES, lanes=16, vecs_per_thread=3)),
        (23, 256, replace(THIRTY_TWO_LANES, no_tail=True)),
    ],
)
def test_backward_of_short_rows_by_lanes_agrees_with_float64(
    rows: int, columns: int, config: WarpBackwardConfig, centred: bool, add: bool
) -> None:
    """Row counts that no block divides; the groups of a block have different numbers of rows, or none."""
    x, weight, bias, grad = _inputs(rows, columns)
    x[2, ::61] /= 100
    grad_s = torch.randn_like(x) if add else None
    expected = _gradients64(x, weight, bias, grad, centred)
    dx, dr, dw, db = with_cuda.launch_backward(grad, grad_s, x, weight, EPS, centred, config=config)
    _assert_close(dx, expected[0] if grad_s is None else expected[0] + grad_s, 40)
    assert torch.equal(dx, dr)
    for actual, expected_gradient in zip((dw, db), expected[1:], strict=False):
        _assert_close(actual, expected_gradient, 40)


@pytest.mark.slow
@needs_compiler
@pytest.mark.usefixtures("emulated")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("rows", [1, 3, 31])
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize(
    ("columns", "config"),
    [
        (512, replace(CLUSTER_OF_TWO, no_tail=True)),
        (484, CLUSTER_OF_FOUR),
        (1792, CLUSTER_OF_SIXTEEN),
        (768, replace(ONE_BLOCK, no_tail=True, stages=5, weights_in_registers=False)),
    ],
)
def test_backward_of_long_rows_agrees_with_float64(
    rows: int, columns: int, config: LongConfig, centred: bool
) -> None:
    """Clusters that have one row, two, or many; some blocks of a cluster have no part of the row."""
    x, weight, bias, grad = _inputs(max(rows, 3), columns)
    x, grad = x[:rows], grad[:rows]
    expected = _gradients64(x, weight, bias, grad, centred)
    runs = [with_cuda.launch_backward(grad, None, x, weight, EPS, centred, config=config) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    dx, _, dw, db = runs[0]
    for actual, expected_gradient in zip((dx, dw, db), expected, strict=False):
        _assert_close(actual, expected_gradient, 40)


@pytest.mark.slow
@needs_compiler
@pytest.mark.sampled(1)
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("rows", [1, 31])
@pytest.mark.parametrize("columns", [1792, 2048])
def test_forward_of_long_rows_agrees_with_float64(rows: int, columns: int) -> None:
    """Aligned rows, of which blocks of a cluster have all their vectors or some have none."""
    x, weight, bias, _ = _inputs(max(rows, 3), columns)
    x[2, ::61] /= 100
    config = replace(CLUSTER_OF_SIXTEEN, no_tail=columns == 2048, backward=False)
    for b in (bias, None):
        y, _ = with_cuda.launch_forward(x[:rows], None, weight, b, EPS, config)
        wide = (x[:rows].double(), weight.double())
        expected = rms_norm64(*wide, EPS) if b is None else layer_norm64(*wide, b.double(), EPS)
        _assert_close(y, expected, 40)


@pytest.mark.slow
@needs_compiler
@pytest.mark.sampled(1)
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("rows", [2, 5, 44])
def test_clusters_with_rows_of_several_kinds_agree_with_float64(rows: int) -> None:
    """Rows begin at 4 elements of a vector: both clusters have several kinds, or one begins with a kind."""
    x, weight, bias, grad = _inputs(max(rows, 3), 341)
    x, grad = x[:rows], grad[:rows]
    x[2:3, ::61] /= 100
    expected = _gradients64(x, weight, bias, grad, True)
    rows_placed = (place(grad, False), None, place(x, False))
    dx, _, dw, db = with_cuda.launch_backward(*rows_placed, weight, EPS, True, config=ONE_BLOCK)
    for actual, expected_gradient in zip((dx, dw, db), expected, strict=True):
        _assert_close(actual, expected_gradient, 40)


@pytest.mark.slow
@needs_compiler
@pytest.mark.usefixtures("emulated")
def test_gradient_of_a_short_row_does_not_depend_on_the_rows_beside_it() -> None:
    """Every row of a batch, and all rows of parts of it, have the same bits; so have two runs."""
    x, weight, _, grad = _inputs(37, 60)
    dx, _, dw, db = with_cuda.launch_backward(grad, None, x, weight, EPS, True, EIGHT_LANES, invariant=True)
    for first, last in ((0, 1), (5, 7), (20, 37)):
        part = with_cuda.launch_backward(
            grad[first:last], None, x[first:last], weight, EPS, True, EIGHT_LANES, invariant=True
        )
        assert torch.equal(part[0], dx[first:last])
    again = with_cuda.launch_backward(grad, None, x, weight, EPS, True, EIGHT_LANES, invariant=True)
    assert all(torch.equal(a, b) for a, b in zip(again, (dx, dx, dw, db), strict=True))


@pytest.mark.slow
@needs_compiler
@pytest.mark.usefixtures("emulated")
def test_short_aligned_rows_by_lanes_agree_with_float64() -> None:
    x, weight, bias, residual = _inputs(11, 160)
    config = WarpConfig(lanes=8, vecs_per_thread=5)
    y, s = with_cuda.launch_forward(x, residual, weight, bias, EPS, config)
    assert torch.equal(s, x + residual)
    _assert_close(y, layer_norm64(s.double(), weight.double(), bias.double(), EPS), 40)


@pytest.mark.parametrize(
    ("columns", "peel", "expected"),
    [
        (320, 0, (8, 5)),
        (768, 0, (32, 3)),
        (64, 0, (8, 1)),
        (1024, 0, None),
        (1025, 1, (32, 4)),
        (8, 0, (8, 1)),
    ],
)
def test_short_rows_take_the_lanes_with_the_fewest_empty_places(
    columns: int, peel: int, expected: tuple[int, int] | None
) -> None:
    bf16 = torch.bfloat16
    variant = KernelVariant(
        x_dtype=bf16, weight_dtype=bf16, vec_width=8, centred=False, residual=False, peel=peel
    )
    config = warp_config(columns, variant)
    assert (config and (config.lanes, config.vecs_per_thread)) == expected
