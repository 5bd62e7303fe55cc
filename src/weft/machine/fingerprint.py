"""The machine's fingerprint: what a number was measured on, by what, and when."""

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
    """Weft's, Python's and the libraries' versions, and the CUDA that torch is built for."""
    from weft import __version__

    found = {word: _version(name) for word, name in LIBRARIES.items()}
    return {
        "weft": __version__,
        "python": platform.python_version(),
        "cuda": driver.torch_cuda(),
        **found,
    }


def _git(*arguments: str) -> str | None:
    """Git's answer about the package's folder, or None: no git, no checkout, no answer."""
    command = ["git", "--no-optional-locks", "-C", str(PACKAGE), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _installed_commit() -> str | None:
    """The commit that ``pip install git+...`` noted beside the installed package."""
    try:
        noted = metadata.distribution("weft").read_text("direct_url.json")
        found = json.loads(noted or "{}").get("vcs_info", {}).get("commit_id")
    except (metadata.PackageNotFoundError, ValueError, AttributeError):
        return None
    return str(found) if found else None


@cache
def commit() -> tuple[str | None, bool | None]:
    """The commit of the running source and whether the package's folder differs from it.

    ``WEFT_COMMIT`` comes first, for a machine where the tree travels without ``.git``; like
    ``git describe``, it may end in ``-dirty``. Then git, if it tracks this very file: a virtual
    environment inside somebody's checkout must not report their commit. Then what pip noted.
    None where nobody knows. Asked once a process.
    """
    named = os.environ.get("WEFT_COMMIT", "").strip()
    if named:
        return named.removesuffix("-dirty"), named.endswith("-dirty")
    if _git("ls-files", "--error-unmatch", "__init__.py") is not None:
        changes = _git("status", "--porcelain", "--", ".")
        return _git("rev-parse", "HEAD"), None if changes is None else bool(changes)
    noted = _installed_commit()
    return noted, None if noted is None else False


def fingerprint(kind: str | None = None) -> dict[str, Any]:
    """The machine as plain data, for a record: device, kind, arch, driver, date, commit, dirty,
    versions, os. Heavy libraries are named by their metadata, not imported."""
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
