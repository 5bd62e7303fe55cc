"""The measured ceilings of a device, kept as JSON in the user's cache folder.

A ceiling is what this device was seen to reach at best; efficiencies are shares of it. It is
measured once for a device and torch version (``measure_gpu.py``, ``measure_cpu.py``) and read
from the file from then on.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from weft.core import Ceilings, WeftError
from weft.machine.fingerprint import fingerprint
from weft.machine.query import Device, query

FORMAT = 1  # raised when the way of measuring changes, so that older files are measured anew
Progress = Callable[[str], None]


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


def _from_json(data: Any) -> Ceilings:
    """The ceilings in a file's data; raises ``ValueError`` where they are not there whole."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError("another format")
    kept = data.get("ceilings")
    if not isinstance(kept, dict) or set(kept) != set(Ceilings.__dataclass_fields__):
        raise ValueError("other keys")
    matrix = kept["matrix"]
    if not isinstance(matrix, dict) or not all(map(_is_rate, matrix.values())):
        raise ValueError("matrix rates that are no rates")
    if not all(_is_rate(kept[word]) for word in ("copy", "read", "fill")):
        raise ValueError("bandwidths that are no bandwidths")
    return Ceilings(**kept)


def load(path: Path, say: Progress) -> tuple[Ceilings, dict[str, Any]] | None:
    """The ceilings and the fingerprint kept at ``path``; None, and a line, if unreadable."""
    try:
        data = json.loads(path.read_text())
        return _from_json(data), data.get("machine") or {}
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        say(f"the ceilings kept at {path} cannot be read ({error}); they are not used")
        return None


def save(path: Path, ceilings: Ceilings, machine: dict[str, Any]) -> None:
    """Write so that a reader finds the old file or the new one, never half of one.

    Raises :class:`WeftError` where the folder cannot be written.
    """
    data = {"format": FORMAT, "ceilings": asdict(ceilings), "machine": machine}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
        try:
            with os.fdopen(descriptor, "w") as file:
                json.dump(data, file, indent=1)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise WeftError(
            f"ceilings could not be kept at {path}",
            got=error.strerror or str(error),
            hint="set WEFT_CACHE_DIR to a folder that can be written",
        ) from error


def measure_now(device: Device, progress: Progress | None = None) -> Ceilings:
    """Measure the device's ceilings now, in a few seconds; nothing is read or kept.

    Raises :class:`WeftError` where PyTorch is missing.
    """
    say = progress or (lambda line: None)
    try:
        import torch
    except ImportError as error:
        raise WeftError(
            "ceilings are measured with PyTorch", got="no torch", hint="pip install torch"
        ) from error
    if device.kind == "cuda":
        from weft.machine import measure_gpu

        found = measure_gpu.measure(torch, say)
    else:
        from weft.machine import measure_cpu

        found = measure_cpu.measure(torch, device.l2_bytes, device.memory_bytes, say)
    matrix = found.pop("matrix")
    return Ceilings(
        device=device.name, matrix=matrix, measured=fingerprint(device.kind)["date"], **found
    )


def ceilings(
    kind: str | None = None,
    *,
    measure: bool = True,
    refresh: bool = False,
    progress: Progress | None = None,
) -> Ceilings | None:
    """The ceilings of this machine's device: those kept, else measured now and kept.

    ``measure=False`` never measures and gives None where nothing is kept. ``refresh=True``
    measures even where some are kept. They are measured again, too, when torch's version has
    changed, since its matrix products are what measures. ``progress`` is called with a line for
    each step; without one, only what the user must know goes to stderr. Raises
    :class:`WeftError` for ``"cuda"`` where there is no GPU.
    """
    device = query(kind)
    path = path_for(device)
    warn = progress or (lambda line: print(line, file=sys.stderr))
    kept = load(path, warn)
    if kept and not (measure and refresh):
        before, now = (m.get("versions", {}).get("torch") for m in (kept[1], fingerprint(kind)))
        if before == now or not measure:
            return kept[0]
        warn(f"torch was {before} when the ceilings were measured and is {now}: measuring anew")
    if not measure:
        return None
    found = measure_now(device, progress)
    try:
        save(path, found, fingerprint(kind))
    except WeftError as error:
        # A read-only home must not stop a benchmark; the measurement is good all the same.
        warn(str(error))
    return found
