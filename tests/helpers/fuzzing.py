"""Shared parts of the fuzz tests: a seeded generator, a deadline, and unusual values and files."""

from __future__ import annotations

import json
import os
import random
import signal
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SECONDS = 20  # a call that takes longer hangs
TEXTS = ("", "x", "-1", "1e400", "\udcff", "\x1b[2Kall passed", "a\nb", "\u202egnp", "ü" * 300, "../..", "*")
NUMBERS = (
    "-1",
    "0",
    "1",
    "2",
    "1e3",
    "nan",
    "inf",
    "-inf",
    "1e-400",
    str(2**31),
    str(2**70),
    "9" * 400,
    "0x10",
)
JSON_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1.5, float("nan"), float("inf"), 2**63, 2**70, 10**400, "", "x", "\x1b[2K\n"),
    *([], {}, [[]], [None] * 3, {"": {}}, "ü" * 1000, [1, "2"], {"step": "x"}),
)


class Hung(BaseException):
    """Raised by the deadline; no handler of ``Exception`` swallows it."""


def generator(part: str, number: int) -> random.Random:
    """Return the random generator of one example; ``WEFT_SAMPLE_SEED`` and its number repeat it.

    In CI the examples, like Hypothesis's, are the same in each run, so that only a change makes them fail.
    """
    in_ci = os.environ.get("CI", "").lower() in ("1", "true")
    seed = "0" if in_ci else os.environ["WEFT_SAMPLE_SEED"]
    return random.Random(f"{seed} {part} {number}")


@contextmanager
def deadline(seconds: float = SECONDS) -> Iterator[None]:
    """Raise :class:`Hung` in the context after so many seconds."""

    def stop(*_: object) -> None:
        raise Hung(f"no end after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def control_characters(text: str) -> set[str]:
    """Return the characters that steer a terminal or the direction of text, besides line break and tab."""
    return {c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs")} - {"\n", "\t"}


def strange_files(folder: Path) -> list[Path]:
    """Create files and folders that no reader expects; return their paths, some of which do not exist."""
    contents = {
        "empty": b"",
        "bytes.jsonl": b"\xff\xfe\x00{}",
        "deep.json": b"[" * 50_000 + b"]" * 50_000,
        "list.json": b"[]",
        "huge.json": b'{"a": 1' + b"0" * 500 + b"}",
        "task.yml": b'{"size": "x", "seed": [1,2}',
        "code.py": b"def f(:\n",
        "null.py": b"x = '\x00'",
        "kernel.cu": b"// weft: {{{",
        "shard.bin": bytes(range(256)) * 5,
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    (folder / "folder").mkdir(exist_ok=True)
    if not (pipe := folder / "pipe").exists():
        os.mkfifo(pipe)
    names = [*contents, "folder", "pipe", "missing", "missing/file", "\x1b[2K.json", "n" * 300, "\udcff.json"]
    return [*(folder / name for name in names), *map(Path, ("/dev/full", "/dev/null", ""))]


def damage(data: bytes, rng: random.Random) -> bytes:
    """Return the content of a file with one damage: of its bytes, or of one JSON value in it."""
    if rng.random() < 0.6 and (changed := _damaged_json(data, rng)) is not None:
        return changed
    position = rng.randrange(len(data) + 1)
    inserted: Callable[[], bytes] = rng.choice(
        (
            lambda: b"",
            lambda: rng.randbytes(3),
            lambda: b"\x00",
            lambda: b"[" * 20_000,
            lambda: b'{"a":' * 20_000,
            lambda: b"9" * 5000,
            lambda: b"\xff\xfe",
            lambda: "\u202e\x1b[2K\n".encode(),
        )
    )
    rest = data[position + rng.choice((0, 1, 7, 400)) :] if rng.random() < 0.7 else b""
    return data[:position] + inserted() + rest


def _damaged_json(data: bytes, rng: random.Random) -> bytes | None:
    """Return JSON, or one line of JSON lines, with one value replaced, removed or added; None for others."""
    try:
        lines = [data.decode()]
        tree = json.loads(lines[0])
        number = 0
    except ValueError:
        try:
            lines = data.decode().splitlines()
            number = rng.randrange(len(lines))
            tree = json.loads(lines[number])
        except ValueError:
            return None
    places = list(_places(tree))
    value = rng.choice(JSON_VALUES)
    if not places:
        tree = value
    else:
        parent, key = rng.choice(places)
        change = rng.random()
        if change < 0.7:
            parent[key] = value
        elif change < 0.9:
            del parent[key]
        elif isinstance(parent, dict):
            parent["another"] = value
        else:
            parent.append(value)
    lines[number] = json.dumps(tree)
    return "\n".join(lines).encode()


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(items):
        yield tree, key
        yield from _places(value)
