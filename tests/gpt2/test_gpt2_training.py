"""Training: the optimizer compared with torch's, accumulation, a run's files, and the command."""

from __future__ import annotations

import json
import math
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import training_toys
from helpers.training_toys import SIZES, lines, losses, train, weights
from weft import WeftError, cli
from weft.gpt2 import launch
from weft.gpt2.model import weights as hugging_face
from weft.gpt2.model.config import PRESETS, ModelConfig
from weft.gpt2.model.model import GPT
from weft.gpt2.report import run_record
from weft.gpt2.train import checkpoint, metrics
from weft.gpt2.train.checkpoint_files import list_checkpoints
from weft.gpt2.train.guards import RollingWindow
from weft.gpt2.train.micro_batch import WARMUP_CALLS, MicroBatch
from weft.gpt2.train.optimizer import Optimizer, combined_norm
from weft.gpt2.train.progress import Pace, Progress, format_duration, progress_line
from weft.gpt2.train.train_config import RECIPES, TrainConfig, cosine_schedule

SMALL = ModelConfig(vocab_size=256, block_size=16, layers=2, heads=2, width=32)
NUMBERS: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def draw(model: torch.nn.Module, size: float, seed: int) -> None:
    """Set random gradients of about this norm, larger in the biases than in the matrices."""
    generator = torch.Generator().manual_seed(seed)
    count = sum(p.numel() for p in model.parameters())
    for p in model.parameters():
        g = torch.randn(p.shape, generator=generator) * (size / math.sqrt(count))
        p.grad = (g * (5 if p.dim() == 1 else 1)).to(p.dtype)


def stepped(optimizer: Optimizer, number: int, clip: float | None, lr: float = 1e-2) -> float:
    each = optimizer.norms().tolist()
    norm = combined_norm(each)
    optimizer.step(number, lr, each, norm, clip)
    return norm


