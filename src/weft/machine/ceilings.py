"""Measured ceilings of a device, stored as JSON in the user's cache folder.

A ceiling is the highest rate that was measured on this device; efficiencies are shares of it. It is
measured once (``measure_gpu.py``, ``measure_cpu.py``) and read from the file after that. The file's name
stands for all that it depends on: device, power limit, driver, versions of torch and CUDA, threads and the
CPUs that the process may use. Measuring again can only raise it: other load makes a figure too low, and
nothing makes a median too high. Ceilings that were measured beside other work are doubtful, until they are
measured on a quiet machine.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from weft.core import Ceilings, Log, WeftError, no_log
from weft.core.json_files import read_json
from weft.core.text import slug
from weft.machine.clocks import Sampler
from weft.machine.device import Device
from weft.machine.fingerprint import fingerprint, versions
from weft.machine.keep import write_json
from weft.machine.load import measure as measure_load
from weft.machine.load import usable_cpus
from weft.machine.query import query

FORMAT = 2  # raised when the measurement changes, so that older files are measured again
Readers = Callable[[], Sequence[Callable[[Any], object]]]
# Where threads run decides a CPU's bandwidth, so that these are part of the key where they are set.
THREAD_SETTINGS = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
# Reasons for a lower GPU clock that are no fault of the moment: large products reach the power limit.
USUAL_THROTTLING = {"sw_power_cap", "sync_boost"}


def cache_folder() -> Path:
    """Return ``WEFT_CACHE_DIR``, or ``weft`` inside the platform's cache folder."""
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


def key(device: Device) -> dict[str, Any]:
    """Return everything that the ceilings of a device depend on, as plain data."""
    # The SM count tells MIG slices and cut-down cards of one name apart; the power limit changes matrix
    # rates; torch and CUDA bring the kernels that are timed.
    libraries = ("torch", "cuda", *(("triton",) if device.kind == "cuda" else ()))
    depends_on: dict[str, Any] = {
        "kind": device.kind,
        "name": device.name,
        "units": device.units,
        "power_limit_w": device.power_limit_w,
        "driver": device.driver,
        "versions": {name: versions()[name] for name in libraries},
    }
    if device.kind == "cpu":
        settings = {name: os.environ[name] for name in THREAD_SETTINGS if name in os.environ}
        depends_on |= {"threads": device.threads, "cpus": sorted(usable_cpus()), "settings": settings}
    return depends_on


def path_for(device: Device) -> Path:
    """Return the file of a device: its name, and a hash of all that its ceilings depend on."""
    parts = [device.kind, device.name, str(device.units or "")]
    if device.kind == "cpu":
        parts[2] = f"{device.threads} threads"
    if device.power_limit_w:
        parts.append(f"{device.power_limit_w:.0f}w")
    digest = hashlib.sha256(json.dumps(key(device), sort_keys=True).encode()).hexdigest()[:8]
    return cache_folder() / "ceilings" / f"{slug(' '.join(parts))}-{digest}.json"


