"""DDP and FSDP2 over gloo, with two processes started by torchrun: the same losses as one process,
checkpoints readable by any number of processes, one message when a process dies."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.marked_processes import marked_processes
from helpers.paths import HELPERS, TESTS
from helpers.several import BF16, HALF, RUNS, SIZES, STEPS, halve, train
from helpers.training_toys import TEXT, lines, losses, same, weights
from weft.core import WeftError
from weft.gpt2.train import checkpoint
from weft.gpt2.train.checkpoint_files import CHECKPOINTS, list_checkpoints

pytestmark = pytest.mark.slow
LIMIT = 240  # seconds until a hang is a failure; a run takes ten of them on two quiet cores
ROUNDING = 2e-6  # of float32 sums in another order, 17 of its steps; measured: 5e-7
BF16_ROUNDING = 2e-3  # half a step of bfloat16


class Torchrun:
    """Two processes of torchrun, their output by rank, and a mark in their environment to find them by."""

    def __init__(self, folder: Path, *arguments: object) -> None:
        self.logs, self.mark = folder / f"logs-{uuid.uuid4().hex}", uuid.uuid4().hex
        command = (
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"),
            *("2", "--redirects", "3", "--log-dir", self.logs, *arguments),
        )
        path = os.pathsep.join((str(TESTS), str(TESTS.parent / "src")))
        added = {"WEFT_TEST_MARK": self.mark, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        self.process = subprocess.Popen(
            [str(word) for word in command],
            env={**os.environ, **added},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def end(self) -> str:
        """Wait for the end and return torchrun's own output."""
        try:
            output, _ = self.process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            pytest.fail(f"no end within {LIMIT} s: {self.stderr_text()}")
        assert not marked_processes(self.mark)
        return output

    def stderr_text(self) -> str:
        """Return the stderr of both processes."""
        return "".join(p.read_text() for p in sorted(self.logs.rglob("stderr.log")))

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait until ``holds`` returns True; fail if the processes end first or LIMIT is over."""
        end = time.monotonic() + LIMIT
        while not holds():
            assert self.process.poll() is None, self.stderr_text()
            assert time.monotonic() < end, f"nothing within {LIMIT} s: {self.stderr_text()}"
            time.sleep(0.05)

    def processes(self) -> dict[int, int]:
        """Return the process ids by rank."""
        ids_by_rank: dict[int, int] = {}
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                words = path.read_bytes().split(b"\0")
            except OSError:
                continue
            if f"WEFT_TEST_MARK={self.mark}".encode() in words:
                ids_by_rank |= {int(w[5:]): int(path.parent.name) for w in words if w[:5] == b"RANK="}
        return ids_by_rank


@contextmanager
def torchrun(folder: Path, *arguments: object) -> Iterator[Torchrun]:
    run = Torchrun(folder, *arguments)
    try:
        yield run
    finally:
        for number in (*run.processes().values(), run.process.pid):
            if run.process.poll() is None:
                os.kill(number, signal.SIGKILL)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of one process and of two; ``stderr.txt`` has the stderr of torchrun's processes."""
    root = tmp_path_factory.mktemp("runs")
    (root / "text.py").write_text(TEXT)
    train(root, "one")
    train(root, "bf16-one", **BF16)
    with torchrun(root, HELPERS / "several.py", root) as several:
        output = several.end()
        (root / "stderr.txt").write_text(several.stderr_text())
    assert (root / "ddp-full").is_dir(), f"{several.stderr_text()}\n{output}"
    return root


def close(a: Path, b: Path, share: float) -> None:
    """Assert that two runs have the same lines, with numbers within a relative difference."""
    one, two = lines(a), lines(b)
    assert [x["step"] for x in one] == [x["step"] for x in two]
    for left, right in zip(one, two, strict=True):
        for name in {"loss", "norm", "validation"} & set(left):
            assert right[name] == pytest.approx(left[name], rel=share), (b.name, left["step"], name)


@pytest.mark.parametrize("name", [n for n in RUNS if not n.startswith("bf16")])
def test_two_processes_compute_the_same_losses_as_one(runs: Path, name: str) -> None:
    close(runs / "one", runs / name, ROUNDING)
    norms = [line["norm"] for line in lines(runs / name) if "norm" in line]
    assert len(norms) == STEPS and min(norms) > 2 * SIZES["clip"], "clipping is not seen"


@pytest.mark.parametrize("name", [n for n in RUNS if n.startswith("bf16")])
def test_two_processes_in_bfloat16(runs: Path, name: str) -> None:
    close(runs / "bf16-one", runs / name, BF16_ROUNDING)
    assert {t.dtype for t in weights(runs / name).values()} == {torch.float32}


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_two_processes_resume_with_the_same_bits(runs: Path, name: str) -> None:
    assert losses(runs / name) == losses(runs / f"{name}-again")
    assert same(weights(runs / name), weights(runs / f"{name}-again"))


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_one_process_resumes_a_run_of_two(runs: Path, name: str) -> None:
    halve(runs, name, f"{name}-to-one")
    train(runs, f"{name}-to-one", resume=True)
    close(runs / "one", runs / f"{name}-to-one", ROUNDING)


