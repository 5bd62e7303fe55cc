"""Save, load, verify and prune checkpoints; their layout is described in ``checkpoint_files``."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from weft.core import WeftError
from weft.gpt2.model.config import ModelConfig
from weft.gpt2.train.checkpoint_files import (
    CHECKPOINTS,
    MODEL,
    OPTIMIZER,
    RNG_PREFIX,
    STATE,
    STEP_NAME,
    TEMPORARY,
    Tensors,
    begin_checkpoint,
    check_files,
    checkpoint_write,
    commit_checkpoint,
    describe_file,
    hidden_name,
    list_checkpoints,
    read_state,
    remove_folder,
    step_of,
)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose hashes were verified; ``tensors`` by file, then by name, on the CPU."""

    path: Path
    step: int
    state: dict[str, Any]
    tensors: dict[str, dict[str, torch.Tensor]]


def save(root: Path, step: int, files: Mapping[str, Tensors], state: dict[str, Any]) -> Path:
    """Write ``root/step-...`` and return it.

    Args:
        root: the run's folder of checkpoints; created if it is missing.
        step: number of completed steps.
        files: tensors by name, for each file.
        state: plain data for ``state.json``.

    Raises:
        WeftError: the disk is full, or the folder cannot be written; older checkpoints are unchanged.
    """
    with checkpoint_write(root, step):
        temporary = begin_checkpoint(root, step)
        described = {name: _write_tensors(temporary / name, tensors) for name, tensors in files.items()}
        return commit_checkpoint(root, step, described, state)


def _write_tensors(path: Path, tensors: Tensors) -> dict[str, Any]:
    """Write one file and return its size and hash, computed from the file itself."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        # safetensors refuses tensors that are not contiguous.
        save_file({n: t.detach().contiguous() for n, t in tensors.items()}, path)
    except SafetensorError as error:
        # safetensors reports the system's error as text only; callers handle OSErrors.
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        code = int(number.group(1))
        raise OSError(code, os.strerror(code)) from error
    return describe_file(path)


def prune(root: Path, keep: int) -> None:
    """Remove all but the newest ``keep`` checkpoints, and unfinished ones that a crash left."""
    if not root.is_dir():
        return
    for path in list_checkpoints(root)[keep:]:
        # Renamed first, so that a half-removed one does not look like a checkpoint.
        os.replace(path, hidden_name(path))
    for path in root.glob(f"{TEMPORARY}*"):
        remove_folder(path)


def set_aside_newer(root: Path, step: int) -> list[Path]:
    """Rename the checkpoints after ``step`` to ``broken-step-...`` and return them.

    A run that resumes from ``step`` would otherwise keep them as its newest.
    """
    renamed = []
    for path in list_checkpoints(root):
        if step_of(path) > step:
            target = path.with_name(f"broken-{path.name}")
            remove_folder(target)
            # Kept under another name and not deleted: the user may want to examine it.
            os.replace(path, target)
            renamed.append(target)
    return renamed


def load(path: Path, names: tuple[str, ...] = (MODEL, OPTIMIZER)) -> Checkpoint:
    """Read the files ``names`` of one checkpoint, whole or sharded, after checking their hashes.

    Raises:
        WeftError: a file is missing, truncated or edited; the message names it.
    """
    from safetensors.torch import load_file

    checkpoint = verify(path, names)
    for name in names:
        if name in checkpoint.state["files"]:
            checkpoint.tensors[name] = load_file(path / name)
        else:
            # Imported here because torch.distributed.checkpoint is slow to import.
            from weft.gpt2.train import sharded_checkpoint

            checkpoint.tensors[name] = sharded_checkpoint.read_whole(path, name)
    return checkpoint


def verify(path: Path, names: tuple[str, ...] = (MODEL, OPTIMIZER)) -> Checkpoint:
    """Check the hashes as :func:`load` does, and return the checkpoint without tensors."""
    state = read_state(path)
    check_files(path, state, names)
    return Checkpoint(path=path, step=state["step"], state=state, tensors={})


def load_newest(
    root: Path,
    log: Callable[[str], None],
    names: tuple[str, ...] = (MODEL, OPTIMIZER),
    read: Callable[[Path, tuple[str, ...]], Checkpoint] = load,
) -> Checkpoint | None:
    """Return the newest checkpoint that ``read`` accepts; None if there are no checkpoints.

    A broken one is reported to ``log``, and the one before it is tried.

    Raises:
        WeftError: there are checkpoints, and all are broken.
    """
    paths = list_checkpoints(root)
    for path in paths:
        try:
            return read(path, names)
        except WeftError as error:
            log(f"{error}; trying the one before it")
    if paths:
        raise WeftError(f"the checkpoints in {root}", expected="one that is whole", got="none")
    return None


def load_model(
    path: Path, log: Callable[[str], None] = lambda line: None
) -> tuple[ModelConfig, str, dict[str, torch.Tensor]]:
    """Read a trained model: its configuration, its tokeniser's name, and float32 weights by name.

    Args:
        path: a run's directory, whose newest checkpoint is read, or one checkpoint.
        log: receives a line for each newer checkpoint that is broken.

    Raises:
        WeftError: there is no checkpoint, or none that can be read.
    """
    path = Path(path)
    is_checkpoint = (path / STATE).is_file() or STEP_NAME.fullmatch(path.name)
    checkpoint = load(path, (MODEL,)) if is_checkpoint else load_newest(path / CHECKPOINTS, log, (MODEL,))
    if checkpoint is None:
        expected = f"a run's folder with {CHECKPOINTS}/step-..., or one such folder"
        raise WeftError(f"{path} holds no checkpoint", expected=expected, got="none")
    plan = checkpoint.state["plan"]
    return ModelConfig(**plan["model"]), plan["tokeniser"], checkpoint.tensors[MODEL]


def rng_state() -> dict[str, torch.Tensor]:
    """Return the states of torch's random generators, as tensors for a checkpoint."""
    states = {f"{RNG_PREFIX}cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"{RNG_PREFIX}cuda"] = torch.cuda.get_rng_state()
    return states


def restore_rng(tensors: Tensors) -> None:
    """Restore the result of :func:`rng_state`; a GPU's if there is a GPU."""
    torch.set_rng_state(tensors[f"{RNG_PREFIX}cpu"])
    if f"{RNG_PREFIX}cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors[f"{RNG_PREFIX}cuda"])
