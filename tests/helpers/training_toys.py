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


def train(out: Path, *, resume: bool = False, **given: Any) -> launch.TrainResult:
    """Train in ``out`` on a text next to it; its messages go to MESSAGES."""
    text = out.parent / "text.py"
    if not text.exists():
        text.write_text(TEXT)
    MESSAGES.clear()
    device, profile = given.pop("device", "cpu"), given.pop("profile", None)
    sizes = {} if resume else {**SIZES, "data": text}
    if "start" in given:
        sizes = {n: v for n, v in sizes.items() if n not in ("layers", "heads", "width")}
    return launch.train(
        "tiny", {**sizes, **given}, out=out, resume=resume, device=device, log=MESSAGES.append,
        quiet=True, profile=profile,
    )  # fmt: skip


MESSAGES: list[str] = []


def lines(out: Path) -> list[dict[str, Any]]:
    return list(metrics.read_lines(out / metrics.FILE))


def losses(out: Path) -> dict[int, float]:
    """Return the loss of each step; a repeated step is an error."""
    found: dict[int, float] = {}
    for line in lines(out):
        if "loss" in line:
            assert line["step"] not in found, f"step {line['step']} is there twice"
            found[line["step"]] = line["loss"]
    return found


def weights(out: Path) -> dict[str, torch.Tensor]:
    return checkpoint.load_model(out)[2]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def attempt(out: Path, given: dict[str, Any]) -> int:
    """Start a child that begins or resumes the run; return its process id.

    A fork needs no imports; but a child cannot use the CUDA driver that its parent has initialised.
    """
    if given["device"] != "cpu":
        words = [sys.executable, __file__, "attempt", str(out), json.dumps(given)]
        return os.posix_spawn(sys.executable, words, os.environ)
    child = os.fork()
    if child:
        return child
    run(out, given)


def run(out: Path, given: dict[str, Any]) -> NoReturn:
    """Run one attempt and end this process."""
    code = 1
    torch.seed()  # as a process of its own would be: a fork has its parent's generator
    try:
        resume = (out / "run.json").exists()
        train(out, resume=resume, **({"device": given["device"]} if resume else given))
        code = 0
    finally:  # the child must not continue as its parent
        if code:
            out.with_name("failed.txt").write_text(traceback.format_exc())
        os._exit(code)


def wait_for(kind: str, out: Path, draw: random.Random, ahead: int, start: float) -> None:
    """Wait for the moment to kill: during the start (``start`` seconds), the steps, or the writing of a
    checkpoint."""
    path = out / metrics.FILE
    before = path.stat().st_size if path.exists() else 0
    until = time.monotonic() + 60
    if kind == "start":
        time.sleep(draw.random() * start)
        return
    more = draw.randrange(60, 60 + 100 * ahead)  # bytes: a line has about a hundred
    hidden = f"{TEMPORARY}*"
    while time.monotonic() < until:
        writing = kind == "writing" and any((out / CHECKPOINTS).glob(hidden))
        grown = path.stat().st_size - before if path.exists() else 0
        # A writing that the loop has not seen must not cost the steps of the kills to come.
        if writing or grown > (more if kind == "steps" else 150 * ahead):
            break
    time.sleep(draw.random() * (0.01 if kind == "steps" else 0.004))


def killed(out: Path, kills: int, given: dict[str, Any], seed: int) -> dict[str, Any]:
    """Run to the end through ``kills`` kills; count them, and those that left a partial checkpoint."""
    draw, found = random.Random(seed), {"killed": 0, "half": 0, "early": 0}
    ahead = max(1, given["steps"] // (2 * kills))
    start = 0.3 if given["device"] == "cpu" else 10.0
    for turn in range(kills):
        child = attempt(out, given)
        wait_for(("start", "steps", "writing", "writing")[turn % 4], out, draw, ahead, start)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        found["killed"] += os.WIFSIGNALED(status)
        found["half"] += any((out / CHECKPOINTS).glob(f"{TEMPORARY}*"))
        found["early"] += not (out / CHECKPOINTS).exists()
    _, status = os.waitpid(attempt(out, given), 0)
    return {**found, "end": os.waitstatus_to_exitcode(status)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "attempt":
        run(Path(sys.argv[2]), json.loads(sys.argv[3]))
    root, kills, device = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    asked = {"steps": 10 * kills, "checkpoint_every": 2, "device": device}
    _, whole = os.waitpid(attempt(root / "whole", asked), 0)
    told = killed(root / "killed", kills, asked, seed=int(sys.argv[4]))
    print(json.dumps({**told, "whole": os.waitstatus_to_exitcode(whole)}))
