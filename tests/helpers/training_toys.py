"""A training run of one second: a text, a model of 60 thousand parameters, and its losses.

As a program it is the kill test: a process with torch loaded starts a child for each attempt, kills
it at a random moment, and starts the next one, which resumes.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

import torch

from weft.gpt2 import launch
from weft.gpt2.train import checkpoint, metrics
from weft.gpt2.train.checkpoint_files import CHECKPOINTS, TEMPORARY

TEXT = "".join(f"def f{i}(x):\n    return x * {i * 7 % 31} + {i % 13}\n\n" for i in range(300))
SIZES: dict[str, Any] = {
    "layers": 1, "heads": 1, "width": 64, "length": 32, "batch": 4, "lr": 3e-3, "warmup": 4,
    "steps": 20, "validate_every": None, "checkpoint_every": 5, "keep": 2, "seed": 3,
    "tensorboard": False, "picture": False, "sample_tokens": 8,
}  # fmt: skip


def train(out: Path, *, resume: bool = False, **settings: Any) -> launch.TrainResult:
    """Train in ``out`` on a text next to it; its messages go to MESSAGES."""
    text = out.parent / "text.py"
    if not text.exists():
        text.write_text(TEXT)
    MESSAGES.clear()
    device, profile = settings.pop("device", "cpu"), settings.pop("profile", None)
    sizes = {} if resume else {**SIZES, "data": text}
    if "start" in settings:
        sizes = {n: v for n, v in sizes.items() if n not in ("layers", "heads", "width")}
    return launch.train(
        "tiny", {**sizes, **settings}, out=out, resume=resume, device=device, log=MESSAGES.append,
        quiet=True, profile=profile,
    )  # fmt: skip


MESSAGES: list[str] = []


def lines(out: Path) -> list[dict[str, Any]]:
    return list(metrics.read_lines(out / metrics.FILE))


def losses(out: Path) -> dict[int, float]:
    """Return the loss of each step; a repeated step is an error."""
    loss_by_step: dict[int, float] = {}
    for line in lines(out):
        if "loss" in line:
            assert line["step"] not in loss_by_step, f"step {line['step']} is there twice"
            loss_by_step[line["step"]] = line["loss"]
    return loss_by_step


def weights(out: Path) -> dict[str, torch.Tensor]:
    return checkpoint.load_model(out)[2]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def attempt(out: Path, settings: dict[str, Any]) -> int:
    """Start a child that begins or resumes the run; return its process id.

    A fork needs no imports; but a child cannot use the CUDA driver that its parent has initialised.
    """
    if settings["device"] != "cpu":
        words = [sys.executable, __file__, "attempt", str(out), json.dumps(settings)]
        return os.posix_spawn(sys.executable, words, os.environ)
    child = os.fork()
    if child:
        return child
    run(out, settings)


def run(out: Path, settings: dict[str, Any]) -> NoReturn:
    """Run one attempt and end this process."""
    code = 1
    torch.seed()  # as in a new process: a fork has its parent's generator
    try:
        resume = (out / "run.json").exists()
        train(out, resume=resume, **({"device": settings["device"]} if resume else settings))
        code = 0
    finally:  # a forked child must not return into the parent's code
        if code:
            out.with_name("failed.txt").write_text(traceback.format_exc())
        os._exit(code)


def wait_for(kind: str, out: Path, rng: random.Random, steps_per_kill: int, start: float) -> None:
    """Wait for the moment to kill: during the start (``start`` seconds), the steps, or the writing of a
    checkpoint."""
    path = out / metrics.FILE
    before = path.stat().st_size if path.exists() else 0
    until = time.monotonic() + 60
    if kind == "start":
        time.sleep(rng.random() * start)
        return
    bytes_to_write = rng.randrange(60, 60 + 100 * steps_per_kill)  # bytes: a line has about a hundred
    hidden = f"{TEMPORARY}*"
    while time.monotonic() < until:
        writing = kind == "writing" and any((out / CHECKPOINTS).glob(hidden))
        grown = path.stat().st_size - before if path.exists() else 0
        # If the loop misses the writing, it stops after some bytes, so that later kills still have steps.
        if writing or grown > (bytes_to_write if kind == "steps" else 150 * steps_per_kill):
            break
    time.sleep(rng.random() * (0.01 if kind == "steps" else 0.004))


def killed(out: Path, kills: int, settings: dict[str, Any], seed: int) -> dict[str, Any]:
    """Run to the end through ``kills`` kills; count them, and those that left a partial checkpoint."""
    rng, counts = random.Random(seed), {"killed": 0, "half": 0, "early": 0}
    steps_per_kill = max(1, settings["steps"] // (2 * kills))
    start = 0.3 if settings["device"] == "cpu" else 10.0
    for number in range(kills):
        child = attempt(out, settings)
        wait_for(("start", "steps", "writing", "writing")[number % 4], out, rng, steps_per_kill, start)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        counts["killed"] += os.WIFSIGNALED(status)
        counts["half"] += any((out / CHECKPOINTS).glob(f"{TEMPORARY}*"))
        counts["early"] += not (out / CHECKPOINTS).exists()
    _, status = os.waitpid(attempt(out, settings), 0)
    return {**counts, "end": os.waitstatus_to_exitcode(status)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "attempt":
        run(Path(sys.argv[2]), json.loads(sys.argv[3]))
    root, kills, device = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    settings = {"steps": 10 * kills, "checkpoint_every": 2, "device": device}
    _, uninterrupted_status = os.waitpid(attempt(root / "whole", settings), 0)
    summary = killed(root / "killed", kills, settings, seed=int(sys.argv[4]))
    print(json.dumps({**summary, "whole": os.waitstatus_to_exitcode(uninterrupted_status)}))
