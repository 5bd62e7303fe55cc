"""Recovery of runs: each failure gives one clear error and loses no finished work."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers import training_toys
from helpers.paths import ROOT
from helpers.training_toys import MESSAGES, lines, losses, same, train, weights
from weft import WeftError
from weft.gpt2.data.shards import write_shards
from weft.gpt2.model.model import GPT
from weft.gpt2.train import checkpoint, metrics
from weft.gpt2.train.checkpoint_files import (
    CHECKPOINTS,
    MODEL,
    OPTIMIZER,
    STATE,
    list_checkpoints,
    read_state,
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of 20 steps."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train(out, keep=4)
    return out


@pytest.fixture
def copy(uninterrupted: Path, tmp_path: Path) -> Path:
    """A copy of that run as of its 15th step's checkpoint, with its text."""
    out = tmp_path / "run"
    shutil.copytree(uninterrupted, out)
    shutil.rmtree(out / "checkpoints" / "step-00000020")
    return out


def checkpoints(out: Path) -> list[int]:
    return [int(p.name[5:]) for p in reversed(list_checkpoints(out / CHECKPOINTS))]


def kill_test(tmp_path: Path, kills: int, device: str) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}"}
    command = [sys.executable, str(Path(training_toys.__file__)), str(tmp_path), str(kills), device]
    done = subprocess.run([*command, "5"], env=environment, capture_output=True, text=True, timeout=300)
    failed = tmp_path / "failed.txt"
    assert done.returncode == 0 and not failed.exists(), done.stderr + (
        failed.read_text() if failed.exists() else ""
    )
    counts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert counts["whole"] == counts["end"] == 0, counts
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    assert list(losses(tmp_path / "killed")) == list(range(1, 10 * kills + 1))
    assert same(weights(tmp_path / "killed"), weights(tmp_path / "whole"))
    newest = [list_checkpoints(tmp_path / run / CHECKPOINTS)[0] for run in ("killed", "whole")]
    files = [{p.name: p.read_bytes() for p in folder.iterdir()} for folder in newest]
    assert files[0].keys() == files[1].keys() >= {MODEL, OPTIMIZER, STATE}
    assert [n for n in files[0] if files[0][n] != files[1][n]] == []
    return counts


@pytest.mark.slow
def test_twenty_kills_change_no_bit(tmp_path: Path) -> None:
    counts = kill_test(tmp_path, 20, "cpu")
    assert counts["killed"] == 20, counts
    assert counts["half"] >= 3, f"too few kills hit the writing of a checkpoint: {counts}"


@pytest.mark.gpu
@pytest.mark.slow
def test_kills_on_a_gpu_change_no_bit(tmp_path: Path) -> None:
    assert kill_test(tmp_path, 8, "cuda")["killed"] == 8


def with_changed_loss(
    step: int, change: Callable[[torch.Tensor], torch.Tensor], until: int | None = None
) -> Any:
    """Return GPT's forward with a changed loss at one training step or a range of steps."""
    forward, count = GPT.forward, [0]

    def changed(self: GPT, tokens: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor:
        loss = forward(self, tokens, *more, **named)
        count[0] += self.training
        return change(loss) if step <= count[0] <= (until or step) and self.training else loss

    return changed


def test_nan_loss_does_not_change_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GPT, "forward", with_changed_loss(6, lambda loss: loss * float("nan")))
    done = train(tmp_path / "run", checkpoint_every=1, keep=20, steps=8)
    root = tmp_path / "run" / "checkpoints"
    before, after = (checkpoint.load(root / f"step-{n:08d}") for n in (5, 6))
    assert all(same(before.tensors[n], after.tensors[n]) for n in (MODEL, OPTIMIZER))
    step_record = lines(tmp_path / "run")[5]
    assert step_record["step"] == 6 and step_record["loss"] is None and "nan" in step_record["skipped"]
    assert (done.outcome.skipped, done.outcome.step) == (1, 8)
    assert after.state["updates"] == 5


def test_repeated_nan_ends_the_run_with_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GPT, "forward", with_changed_loss(4, lambda loss: loss * float("inf"), until=99))
    with pytest.raises(WeftError, match=r"step 6: .*3 steps in a row.*lower --lr"):
        train(tmp_path / "run", patience=3)
    assert checkpoints(tmp_path / "run") == [5]  # of which two were skipped
    final_weights = weights(tmp_path / "run")
    monkeypatch.undo()
    train(tmp_path / "other", steps=20, checkpoint_every=3, keep=9)
    same_steps = checkpoint.load(tmp_path / "other" / "checkpoints" / "step-00000003", (MODEL,))
    assert same(final_weights, same_steps.tensors[MODEL])


@pytest.mark.parametrize("factor", [3.0, -1.0], ids=["upward", "downward"])
def test_an_outlier_is_skipped(factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GPT, "forward", with_changed_loss(15, lambda loss: loss * factor))
    train(tmp_path / "run", outlier_window=8, outlier_z=6.0, lr=1e-5)
    skipped = {line["step"]: line["skipped"] for line in lines(tmp_path / "run") if "skipped" in line}
    assert list(skipped) == ([15] if factor > 0 else [])
    assert not skipped or "deviations above usual" in skipped[15]


def out_of_memory(loss: torch.Tensor) -> torch.Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


