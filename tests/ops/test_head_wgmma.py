"""The LM head's loss by products that write exponentials, in the emulator; planted faults are seen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers import warp_emulator
from ops.test_matmul_wgmma import emulated  # noqa: F401
from weft.ops._common.products import wgmma_fused
from weft.ops._common.products.wgmma_model import MAX_SPLITS
from weft.ops.losses import head_wgmma, with_cuda
from weft.ops.losses.spec import LossOptions, linear_cross_entropy_reference
from weft.ops.losses.with_eager import linear_cross_entropy_forward

BF16 = torch.bfloat16
IGNORED = -100
needs_compiler = pytest.mark.skipif(
    warp_emulator.COMPILER is None, reason="no g++ to compile the kernel with"
)
ROWS, INNER, COLUMNS, CHUNK = 140, 72, 267, 128


def head_inputs(scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x, the weight and targets, a tenth of which are ignored."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, INNER, generator=generator).to(BF16)
    weight = (torch.randn(COLUMNS, INNER, generator=generator) * scale * INNER**-0.5).to(BF16)
    targets = torch.randint(COLUMNS, (ROWS,), generator=generator)
    targets[torch.rand(ROWS, generator=generator) < 0.1] = IGNORED
    return x, weight, targets


def largest_error(scale: float, z_loss: float) -> float:
    """Return the largest error of loss and gradients, in units of the eager implementation's."""
    x, weight, targets = head_inputs(scale)
    params = {"ignore_index": IGNORED, "z_loss": z_loss}
    exact = linear_cross_entropy_reference(x.double(), weight.double(), targets, **params)
    eager = linear_cross_entropy_forward(x, weight, targets, **params)
    outputs = head_wgmma.forward(x, weight, targets, LossOptions(**params), CHUNK)
    ratios = []
    for y, baseline, answer in zip(outputs, eager, exact, strict=True):
        assert y.dtype == baseline.dtype and y.shape == baseline.shape
        errors = [(t.double() - answer).abs().nan_to_num(1e9).max() for t in (y, baseline)]
        rms = answer.square().mean().sqrt() * torch.finfo(y.dtype).eps
        ratios.append(float(errors[0] / (2 * errors[1] + 2 * rms)))
    return max(ratios)


@needs_compiler
@pytest.mark.pooled(2, "emulated: head_wgmma")
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("scale", "z_loss"), [(1.0, 0.0), (2.0, 1e-3), (60.0, 0.0)])
def test_loss_and_gradients_are_right(scale: float, z_loss: float, emulated: None) -> None:  # noqa: F811
    """Two chunks, the second of 12 rows. With a scale of 60 logits are far from those of the targets."""
    assert largest_error(scale, z_loss) < 1


@needs_compiler
@pytest.mark.pooled(2, "emulated: head_wgmma")
def test_rows_without_a_finite_loss(emulated: None) -> None:  # noqa: F811
    """An ignored row is not read; a target out of range gives NaN, as a row with NaN does."""
    x, weight, targets = head_inputs()
    options = LossOptions()
    targets[3], x[3] = IGNORED, torch.nan
    loss, dx, dweight = head_wgmma.forward(x, weight, targets, options)
    assert loss.isfinite() and dweight.isfinite().all() and dx.isfinite().all() and (dx[3] == 0).all()
    for target in (COLUMNS, -1):
        targets[5] = target
        loss, dx, _ = head_wgmma.forward(x, weight, targets, options)
        assert loss.isnan() and dx[5].isnan().all() and dx[:5].isfinite().all() and dx[6:].isfinite().all()
    targets[5], x[5] = 0, torch.nan
    loss, dx, _ = head_wgmma.forward(x, weight, targets, options)
    assert loss.isnan() and dx[5].isnan().all() and dx[6:].isfinite().all()