def test_sharded_checkpoint_is_read_whole(runs: Path) -> None:
    """``weft generate`` reads what FSDP2 wrote; nothing in it is pickled."""
    whole, parts = weights(runs / "ddp"), weights(runs / "fsdp")
    assert whole.keys() == parts.keys()
    for name, t in whole.items():
        torch.testing.assert_close(parts[name], t, rtol=0, atol=1e-5 * SIZES["lr"] / 1e-2)
    newest = list_checkpoints(runs / "fsdp" / CHECKPOINTS)[0]
    kinds = {p.suffix for p in newest.rglob("*") if p.is_file()}
    assert kinds == {".safetensors", ".json"}
    assert len(list(newest.glob("model/*"))) == len(list(newest.glob("optimizer/*"))) == 2


@pytest.mark.parametrize("damage", ["edited", "missing", "added"])
def test_damaged_shard_is_named(runs: Path, tmp_path: Path, damage: str) -> None:
    shutil.copytree(runs / "fsdp", tmp_path / "run")
    root, messages = tmp_path / "run" / CHECKPOINTS, list[str]()
    newest = list_checkpoints(root)[0]
    part = sorted(newest.glob("optimizer/*"))[1]
    if damage == "edited":
        data = bytearray(part.read_bytes())
        data[-1] ^= 1
        part.write_bytes(data)
    elif damage == "missing":
        part.unlink()
    else:
        part = Path(shutil.copy(part, part.with_name("shard-00003.safetensors")))
    with pytest.raises(WeftError, match=part.name):
        checkpoint.load(newest)
    loaded = checkpoint.load_newest(root, messages.append)
    assert loaded is not None and loaded.step == HALF and part.name in messages[0]


def test_full_disk_ends_all_processes_with_one_message(runs: Path) -> None:
    """Under FSDP2 the second process fails and all raise; under DDP the first fails and the other waits."""
    errors = [(runs / f"fsdp-full-{rank}.txt").read_text() for rank in range(2)]
    assert errors[0] == errors[1] and "may not grow so large" in errors[0]
    stderr = (runs / "stderr.txt").read_text()
    assert stderr.count("error: ") == 1 and "may not grow so large" in stderr, stderr
    assert "Traceback" not in stderr, stderr
    for name in ("fsdp-full", "ddp-full"):
        root = runs / name / CHECKPOINTS
        assert [p.name for p in root.iterdir()] == [f"step-{HALF:08d}"]
        checkpoint.load(list_checkpoints(root)[0])


def test_signal_to_one_process_ends_all_at_the_same_step(runs: Path) -> None:
    outcomes = [json.loads((runs / f"stopped-{rank}.json").read_text()) for rank in range(2)]
    assert outcomes[0] == outcomes[1] and outcomes[0]["signal"] == signal.SIGTERM
    assert outcomes[0]["step"] == len(losses(runs / "stopped")) >= HALF - 1
    loaded = checkpoint.load(list_checkpoints(runs / "stopped" / CHECKPOINTS)[0])
    assert loaded.step == outcomes[0]["step"]


@pytest.mark.pooled(1, "failing processes of torchrun")
def test_killed_process_ends_all_with_one_message(tmp_path: Path) -> None:
    """``weft train`` under torchrun, as a user calls it."""
    out, text = tmp_path / "run", tmp_path / "text.py"
    text.write_text(TEXT)
    settings = {**SIZES, "data": text, "steps": 10**6, "keep": 2}
    options = [f"--set={name}={json.dumps(value, default=str)}" for name, value in settings.items()]
    command: list[Any] = ["-m", "weft", "train", "--device", "cpu", "--out", out, *options]
    with torchrun(tmp_path, *command) as run:
        run.until(lambda: len(list_checkpoints(out / CHECKPOINTS)) > 1)
        os.kill(run.processes()[1], signal.SIGKILL)
        run.end()
        stderr = run.stderr_text()
    assert run.process.returncode != 0
    assert "error: another of the run's 2 processes is gone" in stderr, stderr
    assert stderr.count("error: ") == stderr.count("hint: finished checkpoints are intact") == 1, stderr
    assert "Traceback" not in stderr, stderr
    newest = list_checkpoints(out / CHECKPOINTS)[0]
    assert checkpoint.load(newest).step >= 2 * HALF


@pytest.mark.pooled(1, "failing processes of torchrun")
def test_a_lost_process_is_reported_although_the_other_is_stuck(tmp_path: Path) -> None:
    with torchrun(tmp_path, HELPERS / "stuck.py") as run:
        run.end()
        stderr = run.stderr_text()
    lost = "error: another of the run's 2 processes is gone: got no sign of process 1 for 5 s"
    assert lost in stderr, stderr
    assert stderr.count("error: ") == stderr.count("hint: finished checkpoints are intact") == 1, stderr


@pytest.mark.pooled(1, "failing processes of torchrun")
def test_error_is_reported_although_torchrun_ends_the_processes(tmp_path: Path) -> None:
    """torchrun ends the other processes as soon as it notices that one has exited."""
    with torchrun(tmp_path, HELPERS / "late.py") as run:
        run.end()
        stderr = run.stderr_text()
    assert "WeftError: another of the run's 2 processes is gone" in stderr, stderr