@pytest.mark.parametrize("clip", [1.0, None])
def test_optimizer_equals_torch(clip: float | None) -> None:
    """Compare clipping over both groups, weight decay and the update in float32."""
    mine, peer = GPT(SMALL, seed=1), GPT(SMALL, seed=1)
    optimizer = Optimizer(mine.named_parameters(), weight_decay=0.1, **NUMBERS)
    matrices = [p for p in peer.parameters() if p.dim() >= 2]
    others = [p for p in peer.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    torchs = torch.optim.AdamW(groups, lr=1e-2, **NUMBERS)
    for number, size in enumerate((0.3, 4.0, 1.0, 30.0), 1):
        draw(mine, size, number)
        draw(peer, size, number)
        saved_gradients = [p.grad.clone() for p in mine.parameters() if p.grad is not None]
        grads = [p.grad for p in mine.parameters() if p.grad is not None]
        norm = stepped(optimizer, number, clip)
        assert all(torch.equal(a, b) for a, b in zip(saved_gradients, grads, strict=True))
        of_torch = torch.nn.utils.clip_grad_norm_(peer.parameters(), clip or math.inf)
        assert norm == pytest.approx(of_torch.item(), rel=1e-6)
        torchs.step()
        for a, b in zip(mine.parameters(), peer.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=3e-6, atol=3e-8)


def test_moved_gradients_do_not_rebuild_launch_tables() -> None:
    """Autograd allocates gradients elsewhere each time. The tables of chunks are built once, and a prepared
    step gives the same result."""
    from weft.ops.adamw import parameter_groups

    model, peer = (torch.nn.Sequential(torch.nn.Linear(9, 5), torch.nn.Linear(5, 3)) for _ in "ab")
    peer.load_state_dict(model.state_dict())
    ours, eager = (Optimizer(m.named_parameters(), impl=i) for m, i in ((model, "triton"), (peer, "eager")))
    table_builds, live_gradients = [], []
    for number, size in enumerate((0.5, 4.0, 4.0), 1):
        for m in (model, peer):
            draw(m, size, number)
        live_gradients += [p.grad for p in model.parameters()]  # so that the next ones have other addresses
        norms = ours.norms()
        ours.prepare(may_clip=True)
        before = parameter_groups._pairs.cache_info().misses
        ours.step(number, 1e-2, norms.tolist(), combined_norm(norms.tolist()), 1.0)
        stepped(eager, number, 1.0)
        table_builds.append(parameter_groups._pairs.cache_info().misses)
        assert table_builds[-1] == before  # the tables are not built again once they exist
        for a, b in zip(model.parameters(), peer.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=3e-6, atol=3e-7)
    assert len(set(table_builds)) == 1


def test_half_precision_parameters_are_rounded_masters() -> None:
    """A float32 model with the same gradients has the same masters; parameters are the rounded masters."""
    full_precision, bfloat16_model = GPT(SMALL, seed=1), GPT(SMALL, seed=1)
    masters = {name: p.detach().clone() for name, p in bfloat16_model.named_parameters()}
    bfloat16_model.to(torch.bfloat16)
    ours = Optimizer(bfloat16_model.named_parameters(), masters=masters)
    theirs = Optimizer(full_precision.named_parameters())
    for number in (1, 2, 3):
        draw(bfloat16_model, 4.0, number)
        for p, q in zip(full_precision.parameters(), bfloat16_model.parameters(), strict=True):
            assert q.grad is not None
            p.grad = q.grad.float()
        stepped(ours, number, 1.0, lr=1e-4)  # small beside a bfloat16's last place
        stepped(theirs, number, 1.0, lr=1e-4)
    for name, p in bfloat16_model.named_parameters():
        torch.testing.assert_close(ours.masters()[name], theirs.masters()[name], rtol=1e-6, atol=1e-10)
        assert torch.equal(p, ours.masters()[name].bfloat16())
    again = Optimizer(GPT(SMALL, seed=2, dtype=torch.bfloat16).named_parameters())
    again.load(ours.masters(), ours.moments())
    for mine, expected in ((again.masters(), ours.masters()), (again.moments(), ours.moments())):
        assert training_toys.same(mine, expected)


def test_accumulated_gradients_are_summed_in_float32() -> None:
    model = GPT(SMALL, seed=1, dtype=torch.bfloat16)
    optimizer = Optimizer(model.named_parameters())
    expected = [torch.zeros(p.shape) for p in model.parameters()]
    for micro in range(3):
        draw(model, 1.0, micro)
        for sum_, p in zip(expected, model.parameters(), strict=True):
            assert p.grad is not None
            sum_ += p.grad.float()
        optimizer.accumulate(first=micro == 0)
    accumulated = {n: g for group, gs in zip(optimizer.groups, optimizer.gradients(), strict=True)
             for n, g in zip(group.names, gs, strict=True)}  # fmt: skip
    for (name, _), sum_ in zip(model.named_parameters(), expected, strict=True):
        assert torch.equal(accumulated[name], sum_)


def test_checkpoint_of_another_model_is_refused() -> None:
    optimizer = Optimizer(GPT(SMALL).named_parameters())
    masters, moments = optimizer.masters(), optimizer.moments()
    with pytest.raises(WeftError, match=r"wpe missing in the checkpoint"):
        optimizer.load({n: t for n, t in masters.items() if n != "wpe"}, moments)
    with pytest.raises(WeftError, match=r"checkpoint's wpe: expected \(16, 32\), got \(8, 32\)"):
        optimizer.load({**masters, "wpe": masters["wpe"][:8]}, moments)


def test_schedule_rises_and_falls() -> None:
    rates = [cosine_schedule(s, steps=100, lr=1.0, warmup=10, floor=0.1) for s in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == 1.0
    assert rates[99] == pytest.approx(0.1)
    assert rates[:10] == sorted(rates[:10]) and rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[10 + 44] == pytest.approx(0.55, abs=0.02)  # half way down the cosine


def test_invalid_settings_are_refused() -> None:
    sizes: dict[str, Any] = {"steps": 10, "batch": 4, "length": 8}
    TrainConfig(**sizes, clip=None, outlier_z=None)
    for name, value in (("steps", 0), ("lr", 0.0), ("lr", float("nan")), ("beta2", 1.0),
                        ("clip", -1.0), ("warmup", 11), ("accumulate", 3), ("dtype", "float16"),
                        ("keep", None), ("lr_floor", 1.5)):  # fmt: skip
        with pytest.raises(WeftError, match="batch" if name == "accumulate" else name.replace("_", "-")):
            TrainConfig(**{**sizes, name: value})
    for name, recipe in RECIPES.items():
        assert TrainConfig(**recipe).length <= PRESETS[name].block_size


@pytest.mark.parametrize(
    ("preset", "settings", "accumulate"),
    [
        ("124M", {}, 8),
        ("124M", {"batch": 64}, 1),
        ("124M", {"batch": 100}, 2),
        ("124M", {"batch": 1024}, 16),
        ("1.5B", {"batch": 24}, 3),
        ("124M", {"batch": 64, "accumulate": 4}, 4),
        ("tiny", {"batch": 32}, 1),
    ],
)
def test_a_smaller_batch_keeps_the_size_of_a_presets_micro_batches(
    preset: str, settings: dict[str, int], accumulate: int
) -> None:
    values = {**launch._preset_settings(preset, "cpu", settings), **settings}
    assert values.get("accumulate", 1) == accumulate


def test_rolling_window_z_score() -> None:
    window = RollingWindow(4, [1.0, 2.0, 3.0])
    assert window.z_score(100.0) == 0.0  # not full
    window.values.append(2.0)
    assert window.z_score(2.0) == 0.0
    assert window.z_score(4.0) == pytest.approx(2.0 / math.sqrt(0.5))
    assert RollingWindow(3, [2.0] * 3).z_score(2.0 + 1e-9) < 1.0


def test_progress_line() -> None:
    pace = Pace(tokens_a_second=5.6e5, mfu=0.4547, memory=33 << 30, left=4000)
    line = progress_line(7, 90, 2.5, pace)
    assert line == ("step 7/90  loss 2.5000  560,000 tokens/s  MFU 45.5 %  33.0 GiB  1:06:40 left")
    assert (format_duration(7), format_duration(754)) == ("0:07", "12:34")
    assert PRESETS["124M"].flops_per_token(1024) == pytest.approx(803.5e6, rel=1e-4)


def test_speed_does_not_count_the_steps_that_compile_and_capture() -> None:
    """In a pipe, 40 steps of 0.11 s have two reports: the second one spans the capture in step 4."""
    device = torch.device("cpu")
    progress = Progress(steps=40, done=0, tokens=1000, flops=1, peak=None, device=device, quiet=True)
    now = progress._counted_since
    for step in range(1, 41):
        now += {1: 20.0, 4: 0.8}.get(step, 0.11)
        progress.step(step, 2.0, now, is_warmup=step <= 4)
        assert progress.pace is not None
        if step == 1:
            assert progress.pace.tokens_a_second == pytest.approx(1000 / 20)
    assert progress.pace.tokens_a_second == pytest.approx(1000 / 0.11)


def test_the_run_ends_with_the_speed_of_its_warm_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two thirds of the steps are warm-ups of half an hour: the median would be one of them."""
    warm_after, hours = 4, [0.0]
    real = MicroBatch.__call__

    def slow_until_warm(micro_batch: MicroBatch, *arguments: Any) -> torch.Tensor:
        hours[0] += 1800.0 * (micro_batch.calls < warm_after)
        return real(micro_batch, *arguments)

    clock = time.perf_counter
    monkeypatch.setattr(MicroBatch, "__call__", slow_until_warm)
    monkeypatch.setattr(MicroBatch, "is_warm", property(lambda self: self.calls >= warm_after))
    monkeypatch.setattr("weft.gpt2.train.training.time.perf_counter", lambda: clock() + hours[0])
    done = train(tmp_path / "run", steps=6, checkpoint_every=None)
    assert done.outcome.tokens_a_second is not None and done.outcome.tokens_a_second > 4 * 32 / 900


def test_a_micro_batch_is_warm_after_the_call_that_captures() -> None:
    model = torch.nn.Linear(1, 1)
    for use_graph, first in ((False, 1), (True, WARMUP_CALLS + 1)):
        micro_batch = MicroBatch(
            lambda x, y: model(x).sum(), list(model.parameters()), 1, use_graph=use_graph
        )
        warm = []
        for _ in range(WARMUP_CALLS):
            warm.append(micro_batch.is_warm)
            micro_batch(torch.ones(1, 1), torch.ones(1), {})
        assert warm == [call >= first for call in range(WARMUP_CALLS)]
        assert micro_batch.is_warm is not use_graph  # the call that captures is still to come


def test_accumulation_computes_the_same_step(tmp_path: Path) -> None:
    """Compare 1 x 4 sequences, 2 x 2 and 4 x 1: equal losses, norms and weights within rounding."""
    for parts in (1, 2, 4):
        train(tmp_path / str(parts), accumulate=parts, steps=6)
    expected, expected_weights = losses(tmp_path / "1"), weights(tmp_path / "1")
    for parts in (2, 4):
        step_losses = losses(tmp_path / str(parts))
        assert list(step_losses.values()) == pytest.approx(list(expected.values()), rel=1e-5)
        norms = [[x["norm"] for x in lines(tmp_path / str(n))] for n in (1, parts)]
        assert norms[1] == pytest.approx(norms[0], rel=1e-3)  # AdamW itself is blind to a scale
        for name, weight in weights(tmp_path / str(parts)).items():
            torch.testing.assert_close(weight, expected_weights[name], rtol=1e-3, atol=2e-4)


def test_run_learns_and_writes_its_files(tmp_path: Path) -> None:
    out = tmp_path / "run"
    extras = {"tensorboard": True, "picture": True, "sample_every": 30}
    done = train(out, steps=60, validate_every=20, dropout=0.05, accumulate=2, **extras)
    step_losses = losses(out)
    assert step_losses[1] == pytest.approx(math.log(256), abs=0.3)
    assert done.outcome.loss is not None and done.outcome.loss < step_losses[1] - 2.0
    assert [x["step"] for x in lines(out) if "validation" in x] == [0, 20, 40, 60]
    assert len(done.sample) > 4 and done.outcome.skipped == 0
    assert [p.name for p in list_checkpoints(out / "checkpoints")] == [
        "step-00000060",
        "step-00000055",
    ]
    config, name, _ = checkpoint.load_model(out)
    assert (config.layers, config.block_size, name) == (1, 32, "bytes")
    assert checkpoint.load_model(done.checkpoint)[0] == config
    plot_svg = (out / run_record.PLOT).read_text()
    assert "validation" in plot_svg and "loss (nats a token)" in plot_svg
    assert scalars(out / metrics.TENSORBOARD, "loss") == pytest.approx(step_losses, rel=1e-6)


def test_run_starts_from_a_trained_model(tmp_path: Path) -> None:
    """Start from a run and from a Hugging Face folder; resume after that folder is deleted."""
    validate: dict[str, Any] = {"validate_every": 20, "validate_batches": 2}
    before = train(tmp_path / "first", **validate).outcome.validation
    config, _, tensors = checkpoint.load_model(tmp_path / "first")
    hugging_face.save(tmp_path / "theirs", config, tensors)
    settings = {"tokeniser": "bytes", "length": 16, "steps": 6, "checkpoint_every": 3}
    for name in ("first", "theirs"):
        train(tmp_path / f"{name}-2", start=tmp_path / name, **{**settings, **validate, "length": 32})
        assert lines(tmp_path / f"{name}-2")[0] == {"step": 0, "validation": before}
    assert losses(tmp_path / "first-2") == losses(tmp_path / "theirs-2")
    shorter = tmp_path / "shorter"
    train(shorter, start=tmp_path / "theirs", **settings)
    assert checkpoint.load_model(shorter)[0].block_size == 32
    with pytest.raises(WeftError, match="--length: expected at most 32"):
        train(tmp_path / "longer", start=tmp_path / "theirs", **{**settings, "length": 64})
    with pytest.raises(WeftError, match="--width with --start"):
        train(tmp_path / "wider", start=tmp_path / "theirs", width=128)
    shutil.rmtree(tmp_path / "theirs")
    shutil.rmtree(shorter / "checkpoints" / "step-00000006")
    losses_before = losses(shorter)
    train(shorter, resume=True)
    assert losses(shorter) == losses_before


def scalars(folder: Path, name: str) -> dict[int, float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = EventAccumulator(str(folder))
    log.Reload()
    return {event.step: event.value for event in log.Scalars(name)}


def test_shards_need_a_tokeniser_only_for_the_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    from weft.gpt2.data import tokenisers
    from weft.gpt2.data.shards import write_shards

    def offline(self: tokenisers.GPT2Tokeniser) -> None:
        raise WeftError("GPT-2's merges are not here")

    monkeypatch.setattr(tokenisers.GPT2Tokeniser, "ready", offline)
    write_shards(tmp_path / "shards", "x", [np.arange(4000, dtype=np.uint16)])
    done = train(tmp_path / "run", data=tmp_path / "shards", tokeniser="gpt2", steps=4, batch=1)
    assert done.sample == "" and "no sample: GPT-2's merges are not here" in training_toys.MESSAGES
    assert checkpoint.load_model(tmp_path / "run")[0].vocab_size == 50257
    with pytest.raises(WeftError, match=r"--compile.*no dropout.*--no-compile"):
        train(tmp_path / "other", compile=True, dropout=0.1)
    with pytest.raises(WeftError, match="merges are not here"):
        train(tmp_path / "other", tokeniser="gpt2")
    assert not (tmp_path / "other").exists()


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["weft", "train", "--device", "cpu", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = tmp_path / "text.py", tmp_path / "run"
    text.write_text(training_toys.TEXT)
    sizes = [f"--{name}={SIZES[name]}" for name in ("layers", "heads", "width", "length", "batch")]
    more = ["--steps=8", "--warmup=2", "--set", "sample_tokens=20", "--set", "tensorboard=false"]
    log = metrics.Metrics.log

    def logged(self: metrics.Metrics, step: int, **values: Any) -> None:
        log(self, step, **values)
        if step == 3 and "loss" in values:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(metrics.Metrics, "log", logged)
    args = ["--data", str(text), "--out", str(out), *sizes, *more]
    assert command(monkeypatch, *args) == 143
    assert f"weft train --resume --out {out}" in capsys.readouterr().err
    monkeypatch.undo()
    assert command(monkeypatch, "--resume", "--out", str(out), "--json") == 0
    stdout, err = capsys.readouterr()
    summary = json.loads(stdout)
    assert (summary["step"], summary["steps"], summary["signal"]) == (8, 8, None)
    assert summary["out"] == str(out) and f"checkpoint: {out}" in err and "tokens/s" in err
    assert command(monkeypatch, *args) == 2
    assert "is there already" in capsys.readouterr().err
    assert command(monkeypatch, "--set", "learn=1", "--out", str(tmp_path / "x")) == 2
    assert "unknown setting" in capsys.readouterr().err


def test_a_setting_switches_the_implementation_of_one_operator(tmp_path: Path) -> None:
    """The others are as ``ops`` says; a resumed run has the switch, and takes no other one."""
    out = tmp_path / "run"
    train(out, steps=2, warmup=1, ops="torch", layer_norm="eager")
    ops = json.loads((out / "run.json").read_text())["model"]["ops"]
    assert ops["layer_norm"] == "eager" and ops["linear"] == ops["attention"] == "torch"
    assert train(out, resume=True, layer_norm="eager").outcome.steps == 2
    with pytest.raises(WeftError, match="--ops on --resume"):
        train(out, resume=True, layer_norm="torch")
    assert launch.with_switches({"ops": "weft", "attention": "torch"}) == {"ops": {"attention": "torch"}}
    assert launch.with_switches({"ops": "weft", "dropout": 0.1}) == {"ops": "weft", "dropout": 0.1}


@pytest.mark.parametrize(("impl", "expected"), [("torhc", "did you mean torch"), (3, "one of eager")])
def test_an_unknown_implementation_is_refused_before_a_run_begins(
    impl: object, expected: str, tmp_path: Path
) -> None:
    with pytest.raises(WeftError, match="unknown implementation of attention") as error:
        train(tmp_path / "run", attention=impl)
    assert expected in str(error.value) and not (tmp_path / "run").exists()
