"""Training with 2:4 sparse MLPs: the weights stay sparse, masks survive a resume, refreshed masks move."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from helpers import training_toys
from helpers.training_toys import losses, same, train, weights
from weft import WeftError, cli
from weft.gpt2.train import checkpoint
from weft.gpt2.train.checkpoint_files import CHECKPOINTS, OPTIMIZER, list_checkpoints
from weft.gpt2.train.run_directory import LATER_OPTIONS, RUN
from weft.gpt2.train.sparse_mlp import MASK_PREFIX, UNPRUNED_PREFIX
from weft.nn.sparse import masked_linear, transposable_mask

SPARSE = ("h.0.c_fc.weight", "h.0.mlp_proj.weight")


def is_2_4(w: torch.Tensor) -> bool:
    """True if at most two of each four adjacent elements of rows and of columns are not 0."""
    return all(bool(((x.reshape(-1, 4) != 0).sum(-1) <= 2).all()) for x in (w, w.t()))


def optimizer_tensors(out: Path) -> dict[str, torch.Tensor]:
    return checkpoint.load(list_checkpoints(out / CHECKPOINTS)[0]).tensors[OPTIMIZER]


def masks(out: Path) -> dict[str, torch.Tensor]:
    return {n: t for n, t in optimizer_tensors(out).items() if n.startswith(MASK_PREFIX)}


@pytest.mark.parametrize("dense_gradient", [False, True])
def test_masked_linear_equals_the_dense_product_of_the_masked_weight(dense_gradient: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(s, generator=generator) for s in ((6, 16), (8, 16), (8,)))
    # Of other weights: the mask, not the present magnitudes, decides which elements count.
    mask = transposable_mask(torch.randn(8, 16, generator=generator))
    mine, peer = ([t.clone().requires_grad_() for t in (x, w, b)] for _ in "ab")
    out = masked_linear(*mine, mask, dense_gradient=dense_gradient)
    expected = torch.nn.functional.linear(peer[0], peer[1] * mask, peer[2])
    torch.testing.assert_close(out, expected)
    grad = torch.randn(out.shape, generator=generator)
    out.backward(grad)
    expected.backward(grad)
    for name, a, e in zip("xwb", mine, peer, strict=True):
        dense = grad.t() @ x if name == "w" and dense_gradient else e.grad
        torch.testing.assert_close(a.grad, dense)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fixed_mask_trains_from_a_dense_run(tmp_path: Path, dtype: str) -> None:
    """Prune a trained model, train on: the loss falls, the places stay, and a reader sees a dense model."""
    train(tmp_path / "dense", steps=30)
    start = weights(tmp_path / "dense")
    out = tmp_path / "sparse"
    # A decay that would show in a pruned weight that is not 0.
    train(out, start=tmp_path / "dense", sparse="mlp", dtype=dtype, steps=30, weight_decay=0.3)
    curve = list(losses(out).values())
    assert sum(curve[-5:]) / 5 < curve[0] - 0.05
    trained, chosen = weights(out), masks(out)
    for name in SPARSE:
        mask = chosen[MASK_PREFIX + name]
        # The run's dtype decides ties of magnitude.
        expected = transposable_mask(start[name].to(getattr(torch, dtype)))
        assert torch.equal(mask, expected) and 0.4 < mask.float().mean() <= 0.5
        assert is_2_4(trained[name]) and not trained[name][~mask].any()
        assert (trained[name] != start[name])[mask].float().mean() > 0.9, "kept weights are trained"
        assert not optimizer_tensors(out)[f"exp_avg.{name}"][~mask].any()
    assert not is_2_4(trained["h.0.c_fc.weight"].roll(1, 0) + trained["h.0.c_fc.weight"])
    result = CliRunner().invoke(cli.app, ["generate", str(out), "--device", "cpu", "--tokens", "4"])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("refresh", [None, 4])
def test_resume_is_bit_for_bit(tmp_path: Path, refresh: int | None) -> None:
    """Compare a run in two parts, the first ending between two refreshes, with one in a single part."""
    settings = {"sparse": "mlp", "sparse_refresh": refresh, "steps": 14, "checkpoint_every": 2}
    train(tmp_path / "whole", **settings)
    out = tmp_path / "parts"
    train(out, **settings)
    for path in list_checkpoints(out / CHECKPOINTS):
        if path.name.endswith("14"):
            path.rename(path.with_name("set-aside"))  # as if the run had been killed after step 12
    before = masks(out)
    train(out, resume=True)
    assert same(weights(tmp_path / "whole"), weights(out))
    assert same(optimizer_tensors(tmp_path / "whole"), optimizer_tensors(out))
    if refresh is None:
        assert same(before, masks(out))


def test_refresh_lets_pruned_weights_come_back(tmp_path: Path) -> None:
    """The mask moves, the checkpoint's weights are 2:4, and its unpruned ones are not lost."""
    settings = {"sparse": "mlp", "sparse_refresh": 5}
    train(tmp_path / "short", **settings, steps=4)
    train(tmp_path / "long", **settings, steps=20)
    first, last, tensors = masks(tmp_path / "short"), masks(tmp_path / "long"), weights(tmp_path / "long")
    for name in SPARSE:
        mask = last[MASK_PREFIX + name]
        assert (~first[MASK_PREFIX + name] & mask).any(), "no element came back"
        unpruned = optimizer_tensors(tmp_path / "long")[UNPRUNED_PREFIX + name]
        assert is_2_4(tensors[name]) and torch.equal(tensors[name], unpruned * mask)
        assert unpruned[~mask].count_nonzero() > 0


def test_summary_and_refusals(tmp_path: Path) -> None:
    for settings, named in (
        ({"sparse": "attention"}, "--sparse"),
        ({"sparse_refresh": 5}, "--sparse-refresh"),
        ({"sparse": "mlp", "compile": True}, "--sparse"),
    ):
        with pytest.raises(WeftError, match=named):
            train(tmp_path / "refused", **settings)
        assert not (tmp_path / "refused").exists()
    train(tmp_path / "run", sparse="mlp", steps=2, warmup=1)
    # Two weights of 64 x 256: float32 values of half, and four bits for each group of four.
    text = "\n".join(training_toys.MESSAGES)
    assert "2 weights of the MLPs" in text and "of 32,768 elements stay" in text
    assert "65,536 bytes of values and" in text and "dense 131,072" in text
    with pytest.raises(WeftError, match="--sparse on --resume"):
        train(tmp_path / "run", resume=True, sparse=None)


def test_a_run_from_before_sparse_weights_is_resumed(tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(out, steps=4)
    plan = json.loads((out / RUN).read_text())
    for name in LATER_OPTIONS:
        assert plan["train"].pop(name) is None
    (out / RUN).write_text(json.dumps(plan))
    before = losses(out)
    train(out, resume=True)
    assert losses(out) == before
