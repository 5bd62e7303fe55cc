"""Paths that several tests read from."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
ROOT = TESTS.parent
SRC = ROOT / "src"
DATA = TESTS / "data"
HELPERS = TESTS / "helpers"
EXAMPLES = ROOT / "examples"
