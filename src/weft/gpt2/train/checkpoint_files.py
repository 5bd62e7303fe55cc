"""Layout of checkpoints on disk, their hashes, and the atomic write of one.

    RUN/checkpoints/step-00000100/  model.safetensors      float32 weights by the model's own names
                                    optimizer.safetensors  moments, and the states of random generators
                                    state.json             step, configuration, the data's identity,
                                                           guards, and the sha256 of the other files

A sharded checkpoint has a folder ``model`` and one ``optimizer`` in place of the two files
(``sharded_checkpoint``). A checkpoint is written to a hidden folder next to the others, put onto the
disk, and renamed: a crash or a full disk leaves no partial one, and the older ones are unchanged.
``state.json`` has a hash of its own content, the seal. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from weft.core import WeftError
from weft.core.json_files import read_json
from weft.core.output_files import sync
from weft.gpt2.train.durable_io import write_errors

FORMAT = 1
CHECKPOINTS = "checkpoints"
MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
STEP_NAME = re.compile(r"step-(\d{8,})")
TEMPORARY = ".tmp-"  # prefix of hidden folders: being written, or being removed
RNG_PREFIX = "random."  # of the random generators' states among the optimizer's tensors
Tensors = Mapping[str, torch.Tensor]


def checkpoint_path(root: Path, step: int, *, temporary: bool = False) -> Path:
    """Return the folder of the checkpoint of ``step``, or the one that it is written to."""
    return root / (f"{TEMPORARY}{step:08d}" if temporary else f"step-{step:08d}")


def list_checkpoints(root: Path) -> list[Path]:
    """Return the checkpoints in a folder, the newest first."""
    paths = [p for p in root.iterdir() if STEP_NAME.fullmatch(p.name)] if root.is_dir() else []
    return sorted(paths, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    """Return the step in a checkpoint's name."""
    return int(path.name.partition("-")[2])


def shard_folder(name: str) -> str:
    """Return the folder that has the shards of a file, in a sharded checkpoint."""
    return Path(name).stem


# --- writing


@contextmanager
def checkpoint_write(root: Path, step: int, *, remove: bool = True) -> Iterator[None]:
    """Turn a failed write of a checkpoint into one error; ``remove`` deletes what was written of it."""
    try:
        with write_errors(f"the checkpoint of step {step}", root):
            yield
    except WeftError:
        if remove:
            remove_folder(checkpoint_path(root, step, temporary=True))
        raise


def begin_checkpoint(root: Path, step: int) -> Path:
    """Create the empty temporary folder of the checkpoint of ``step``."""
    temporary = checkpoint_path(root, step, temporary=True)
    root.mkdir(parents=True, exist_ok=True)
    remove_folder(temporary)
    temporary.mkdir()
    return temporary


def commit_checkpoint(root: Path, step: int, files: Mapping[str, Any], state: Mapping[str, Any]) -> Path:
    """Write ``state.json`` and rename the temporary folder to the checkpoint's name.

    ``files`` has the result of :func:`describe_file` for each file, by its name in the folder.
    """
    path, temporary = checkpoint_path(root, step), checkpoint_path(root, step, temporary=True)
    # The state is written last: a folder with a valid seal has all the files that it names.
    content = {**state, "format": FORMAT, "step": step, "files": dict(files)}
    (temporary / STATE).write_text(json.dumps({**content, "seal": seal(content)}, indent=1))
    sync(temporary / STATE)
    # The new names must be durable before the rename makes the folder a checkpoint.
    for folder in {(temporary / name).parent for name in files} | {temporary}:
        sync(folder)
    if path.exists():  # a broken one that the run did not resume from
        os.replace(path, hidden_name(path))
    os.replace(temporary, path)
    sync(root)
    return path


def hidden_name(path: Path) -> Path:
    """Return a free hidden name next to a checkpoint, for one that is about to be removed."""
    hidden = path.with_name(f"{TEMPORARY}old-{path.name}")
    remove_folder(hidden)
    return hidden


def remove_folder(path: Path) -> None:
    """Remove a folder if it is there."""
    if path.exists():
        shutil.rmtree(path)


# --- hashes


def describe_file(path: Path) -> dict[str, Any]:
    """Put a written file onto the disk and return its size and hash."""
    sync(path)
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def seal(state: Mapping[str, Any]) -> str:
    """Return the hash of a state's content, which reveals a later edit."""
    content = {key: value for key, value in state.items() if key != "seal"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_state(path: Path) -> dict[str, Any]:
    """Read a checkpoint's ``state.json``.

    Raises:
        WeftError: it is missing, truncated, edited, or of another format.
    """
    try:
        state = read_json(path / STATE)
    except (OSError, ValueError) as error:
        raise broken(path, STATE, f"{type(error).__name__}: {error}") from error
    # The seal before the format: a truncated file must not be taken for one of another version.
    if not isinstance(state, dict) or state.get("seal") != seal(state):
        raise broken(path, STATE, "its hash does not match: it was edited or truncated")
    if state["format"] != FORMAT:
        expected, got = f"format {FORMAT}", f"format {state['format']}"
        raise WeftError(f"the checkpoint {path}", expected=expected, got=got)
    return state


def check_files(path: Path, state: Mapping[str, Any], names: tuple[str, ...]) -> None:
    """Check the size and hash of the files of ``names``, whole or sharded, against the state.

    Raises:
        WeftError: a file is missing, changed, or was added; the message names it.
    """
    for name in names:
        prefix = f"{shard_folder(name)}/"
        files = [f for f in state["files"] if f == name or f.startswith(prefix)]
        if not files:
            raise broken(path, name, "it is missing")
        # A reader of shards takes every file in the folder, so an additional one would be read too.
        on_disk = {f"{prefix}{p.name}" for p in (path / prefix).glob("*")}
        if added := sorted(on_disk - set(files)):
            raise broken(path, added[0], "a file that was not written with it")
        for file in files:
            _check_file(path, file, state["files"][file])


def _check_file(path: Path, name: str, expected: Mapping[str, Any]) -> None:
    file = path / name
    if not file.is_file():
        raise broken(path, name, "it is missing")
    # The size first: it is free, and says how much of a truncated file is there.
    size = file.stat().st_size
    if size != expected["bytes"]:
        raise broken(path, name, f"{size} bytes of {expected['bytes']}")
    if sha256(file) != expected["sha256"]:
        raise broken(path, name, "its hash does not match: it was edited, or the disk failed")


def broken(path: Path, name: str, reason: str) -> WeftError:
    """Return the error for a damaged file of a checkpoint."""
    return WeftError(f"the checkpoint {path} is broken", expected=f"{name} whole", got=reason)
