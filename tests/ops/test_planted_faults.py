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
DICTIONARY = re.compile(r"^(\w*FAULTS)\b.* = \{", re.M)
NAMES = sorted(
    (path.stem, name) for path in OPERATORS.glob("test_*.py") for name in DICTIONARY.findall(path.read_text())
)
FILE_NAME = re.compile(r"[\w/]+\.(?:cuh?|hpp|py)")


def strings_of(fault: Any) -> Iterator[str]:
    """Yield the strings of a fault in order."""
    if isinstance(fault, str):
        yield fault
    elif isinstance(fault, tuple | list):
        for part in fault:
            yield from strings_of(part)


def can_be_planted(fault: Any, files: dict[Path, str]) -> bool:
    """Return True if all texts that a fault replaces are in the files that it names; else in any of them.

    They come in pairs with what replaces them. A single string before or behind the pairs is a name.
    """
    named = {s.rpartition("/")[2] for s in strings_of(fault) if FILE_NAME.fullmatch(s)}
    sources = [text for path, text in files.items() if not named or path.name in named]
    strings = [s for s in strings_of(fault) if not FILE_NAME.fullmatch(s)]
    splits = [strings] if len(strings) % 2 == 0 else [strings[1:], strings[:-1]]
    return any(all(old and any(old in s for s in sources) for old in pairs[::2]) for pairs in splits if pairs)


@pytest.fixture(scope="module")
def files() -> dict[Path, str]:
    return {p: p.read_text() for p in (SRC / "weft").rglob("*") if p.suffix in (".cu", ".cuh", ".py")}


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_the_text_of_every_fault_is_in_its_source(module: str, name: str, files: dict[Path, str]) -> None:
    faults = getattr(import_module(f"ops.{module}"), name)
    assert faults
    assert [title for title, fault in faults.items() if not can_be_planted(fault, files)] == []


def test_the_faults_of_attention_are_in_its_sources(files: dict[Path, str]) -> None:
    faults = attention_wgmma_faults.FAULTS
    assert [title for title, fault in faults.items() if not can_be_planted(fault, files)] == []


def test_a_text_that_is_gone_is_noticed() -> None:
    assert len(NAMES) > 40
    files = {Path("wgmma.cu"): "if (a) b;", Path("output.cuh"): "f(x) + g(x)"}
    for old, expected in (("if (a) b;", True), ("if (a) c;", False)):
        assert can_be_planted(("wgmma.cu", old, "b;"), files) == expected
        assert can_be_planted((old, "", (1, "128x128")), files) == expected
        assert can_be_planted(("product pair", [("f(x)", ""), (old, "b;")]), files) == expected
    assert not can_be_planted(("output.cuh", "if (a) b;", "b;"), files)  # it is in another file
