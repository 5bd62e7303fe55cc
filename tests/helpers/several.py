"""Runs of two processes for ``test_gpt2_distributed``, started by torchrun; then a run that is asked to
stop, and two with a full disk."""

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
from weft.gpt2 import launch
from weft.gpt2.distributed import fsdp
from weft.gpt2.distributed.process_group import ProcessGroup, barrier, joined
from weft.gpt2.train import metrics
from weft.gpt2.train.checkpoint_files import CHECKPOINTS, checkpoint_path

STEPS, HALF = 6, 3
# 29 positions are cut into 15 and 14; gradients so large that each step clips them.
SIZES: dict[str, Any] = {
    "layers": 2, "heads": 2, "width": 32, "length": 29, "batch": 8, "lr": 1e-2, "warmup": 2,
    "steps": STEPS, "validate_every": HALF, "validate_batches": 1, "checkpoint_every": HALF,
    "keep": 9, "seed": 3, "tensorboard": False, "sample_tokens": 4, "clip": 0.5,
}  # fmt: skip
BF16: dict[str, Any] = {"dtype": "bfloat16"}
# Runs by name: settings, and the run that they resume, or None.
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
# Runs in which all blocks are one FSDP2 unit, as in a small model; in the others each block is a unit.
TOGETHER = ("fsdp-parts", "bf16-fsdp")
MESSAGES: list[str] = []
HANG = 200  # seconds until all threads' stacks are printed and the process ends
FILE_LIMIT = 20_000  # bytes of a file on the "full disk"; a checkpoint's files are larger


def train(
    root: Path, name: str, group: ProcessGroup | None = None, resume: bool = False, **settings: Any
) -> launch.TrainResult:
    """Train in ``root``, or resume a run that was copied there."""
    words = settings if resume else {**SIZES, "data": root / "text.py", **settings}
    return launch.train(
        "tiny", words, out=root / name, resume=resume, device="cpu", log=MESSAGES.append, quiet=True,
        group=group,
    )  # fmt: skip


def halve(root: Path, before: str, name: str) -> None:
    """Copy a run with its state after ``HALF`` steps."""
    shutil.copytree(root / before, root / name)
    shutil.rmtree(checkpoint_path(root / name / CHECKPOINTS, STEPS))


def repeat_second_half(root: Path, name: str, before: str, group: ProcessGroup, **settings: Any) -> None:
    """Repeat the second half of an earlier run."""
    if group.is_main:
        halve(root, before, name)
    barrier(group)
    train(root, name, group, resume=True, **settings)


def full(root: Path, before: str, group: ProcessGroup, rank: int) -> None:
    """Repeat the second half on a disk that is full for the process of this rank."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if group.is_main:
        halve(root, before, f"{before}-full")
    barrier(group)
    if group.rank == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_LIMIT, limit[1]))
    try:
        train(root, f"{before}-full", group, resume=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


def stop(root: Path, group: ProcessGroup) -> None:
    """Start a long run and send SIGTERM to the second process after some steps."""

    def ask() -> None:
        while len(list(metrics.read_lines(root / "stopped" / metrics.FILE))) < HALF:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    if not group.is_main:
        threading.Thread(target=ask, daemon=True).start()
    result = train(root, "stopped", group, strategy="fsdp", steps=10**6)
    summary = {"step": result.outcome.step, "signal": result.outcome.signal}
    (root / f"stopped-{group.rank}.json").write_text(json.dumps(summary))


def main(root: Path) -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(HANG, exit=True)
    with joined("cpu") as group:
        together = fsdp.UNIT_PARAMETERS
        for name, (settings, before) in RUNS.items():
            fsdp.UNIT_PARAMETERS = together if name in TOGETHER else 1
            if before:
                repeat_second_half(root, name, before, group, **settings)
            else:
                train(root, name, group, **settings)
            barrier(group)
        stop(root, group)
        try:
            full(root, "fsdp", group, rank=1)
        except WeftError as error:  # each process raises the error, so that both continue
            (root / f"fsdp-full-{group.rank}.txt").write_text(str(error))
        full(root, "ddp", group, rank=0)  # only rank 0 raises the error, and the other process waits for it


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except WeftError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
