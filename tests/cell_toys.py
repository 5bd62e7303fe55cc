"""What guests of the cell's tests do: an echo, and everything that a candidate should not do."""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

Answer = tuple[dict[str, Any], Sequence[torch.Tensor]]


def echo(payload: dict, tensors: list[torch.Tensor]) -> Answer:
    return payload, tensors


def handlers(argument: dict) -> dict[str, Callable[[dict, list[torch.Tensor]], Answer]]:
    return {"echo": echo}