@needs_compiler
def test_a_masked_target_beside_logits_far_below_zero(emulated: None) -> None:  # noqa: F811
    """Its row's loss is inf, and its softmax counts in dW, although exp(logit - 0) would be 0 everywhere."""
    x, weight, targets = head_inputs()
    weight[:, 0], weight[7, 1], targets[targets == 7] = -120, -torch.inf, 8
    x[:, 0], x[:, 1] = 0, 1  # column 7 is masked in all rows
    x[135, 0], targets[135] = 1, 7  # in the second chunk
    loss, _, dweight = head_wgmma.forward(x, weight, targets, LossOptions(ignore_index=IGNORED), CHUNK)
    assert loss.isinf()
    counts = targets != IGNORED
    p = torch.softmax(x.double() @ weight.double().t(), 1)[counts]
    p[torch.arange(len(p)), targets[counts]] -= 1
    exact = p.t() @ x[counts].double()
    # Column 0 of x is 0 in all other rows: this is that row's softmax, minus 1 at the target.
    assert torch.allclose(dweight[:, 0].double(), exact[:, 0], rtol=0.01)


@needs_compiler
def test_the_public_implementation_takes_it_on_hopper(
    emulated: None,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(head_wgmma, "has_wgmma", lambda device: True)
    x, weight, targets = head_inputs()
    expected = head_wgmma.forward(x, weight, targets, LossOptions())
    outputs = with_cuda.linear_cross_entropy_forward(x, weight, targets)
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))
    assert not head_wgmma.supports(x, weight, LossOptions(label_smoothing=0.1))
    assert not head_wgmma.supports(x.half(), weight.half(), LossOptions())
    assert not head_wgmma.supports(x[:10], weight, LossOptions())
    assert not head_wgmma.supports(x[:, :71], weight[:, :71], LossOptions())


def test_scratch_memory_stays_within_its_budget() -> None:
    """All that :func:`head_wgmma.forward` allocates beside its outputs, at GPT-2's and at Llama 3's size."""
    for rows, inner, columns, limit in ((16384, 768, 50304, 300 << 20), (8192, 4096, 128256, 1 << 30)):
        size = head_wgmma.chunk_rows(rows, inner, columns)
        exponentials, low = size * columns * 2, columns * inner
        sums, scaled = size * -(-columns // 64) * 8, size * inner * 2
        product = 4 * size * inner  # in float32
        partials = product * min(MAX_SPLITS, wgmma_fused.SPLIT_BYTES // product)
        assert exponentials + low + sums + scaled + partials + rows * 12 < limit
    assert head_wgmma.chunk_rows(16384, 768, 50304) == 2048
    assert head_wgmma.chunk_rows(129, 64, 1 << 22) == 256  # no chunk of one row
    assert head_wgmma.chunk_rows(100, 64, 1000) == 100


FAULTS = {
    "an ignored row counts": ("counts ? reference : infinity()", "reference"),
    "a far logit is no reference": ("references[row] = is_finite(top) ? top : not_a_number();", "condition;"),
    "the target's gradient is left out": ("from_float<T>(gradient / factor)", "from_float<T>(1.0f)"),
    "z-loss has no slope": ("expf(reference - lse) * slope", "expf(reference - lse)"),
    "a row of x is not scaled": ("factor * to_float(in.at[j])", "to_float(in.at[j])"),
    "the sum of a row misses a tile": ("sums[tile * 2 + 1]", "sums[tile / 2 * 4 + 1]"),
}


@needs_compiler
@pytest.mark.pooled(2, "emulated: head_wgmma")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(
    fault: str,
    emulated: None,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right, wrong = FAULTS[fault]
    original = head_wgmma.source()
    text = original.file.read_text()
    assert text.count(right) == 1, "the text of the fault is not in the file once"
    copied = replace(original, file=tmp_path / "head_wgmma.cu")
    copied.file.write_text(text.replace(right, wrong))
    monkeypatch.setattr(head_wgmma, "source", lambda: copied)
    assert max(largest_error(2.0, 1e-3), largest_error(60.0, 0.0)) > 1
