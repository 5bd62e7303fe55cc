"""Checkpoints: folders that are there whole or not at all, and are checked when they are read.

    RUN/checkpoints/step-00000100/  model.safetensors      float32 weights by the model's own names
                                    optimizer.safetensors  moments, and the state of random numbers
                                    state.json             step, configuration, the data's identity,
                                                           guards, and the sha256 of the two others

A checkpoint is written to a hidden folder beside, put onto the disk, and renamed: a crash or a full
disk leaves no half of one, and the older ones stand. ``state.json`` seals itself with a hash of its
own. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from weft.core import WeftError
from weft.gpt2.config import ModelConfig
from weft.gpt2.files import sync, writing

FORMAT = 1
FOLDER = "checkpoints"
MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
NAME = re.compile(r"step-(\d{8,})")
TEMPORARY = ".tmp-"  # hidden folders: being written, or being removed
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One that was read and whose hashes held. ``tensors`` by file, then by name, on the CPU."""

    path: Path
    step: int
    state: dict[str, Any]
    tensors: dict[str, dict[str, torch.Tensor]]


def save(root: Path, step: int, files: Mapping[str, Tensors], state: dict[str, Any]) -> Path:
    """Write ``root/step-...`` and return it.

    Args:
        root: the run's folder of checkpoints; made where it is missing.
        step: how many steps are done.
        files: tensors by name, by the file that they go to.
        state: plain data that goes to ``state.json``.

    Raises:
        WeftError: the disk is full, or the folder cannot be written; what was there still is.
    """
    with guarded(root, step):
        temporary = begin(root, step)
        told = {name: _write(temporary / name, tensors) for name, tensors in files.items()}
        return finish(root, step, told, state)


def place(root: Path, step: int, *, temporary: bool = False) -> Path:
    """The folder of the checkpoint of ``step``, or of one that is being written."""
    return root / (f"{TEMPORARY}{step:08d}" if temporary else f"step-{step:08d}")


def folder(name: str) -> str:
    """Where the parts of a file lie, if it is written in parts (``weft.gpt2.parts``)."""
    return Path(name).stem


@contextmanager
def guarded(root: Path, step: int, *, removes: bool = True) -> Iterator[None]:
    """Turn a failed write of ``step`` into one message; ``removes`` what was written of it."""
    try:
        with writing(f"the checkpoint of step {step}", root):
            yield
    except WeftError:
        if removes:
            _remove(place(root, step, temporary=True))
        raise


def begin(root: Path, step: int) -> Path:
    """Make the folder that the checkpoint of ``step`` is written to, empty."""
    temporary = place(root, step, temporary=True)
    root.mkdir(parents=True, exist_ok=True)
    _remove(temporary)
    temporary.mkdir()
    return temporary


def finish(root: Path, step: int, told: Mapping[str, Any], state: Mapping[str, Any]) -> Path:
    """Seal the checkpoint of ``step`` and put it in its place.

    ``told`` is what :func:`describe` said of each file, by its name in the folder.
    """
    path, temporary = place(root, step), place(root, step, temporary=True)
    whole = {**state, "format": FORMAT, "step": step, "files": dict(told)}
    (temporary / STATE).write_text(json.dumps({**whole, "seal": seal(whole)}, indent=1))
    sync(temporary / STATE)
    for inside in {(temporary / name).parent for name in told} | {temporary}:
        sync(inside)
    if path.exists():  # a torn one that the run did not go on from
        os.replace(path, _hidden(path))
    os.replace(temporary, path)
    sync(root)
    return path


def _write(path: Path, tensors: Tensors) -> dict[str, Any]:
    """Write one file and return its size and hash, taken of what can be read again."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file({n: t.detach().contiguous() for n, t in tensors.items()}, path)
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        code = int(number.group(1))
        raise OSError(code, os.strerror(code)) from error
    return describe(path)


def describe(path: Path) -> dict[str, Any]:
    """Put a written file onto the disk and return its size and hash."""
    sync(path)
    return {"bytes": path.stat().st_size, "sha256": _hash(path)}


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def seal(state: Mapping[str, Any]) -> str:
    """The hash of a state's own content, which tells an edited one."""
    told = {key: value for key, value in state.items() if key != "seal"}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def prune(root: Path, keep: int) -> None:
    """Remove all but the newest ``keep`` checkpoints, and what a crash left of unfinished ones."""
    if not root.is_dir():
        return
    for path in steps(root)[keep:]:
        # Renamed first: half removed it must not look like a checkpoint.
        os.replace(path, _hidden(path))
    for path in root.glob(f"{TEMPORARY}*"):
        _remove(path)


def set_aside(root: Path, after: int) -> list[Path]:
    """Rename the checkpoints of more than ``after`` steps to ``broken-step-...`` and return them.

    A run that goes on from an older one would else keep them as its newest.
    """
    moved = []
    for path in steps(root):
        if int(path.name.partition("-")[2]) > after:
            aside = path.with_name(f"broken-{path.name}")
            _remove(aside)
            os.replace(path, aside)
            moved.append(aside)
    return moved