def test_out_of_memory_gives_advice_and_can_be_resumed(
    uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    monkeypatch.setattr(GPT, "forward", with_changed_loss(8, out_of_memory))
    with pytest.raises(WeftError, match=r"step 8: out of memory with 4 .*--accumulate 2"):
        train(out)
    assert checkpoints(out) == [5, 7]
    monkeypatch.undo()
    train(out, resume=True, accumulate=2)
    expected, got = losses(uninterrupted), losses(out)
    assert [got[n] for n in range(1, 8)] == [expected[n] for n in range(1, 8)]
    assert list(got.values()) == pytest.approx(list(expected.values()), rel=1e-4)


def test_full_disk_keeps_older_checkpoints(
    uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, real = tmp_path / "run", checkpoint._write_tensors

    def full(path: Path, tensors: Any) -> dict[str, Any]:
        if path.name == OPTIMIZER and "00000010" in path.parent.name:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, tensors)

    monkeypatch.setattr(checkpoint, "_write_tensors", full)
    with pytest.raises(WeftError, match=r"checkpoint of step 10 .*the disk is full.*--resume"):
        train(out)
    assert [p.name for p in (out / "checkpoints").iterdir()] == ["step-00000005"]
    monkeypatch.undo()
    train(out, resume=True)
    assert losses(out) == losses(uninterrupted)


def test_file_size_limit_is_a_clear_error(tmp_path: Path) -> None:
    tensors = {"x": torch.zeros(1 << 16)}
    saved_path = checkpoint.save(tmp_path, 1, {MODEL: tensors}, {})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(WeftError, match=r"step 2 .*may not grow so large"):
            checkpoint.save(tmp_path, 2, {MODEL: tensors}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == [saved_path]


def test_metrics_on_a_full_disk_are_a_clear_error(tmp_path: Path) -> None:
    log = metrics.Metrics(tmp_path)
    log._file.close()
    log._file = open("/dev/full", "a", buffering=1)  # noqa: SIM115
    with pytest.raises(WeftError, match=r"metrics .*the disk is full"):
        log.log(1, loss=2.0)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def edit(path: Path) -> None:
    path.write_text(path.read_text().replace('"step": 15', '"step": 14'))


@pytest.mark.parametrize(
    ("name", "damage", "reason"),
    [
        (MODEL, cut, "bytes of"),
        (OPTIMIZER, flip, "its hash does not match"),
        (STATE, edit, "its hash does not match"),
        (STATE, cut, "JSONDecodeError"),
        (MODEL, Path.unlink, "it is missing"),
    ],
    ids=["torn", "flipped", "edited", "torn state", "missing"],
)
def test_broken_checkpoint_falls_back_to_the_one_before(
    name: str, damage: Callable[[Path], None], reason: str, uninterrupted: Path, copy: Path
) -> None:
    damage(copy / "checkpoints" / "step-00000015" / name)
    train(copy, resume=True)
    messages = "\n".join(MESSAGES)
    assert "step-00000015" in messages and reason in messages and "the one before it" in messages
    assert losses(copy) == losses(uninterrupted)
    assert same(weights(copy), weights(uninterrupted))
    last = [read_state(list_checkpoints(out / "checkpoints")[0]) for out in (copy, uninterrupted)]
    assert last[0]["guard"] == last[1]["guard"]  # the windows of recent losses and norms
    assert checkpoints(copy) == [5, 10, 15, 20]  # step 15 was computed again
    assert (copy / "checkpoints" / "broken-step-00000015").is_dir()


def test_only_broken_checkpoints_are_an_error(copy: Path) -> None:
    for path in list_checkpoints(copy / "checkpoints"):
        cut(path / MODEL)
    with pytest.raises(WeftError, match=r"checkpoints.*expected one that is whole"):
        train(copy, resume=True)


def test_changed_plan_is_refused_and_nothing_written(copy: Path) -> None:
    before = {p: p.read_bytes() for p in copy.rglob("*") if p.is_file()}
    other = copy.parent / "other.py"
    other.write_text(training_toys.TEXT.replace("return", "yield"))
    with pytest.raises(WeftError, match=r"is there already.*--resume"):
        train(copy)
    with pytest.raises(WeftError, match=r"--lr on --resume: expected 0.003, got 0.5"):
        train(copy, resume=True, lr=0.5)
    with pytest.raises(WeftError, match=r"--width on --resume"):
        train(copy, resume=True, width=128)
    with pytest.raises(WeftError, match=r"the text of .* has changed"):
        train(copy, resume=True, data=other)
    with pytest.raises(WeftError, match=r"holds no run"):
        train(copy.parent / "nothing", resume=True)
    assert {p: p.read_bytes() for p in copy.rglob("*") if p.is_file()} == before


def test_a_token_outside_the_vocabulary_is_named(tmp_path: Path) -> None:
    ids = np.frombuffer(training_toys.TEXT.encode(), np.uint8).astype(np.uint16).copy()
    ids[len(ids) // 2] = 300
    write_shards(tmp_path / "shards", "x_train", [ids])
    write_shards(tmp_path / "shards", "x_val", [ids[:100]])
    with pytest.raises(WeftError, match=rf"x_train_000000.bin, token {len(ids) // 2}: .*got 300"):
        train(tmp_path / "run", data=tmp_path / "shards", steps=200)
    done = len(losses(tmp_path / "run"))
    assert done and checkpoints(tmp_path / "run")[-1] == done


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_after_the_step_with_a_checkpoint(
    number: signal.Signals, uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, log = tmp_path / "run", metrics.Metrics.log

    def logged(self: metrics.Metrics, step: int, **values: Any) -> None:
        log(self, step, **values)
        if step == 6:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(metrics.Metrics, "log", logged)
    done = train(out)
    assert done.outcome.signal == number
    assert checkpoints(out)[-1] == done.outcome.step == 7
    monkeypatch.undo()
    assert train(out, resume=True).outcome.signal is None
    assert losses(out) == losses(uninterrupted)