def _is_rate(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value > 0


def _has_versions(machine: object) -> bool:
    return isinstance(machine, dict) and isinstance(machine.get("versions"), dict)


def _from_json(data: Any) -> Ceilings:
    """Return the ceilings in a file's data. Raise ``ValueError`` if they are incomplete."""
    # A file may be edited, cut off or from another version: every field is checked before it is used.
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError("another format")
    if not _has_versions(data.get("machine")):
        raise ValueError("no versions")
    fields = data.get("ceilings")
    if not isinstance(fields, dict) or set(fields) | {"doubt"} != set(Ceilings.__dataclass_fields__):
        raise ValueError("other keys")
    matrix = fields["matrix"]
    if not isinstance(matrix, dict) or not all(map(_is_rate, matrix.values())):
        raise ValueError("matrix rates that are no rates")
    if not all(_is_rate(fields[word]) for word in ("copy", "read", "fill")):
        raise ValueError("bandwidths that are no bandwidths")
    return Ceilings(**fields | {"doubt": str(data.get("doubt", ""))})


@dataclass(frozen=True)
class StoredCeilings:
    """Contents of a file: the ceilings with their doubt, and the machine's fingerprint.

    ``doubt`` says why the figures may be too low; it is the ceilings' own.
    """

    ceilings: Ceilings
    doubt: str
    machine: dict[str, Any]


def load(path: Path, warn: Log) -> StoredCeilings | None:
    """Read ``path``. Return None if it does not exist, or, with a line to ``warn``, if it is invalid."""
    try:
        data = read_json(path)
        stored = _from_json(data)
        return StoredCeilings(stored, stored.doubt, data["machine"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        warn(f"the ceilings stored at {path} cannot be read ({error}); they are not used")
        return None


def save(path: Path, stored: StoredCeilings) -> None:
    """Write ``stored`` to ``path``. Raise :class:`WeftError` if the folder cannot be written."""
    hint = "set WEFT_CACHE_DIR to a folder that can be written"
    data = asdict(stored)
    del data["ceilings"]["doubt"]  # it stands beside the figures
    write_json(path, {"format": FORMAT, **data}, what="ceilings", hint=hint)


def measure_now(device: Device, log: Log, readers: Readers = tuple) -> tuple[Ceilings, str]:
    """Measure the device's ceilings in a few seconds. Return them, and what makes them doubtful or "".

    ``readers()`` returns further functions that read a large fp32 GPU tensor once; the fastest sets the
    read ceiling. No file is read or written. ``log`` gets a line for each step. Raises :class:`WeftError`
    if PyTorch is missing.
    """
    try:
        import torch
    except ImportError as error:
        raise WeftError(
            "ceilings are measured with PyTorch", got="no torch", hint="pip install torch"
        ) from error
    doubt = ""
    if device.kind == "cuda":
        # Imported here: only a measurement needs torch.
        from weft.machine import measure_gpu

        rates = measure_gpu.measure(torch, log, readers())
        held_down = set(Sampler("cuda").read().get("throttle") or ()) - USUAL_THROTTLING
        if held_down:
            doubt = f"the clock was held down ({', '.join(sorted(held_down))}): the ceilings are too low"
    else:
        from weft.machine import measure_cpu

        rates, doubt = measure_cpu.measure(torch, device, log)
    date = fingerprint(device.kind)["date"]
    return Ceilings(device=device.name, measured=date, **rates), doubt


def better(old: Ceilings, new: Ceilings) -> Ceilings:
    """Return the larger of each figure, with the date of the new one."""
    bandwidths = {k: max(getattr(old, k), getattr(new, k)) for k in ("copy", "read", "fill")}
    rates = {rate: max(new.matrix.get(rate, 0), value) for rate, value in old.matrix.items()}
    return replace(new, **bandwidths, matrix={**new.matrix, **rates})


MARKED = "shares of the limit are marked ~ until weft device --measure runs on a quiet machine"
_measured: set[Path] = set()  # files measured by this process, which measures doubtful ones only once


def ceilings(
    kind: str | None = None,
    *,
    measure: bool = True,
    refresh: bool = False,
    progress: Log | None = None,
    readers: Readers = tuple,
) -> Ceilings | None:
    """Return the ceilings of this machine's device: the stored ones, or newly measured and stored.

    ``measure=False`` never measures, and returns None if nothing is stored. ``refresh=True`` measures again
    and stores the better of each figure. Doubtful ones (see ``Ceilings.doubt``) are measured again, once in a
    process, if the machine is quiet by then. After a change of torch's version they are measured from
    scratch, because torch's kernels set them. ``progress`` gets a line for each step; without it only
    warnings go to stderr. Raises :class:`WeftError` for ``"cuda"`` without a GPU.
    """
    device = query(kind)
    path = path_for(device)
    warn = progress or (lambda line: print(line, file=sys.stderr))
    old = load(path, warn)
    if not measure:
        return old.ceilings if old else None
    now = versions()["torch"]
    # Another cuBLAS or copy kernel: figures of the two versions must not be mixed by max().
    if old and old.machine["versions"].get("torch") != now:
        before = old.machine["versions"].get("torch")
        warn(f"the ceilings were measured with torch {before}, here is {now}: measuring again")
        old = None
    if old and not refresh and (not old.doubt or path in _measured):
        return old.ceilings
    busy = measure_load(device.kind).busy
    if old and not refresh and busy:
        _measured.add(path)
        warn(f"the ceilings are doubtful ({old.doubt}), and the machine is busy now ({busy}); {MARKED}")
        return old.ceilings
    measured, doubt = measure_now(device, progress or no_log, readers)
    if busy and not doubt:
        doubt = f"the machine was busy ({busy}): the ceilings may be too low"
    _measured.add(path)
    if old:
        measured, doubt = better(old.ceilings, measured), doubt and old.doubt
    if doubt:
        warn(f"{doubt}; {MARKED}")
    measured = replace(measured, doubt=doubt)
    try:
        save(path, StoredCeilings(measured, doubt, fingerprint(kind) | {"ceilings_key": key(device)}))
    except WeftError as error:
        # A read-only home must not stop a benchmark: the measurement is still valid.
        warn(str(error))
    return measured