def _hidden(path: Path) -> Path:
    hidden = path.with_name(f"{TEMPORARY}old-{path.name}")
    _remove(hidden)
    return hidden


def _remove(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)


def steps(root: Path) -> list[Path]:
    """The checkpoints of a folder, the newest first."""
    found = [p for p in root.iterdir() if NAME.fullmatch(p.name)] if root.is_dir() else []
    return sorted(found, key=lambda p: int(p.name.partition("-")[2]), reverse=True)


def read_state(path: Path) -> dict[str, Any]:
    """A checkpoint's ``state.json``.

    Raises:
        WeftError: it is missing, torn, edited, or of another format.
    """
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _broken(path, STATE, f"{type(error).__name__}: {error}") from error
    if not isinstance(state, dict) or state.get("seal") != seal(state):
        raise _broken(path, STATE, "its hash does not hold: it was edited, or torn")
    if state["format"] != FORMAT:
        expected, got = f"format {FORMAT}", f"format {state['format']}"
        raise WeftError(f"the checkpoint {path}", expected=expected, got=got)
    return state


def load(path: Path, names: tuple[str, ...] = (MODEL, OPTIMIZER)) -> Checkpoint:
    """Read one checkpoint, of its files those of ``names``, each held against its hash first.

    Raises:
        WeftError: a file is missing, torn or edited; the message names it.
    """
    from safetensors.torch import load_file

    found = check(path, names)
    for name in names:
        if name in found.state["files"]:
            found.tensors[name] = load_file(path / name)
        else:
            from weft.gpt2 import parts

            found.tensors[name] = parts.read(path, name)
    return found


def check(path: Path, names: tuple[str, ...] = (MODEL, OPTIMIZER)) -> Checkpoint:
    """As :func:`load`, but no tensor is read, once the files were held against their hashes."""
    state = read_state(path)
    for name in names:
        beside = f"{folder(name)}/"
        files = [f for f in state["files"] if f == name or f.startswith(beside)]
        there = [f"{beside}{p.name}" for p in (path / beside).glob("*")]
        if not files:
            raise _broken(path, name, "it is missing")
        if odd := sorted(set(there) - set(files)):  # it would be read with the others
            raise _broken(path, odd[0], "a file that was not written with it")
        for file in files:
            _check_file(path, file, state["files"][file])
    return Checkpoint(path=path, step=state["step"], state=state, tensors={})


def _check_file(path: Path, name: str, told: Mapping[str, Any]) -> None:
    file = path / name
    if not file.is_file():
        raise _broken(path, name, "it is missing")
    size = file.stat().st_size
    if size != told["bytes"]:
        raise _broken(path, name, f"{size} bytes of {told['bytes']}")
    if _hash(file) != told["sha256"]:
        raise _broken(path, name, "its hash does not hold: it was edited, or the disk erred")


def newest(
    root: Path,
    say: Callable[[str], None],
    names: tuple[str, ...] = (MODEL, OPTIMIZER),
    read: Callable[[Path, tuple[str, ...]], Checkpoint] = load,
) -> Checkpoint | None:
    """The newest checkpoint that ``read`` can read; None where there is none at all.

    One that is broken is named by ``say``, and the one before it is taken.

    Raises:
        WeftError: there are some, and all are broken.
    """
    found = steps(root)
    for path in found:
        try:
            return read(path, names)
        except WeftError as error:
            say(f"{error}; the one before it is tried")
    if found:
        raise WeftError(f"the checkpoints in {root}", expected="one that is whole", got="none")
    return None


def load_model(
    path: Path, say: Callable[[str], None] = lambda line: None
) -> tuple[ModelConfig, str, dict[str, torch.Tensor]]:
    """A trained model: its configuration, its tokeniser's name, and its float32 weights by name.

    Args:
        path: a run's folder, whose newest checkpoint is taken, or one checkpoint.
        say: takes a line for each newer checkpoint that is broken.

    Raises:
        WeftError: there is no checkpoint, or none that can be read.
    """
    path = Path(path)
    one = (path / STATE).is_file() or NAME.fullmatch(path.name)
    found = load(path, (MODEL,)) if one else newest(path / FOLDER, say, (MODEL,))
    if found is None:
        expected = f"a run's folder with {FOLDER}/step-..., or one such folder"
        raise WeftError(f"{path} holds no checkpoint", expected=expected, got="none")
    plan = found.state["plan"]
    return ModelConfig(**plan["model"]), plan["tokeniser"], found.tensors[MODEL]


def _broken(path: Path, name: str, why: str) -> WeftError:
    return WeftError(f"the checkpoint {path} is broken", expected=f"{name} whole", got=why)


def random_state() -> dict[str, torch.Tensor]:
    """The state of torch's own random numbers, as tensors for a checkpoint."""
    found = {"random.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        found["random.cuda"] = torch.cuda.get_rng_state()
    return found


def restore_random(tensors: Tensors) -> None:
    """Take what :func:`random_state` gave; a GPU's where there is one."""
    torch.set_rng_state(tensors["random.cpu"])
    if "random.cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["random.cuda"])
