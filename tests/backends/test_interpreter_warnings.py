"""Expected floating-point warnings of Triton's interpreter stay off the screen; other warnings do not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from helpers.paths import SRC

SCRIPT = """
import warnings

import torch

from weft.backends.triton_jit import tl, triton


@triton.jit
def square(x, y, n: tl.constexpr):
    index = tl.arange(0, n)
    value = tl.load(x + index)
    tl.store(y + index, value * value - value * value)


x, y = torch.full((8,), 1e30), torch.zeros(8)
square[(1,)](x, y, 8)
assert y.isnan().all()
warnings.warn("overflow encountered in user code", RuntimeWarning)
"""


def test_overflow_in_an_interpreted_kernel_prints_nothing(tmp_path: Path) -> None:
    file = tmp_path / "overflow.py"
    file.write_text(SCRIPT)
    env = {**os.environ, "PYTHONPATH": str(SRC), "TRITON_INTERPRET": "1"}
    env.pop("PYTHONWARNINGS", None)
    done = subprocess.run([sys.executable, file], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    # Only the script's own warning is on the screen: overflow and infinity minus infinity are not.
    assert done.stderr.count("RuntimeWarning: ") == 1, done.stderr
    assert "overflow encountered in user code" in done.stderr
