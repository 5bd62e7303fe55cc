"""Fingerprint of the machine: device, software versions, commit and date of a measurement."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from weft.machine import driver
from weft.machine.query import query

PACKAGE = Path(__file__).resolve().parents[1]
LIBRARIES = {
    "torch": "torch",
    "triton": "triton",
    "numba": "numba",
    "numba_cuda": "numba-cuda",
    "cuda_core": "cuda-core",
    "cuda_bindings": "cuda-bindings",
    "numpy": "numpy",
}


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


@cache
def versions() -> dict[str, str | None]:
    """Return the versions of Weft, Python and the libraries, and the CUDA that torch is built for."""
    from weft import __version__

    libraries = {key: _version(name) for key, name in LIBRARIES.items()}
    return {
        "weft": __version__,
        "python": platform.python_version(),
        "cuda": driver.torch_cuda(),
        **libraries,
    }


def _git(*arguments: str) -> str | None:
    """Run git in the package's folder; return its output, or None without git or a checkout."""
    command = ["git", "--no-optional-locks", "-C", str(PACKAGE), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _installed_commit() -> str | None:
    """Return the commit that ``pip install git+...`` recorded for the installed package."""
    try:
        origin = metadata.distribution("weft").read_text("direct_url.json")
        commit_id = json.loads(origin or "{}").get("vcs_info", {}).get("commit_id")
    except (metadata.PackageNotFoundError, ValueError, AttributeError):
        return None
    return str(commit_id) if commit_id else None


@cache
def commit() -> tuple[str | None, bool | None]:
    """Return the commit of the running source, and whether the package's folder differs from it.

    ``WEFT_COMMIT`` comes first, for a machine that has the tree without ``.git``; like ``git describe`` it
    may end in ``-dirty``. Git comes next, if it tracks this very file: a virtual environment inside a
    user's checkout must not report the user's commit. pip's record comes last. None means unknown.
    """
    named = os.environ.get("WEFT_COMMIT", "").strip()
    if named:
        return named.removesuffix("-dirty"), named.endswith("-dirty")
    if _git("ls-files", "--error-unmatch", "__init__.py") is not None:
        changes = _git("status", "--porcelain", "--", ".")
        return _git("rev-parse", "HEAD"), None if changes is None else bool(changes)
    installed = _installed_commit()
    return installed, None if installed is None else False


def fingerprint(kind: str | None = None) -> dict[str, Any]:
    """Return the machine as plain data for a record: device, driver, date, commit, versions, os.

    The versions of heavy libraries come from their metadata; nothing is imported.
    """
    device = query(kind)
    revision, dirty = commit()
    return {
        "device": device.name,
        "kind": device.kind,
        "arch": device.arch,
        "units": device.units if device.kind == "cuda" else device.threads,
        "driver": device.driver,
        "power_limit_w": device.power_limit_w,
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "commit": revision,
        "dirty": dirty,
        "versions": dict(versions()),
        # Not the kernel's release, which may name a host: records are published.
        "os": f"{platform.system()} {platform.machine()}",
    }
