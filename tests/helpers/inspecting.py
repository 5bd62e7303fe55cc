"""Run `weft inspect` in another process, since the test process interprets Triton kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from weft.workbench.explain.inspect import subjects

# Cache of `make compile` with its cubins. It is read at import, before a fixture sets another cache.
SHARED_CACHE = os.environ.get("WEFT_CACHE_DIR")


def weft(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments from the root of the checkout, with compilers enabled."""
    root = Path(__file__).resolve().parents[2]
    environment = {k: v for k, v in os.environ.items() if k not in subjects.INTERPRETER_SWITCHES.values()}
    environment["PYTHONPATH"] = str(root / "src")
    environment.pop("WEFT_CACHE_DIR", None)
    if SHARED_CACHE:
        environment["WEFT_CACHE_DIR"] = SHARED_CACHE
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root)
