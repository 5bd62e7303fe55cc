"""`weft inspect` in a process of its own: a test's own interprets Triton's kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from weft.workbench.inspect import choose

# Where `make compile` left its cubins: read on import, before a test has a cache of its own.
KEPT = os.environ.get("WEFT_CACHE_DIR")


def weft(*arguments: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).resolve().parent.parent
    environment = {k: v for k, v in os.environ.items() if k not in choose.SWITCHES.values()}
    environment["PYTHONPATH"] = str(root / "src")
    environment.pop("WEFT_CACHE_DIR", None)
    if KEPT:
        environment["WEFT_CACHE_DIR"] = KEPT
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root)
