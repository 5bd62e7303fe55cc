"""What two processes train, one run after another, for ``test_gpt2_distributed``; started by
torchrun. Then one is asked to stop, and in two a disk
is full."""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from weft.core import WeftError
from weft.gpt2 import checkpoint, launch, metrics, sharded
from weft.gpt2.group import Group, joined, wait

STEPS, HALF = 6, 3
# 29 positions are cut into 15 and 14; gradients so large that each step clips them.
SIZES: dict[str, Any] = {
    "layers": 2, "heads": 2, "width": 32, "length": 29, "batch": 8, "lr": 1e-2, "warmup": 2,
    "steps": STEPS, "validate_every": HALF, "validate_batches": 1, "checkpoint_every": HALF,
    "keep": 9, "seed": 3, "tensorboard": False, "sample_tokens": 4, "clip": 0.5,
}  # fmt: skip
BF16: dict[str, Any] = {"dtype": "bfloat16"}
# Runs by name: what two processes are given beside, and what they go on from, if not from nothing.
RUNS: dict[str, tuple[dict[str, Any], str | None]] = {
    "ddp": ({"strategy": "ddp", "ops": "torch"}, None),
    "ddp-parts": ({"strategy": "ddp", "accumulate": 2}, None),
    "fsdp": ({"strategy": "fsdp"}, None),
    "fsdp-parts": ({"strategy": "fsdp", "ops": "torch", "accumulate": 2, "reshard": True}, None),
    "ddp-again": ({}, "ddp"),
    "fsdp-again": ({}, "fsdp"),
    "one-to-ddp": ({"strategy": "ddp"}, "one"),
    "one-to-fsdp": ({"strategy": "fsdp"}, "one"),
    "ddp-to-fsdp": ({"strategy": "fsdp"}, "ddp"),
    "fsdp-to-ddp": ({"strategy": "ddp"}, "fsdp"),
    "bf16-ddp": ({"strategy": "ddp", **BF16}, None),
    "bf16-fsdp": ({"strategy": "fsdp", **BF16}, None),
}
# Runs whose blocks are one unit of FSDP2's, as a small model's are; in the others each is one.
TOGETHER = ("fsdp-parts", "bf16-fsdp")
SAID: list[str] = []
HANG = 200  # seconds until a hang is told, with the place of each thread
ROOM = 20_000  # bytes a file may have, where a disk is to be full: a checkpoint's have more


def train(
    root: Path, name: str, group: Group | None = None, resume: bool = False, **given: Any
) -> launch.Trained:
    """A run in ``root``, or the second half of one that was copied there."""
    words = given if resume else {**SIZES, "data": root / "text.py", **given}
    return launch.train(
        "tiny", words, out=root / name, resume=resume, device="cpu", say=SAID.append, quiet=True,
        group=group,
    )  # fmt: skip


def halve(root: Path, before: str, name: str) -> None:
    """A copy of a run as it was after ``HALF`` steps."""
    shutil.copytree(root / before, root / name)
    shutil.rmtree(checkpoint.place(root / name / checkpoint.FOLDER, STEPS))


def again(root: Path, name: str, before: str, group: Group, **given: Any) -> None:
    """The second half of a run that was made before."""
    if group.first:
        halve(root, before, name)
    wait(group)
    train(root, name, group, resume=True, **given)


def full(root: Path, before: str, group: Group, rank: int) -> None:
    """Likewise, on a disk that is full for the process of this rank."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if group.first:
        halve(root, before, f"{before}-full")
    wait(group)
    if group.rank == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, limit[1]))
    try:
        train(root, f"{before}-full", group, resume=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


def stop(root: Path, group: Group) -> None:
    """A long run, which the second process alone is asked to end once there are some steps."""

    def ask() -> None:
        while len(list(metrics.read(root / "stopped" / metrics.FILE))) < HALF:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    if not group.first:
        threading.Thread(target=ask, daemon=True).start()
    found = train(root, "stopped", group, strategy="fsdp", steps=10**6)
    told = {"step": found.outcome.step, "signal": found.outcome.signal}
    (root / f"stopped-{group.rank}.json").write_text(json.dumps(told))


def main(root: Path) -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(HANG, exit=True)
    with joined("cpu") as group:
        together = sharded.UNIT
        for name, (given, before) in RUNS.items():
            sharded.UNIT = together if name in TOGETHER else 1
            if before:
                again(root, name, before, group, **given)
            else:
                train(root, name, group, **given)
            wait(group)
        stop(root, group)
        try:
            full(root, "fsdp", group, rank=1)
        except WeftError as error:  # each process raises it: they can go on
            (root / f"fsdp-full-{group.rank}.txt").write_text(str(error))
        full(root, "ddp", group, rank=0)  # that one alone raises, and the other waits for it


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except WeftError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
