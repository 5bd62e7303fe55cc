"""All planted faults can still be planted: their texts are in the sources.

A run samples a few faults of each kernel. One whose text was changed or moved would fail in the run that
draws it, perhaps weeks later.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from helpers import attention_wgmma_faults
from helpers.paths import SRC

OPERATORS = Path(__file__).parent
MODULES = sorted(p.stem for p in OPERATORS.glob("test_*.py") if re.search(r"^FAULTS\b", p.read_text(), re.M))
FILE_NAME = re.compile(r"[\w/]+\.(?:cuh?|hpp|py)")


def faults_of(module: str) -> dict[str, Any]:
    faults: dict[str, Any] = import_module(f"ops.{module}").FAULTS
    return faults


def texts(fault: Any) -> Iterator[str]:
    """Yield the strings of a fault in order, without the names of files."""
    if isinstance(fault, str):
        if not FILE_NAME.fullmatch(fault):
            yield fault
    elif isinstance(fault, tuple | list):
        for part in fault:
            yield from texts(part)


def can_be_planted(fault: Any, sources: list[str]) -> bool:
    """Return True if all texts that a fault replaces are in sources.

    They come in pairs with what replaces them. A single string before or behind the pairs is a name.
    """
    strings = list(texts(fault))
    splits = [strings] if len(strings) % 2 == 0 else [strings[1:], strings[:-1]]
    return any(all(old and any(old in s for s in sources) for old in pairs[::2]) for pairs in splits if pairs)


@pytest.fixture(scope="module")
def sources() -> list[str]:
    return [p.read_text() for p in (SRC / "weft").rglob("*") if p.suffix in (".cu", ".cuh", ".py")]


@pytest.mark.parametrize("module", [*MODULES, "attention_wgmma_faults"])
def test_the_text_of_every_fault_is_in_a_source(module: str, sources: list[str]) -> None:
    faults = attention_wgmma_faults.FAULTS if module not in MODULES else faults_of(module)
    assert faults
    assert [name for name, fault in faults.items() if not can_be_planted(fault, sources)] == []


def test_a_text_that_is_gone_is_noticed() -> None:
    assert len(MODULES) > 20
    sources = ["if (a) b;", "f(x) + g(x)"]
    for old, expected in (("if (a) b;", True), ("if (a) c;", False)):
        assert can_be_planted(("wgmma.cu", old, "b;"), sources) == expected
        assert can_be_planted((old, "", (1, "128x128")), sources) == expected
        assert can_be_planted(("product pair", [("f(x)", ""), (old, "b;")]), sources) == expected
