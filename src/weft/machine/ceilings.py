"""The measured ceilings of a device, kept as JSON in the user's cache folder.

A ceiling is what this device was seen to reach at best; efficiencies are shares of it. It is
measured once for a device and torch version (``measure_gpu.py``, ``measure_cpu.py``) and read
from the file from then on. Measuring again can only raise it: a neighbour's load makes a figure
too low, and nothing makes a median too high.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from weft.core import Ceilings, WeftError
from weft.machine.fingerprint import fingerprint, versions
from weft.machine.keep import write_json
from weft.machine.query import Device, query

FORMAT = 2  # raised when the way of measuring changes, so that older files are measured anew
Progress = Callable[[str], None]
Readers = Callable[[], Sequence[Callable[[Any], object]]]


def cache_folder() -> Path:
    """``WEFT_CACHE_DIR``, else the platform's cache folder with ``weft`` in it."""
    named = os.environ.get("WEFT_CACHE_DIR")
    if named:
        return Path(named).expanduser()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "weft"


def path_for(device: Device) -> Path:
    """The file of this device: its kind, name, units and power limit, since each moves them."""
    parts = [device.kind, device.name, str(device.units or "")]
    if device.kind == "cpu":
        parts[2] = f"{device.threads} threads"
    if device.power_limit_w:
        parts.append(f"{device.power_limit_w:.0f}w")
    slug = re.sub(r"[^a-z0-9]+", "-", " ".join(parts).lower()).strip("-")
    return cache_folder() / "ceilings" / f"{slug}.json"


def _is_rate(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value > 0


def _has_versions(machine: object) -> bool:
    return isinstance(machine, dict) and isinstance(machine.get("versions"), dict)


def _from_json(data: Any) -> Ceilings:
    """The ceilings in a file's data; raises ``ValueError`` where they are not there whole."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError("another format")
    if not _has_versions(data.get("machine")):
        raise ValueError("no versions")
    kept = data.get("ceilings")
    if not isinstance(kept, dict) or set(kept) != set(Ceilings.__dataclass_fields__):
        raise ValueError("other keys")
    matrix = kept["matrix"]
    if not isinstance(matrix, dict) or not all(map(_is_rate, matrix.values())):
        raise ValueError("matrix rates that are no rates")
    if not all(_is_rate(kept[word]) for word in ("copy", "read", "fill")):
        raise ValueError("bandwidths that are no bandwidths")
    return Ceilings(**kept)


@dataclass(frozen=True)
class Kept:
    """A file's content: ``doubt`` says why the figures may be too low, ``machine`` who measured."""

    ceilings: Ceilings
    doubt: str
    machine: dict[str, Any]


def load(path: Path, warn: Progress) -> Kept | None:
    """What is kept at ``path``; None, and a line, where it cannot be read."""
    try:
        data = json.loads(path.read_text())
        return Kept(_from_json(data), str(data.get("doubt", "")), data["machine"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        warn(f"the ceilings kept at {path} cannot be read ({error}); they are not used")
        return None


def save(path: Path, kept: Kept) -> None:
    """Raises :class:`WeftError` where the folder cannot be written."""
    hint = "set WEFT_CACHE_DIR to a folder that can be written"
    write_json(path, {"format": FORMAT, **asdict(kept)}, what="ceilings", hint=hint)


def measure_now(device: Device, say: Progress, readers: Readers = tuple) -> tuple[Ceilings, str]:
    """Measure the device's ceilings now, in a few seconds; and what makes them doubtful, or "".

    ``readers()`` are more functions of a large fp32 tensor that read it once, for a GPU. Nothing is
    read from or kept in a file. ``say`` gets a line for each step. Raises :class:`WeftError` where
    PyTorch is missing.
    """
    try:
        import torch
    except ImportError as error:
        raise WeftError(
            "ceilings are measured with PyTorch", got="no torch", hint="pip install torch"
        ) from error
    doubt = ""
    if device.kind == "cuda":
        from weft.machine import measure_gpu

        found = measure_gpu.measure(torch, say, readers())
    else:
        from weft.machine import measure_cpu

        found, doubt = measure_cpu.measure(torch, device, say)
    date = fingerprint(device.kind)["date"]
    return Ceilings(device=device.name, measured=date, **found), doubt


def better(old: Ceilings, new: Ceilings) -> Ceilings:
    """The larger of each figure; dated by the new one."""
    words = {word: max(getattr(old, word), getattr(new, word)) for word in ("copy", "read", "fill")}
    rates = {rate: max(new.matrix.get(rate, 0), value) for rate, value in old.matrix.items()}
    return replace(new, **words, matrix={**new.matrix, **rates})


_measured: set[Path] = set()  # by this process, which does not measure doubtful ones twice


def ceilings(
    kind: str | None = None,
    *,
    measure: bool = True,
    refresh: bool = False,
    progress: Progress | None = None,
    readers: Readers = tuple,
) -> Ceilings | None:
    """The ceilings of this machine's device: those kept, else measured now and kept.

    ``measure=False`` never measures and gives None where nothing is kept. ``refresh=True``
    measures again and keeps the better of each figure; so does the next process where the ones
    kept are doubtful, because other work had the CPU. Where torch's version has changed they are
    measured anew, since its kernels are what reaches them. ``progress`` is called with a line for
    each step; without one, only what the user must know goes to stderr. Raises
    :class:`WeftError` for ``"cuda"`` where there is no GPU.
    """
    device = query(kind)
    path = path_for(device)
    warn = progress or (lambda line: print(line, file=sys.stderr))
    old = load(path, warn)
    if not measure:
        return old.ceilings if old else None
    now = versions()["torch"]
    if old and old.machine["versions"].get("torch") != now:
        before = old.machine["versions"].get("torch")
        warn(f"the ceilings were measured with torch {before}, here is {now}: measuring anew")
        old = None
    if old and not refresh and (not old.doubt or path in _measured):
        return old.ceilings
    found, doubt = measure_now(device, progress or (lambda line: None), readers)
    _measured.add(path)
    if old:
        found, doubt = better(old.ceilings, found), doubt and old.doubt
    if doubt:
        warn(f"{doubt}; weft device --measure in a quiet moment raises them")
    try:
        save(path, Kept(found, doubt, fingerprint(kind)))
    except WeftError as error:
        # A read-only home must not stop a benchmark; the measurement is good all the same.
        warn(str(error))
    return found
