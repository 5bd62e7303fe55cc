"""The cases of a GPU MODE ``task.yml``: its ``tests`` and ``benchmarks``, lists of mappings.

Of YAML this reads what these two lists are written in: mappings in braces, over one line or more,
or one ``key: value`` a line. Everything else in the file is passed over.
"""

from __future__ import annotations

import re
from pathlib import Path

from weft.core import WeftError

Spec = dict[str, object]
_WORDS = {"true": True, "false": False, "null": None, "~": None, "": None}
_KEY = re.compile(r"""\s*(?:"([^"]*)"|'([^']*)'|([^\s:,{}\[\]]+))\s*:(?:\s+|$)""")


def read(path: Path) -> dict[str, list[Spec]]:
    """The lists ``tests`` and ``benchmarks``, empty where the file has none.

    Raises :class:`WeftError` for an item of theirs that is not understood.
    """
    found: dict[str, list[Spec]] = {"tests": [], "benchmarks": []}
    section, item = "", ""
    for number, raw in enumerate([*path.read_text().splitlines(), "end:"], 1):
        line = _without_comment(raw)
        if not line.strip():
            continue
        begins = line.lstrip().startswith("- ") and _depth(item) == 0
        if item and (begins or not line[0].isspace()):
            found[section].append(_item(item, path, number))
            item = ""
        if not line[0].isspace() and not line.startswith("-"):
            name, _, rest = line.partition(":")
            section = name if name in found else ""
            if section and rest.strip() not in ("", "[]"):
                raise WeftError(f"{path.name}: {name}", expected="a list below it", got=rest)
        elif section:
            item = line.lstrip()[2:] if begins else f"{item}\n{line}"
    return found


def _without_comment(line: str) -> str:
    return re.sub(r"(^|\s)#.*$", "", line).rstrip()


def _depth(text: str) -> int:
    return sum(text.count(c) for c in "{[") - sum(text.count(c) for c in "}]")


def _item(text: str, path: Path, number: int) -> Spec:
    try:
        flat = text.strip()
        if flat.startswith("{"):
            value, rest = _value(flat)
            if rest.strip():
                raise ValueError(rest.strip())
        else:
            value = dict(_pair(line) for line in text.splitlines() if line.strip())
        if not isinstance(value, dict):
            raise ValueError(flat)
    except ValueError as error:
        raise WeftError(
            f"{path.name}, above line {number}",
            expected='an item such as - {"size": 127, "seed": 42}',
            got=str(error),
        ) from error
    return value


def _pair(line: str) -> tuple[str, object]:
    match = _KEY.match(line)
    if not match:
        raise ValueError(line.strip())
    value, rest = _value(line[match.end() :].strip())
    if rest.strip():
        raise ValueError(line.strip())
    return next(g for g in match.groups() if g is not None), value


def _value(text: str) -> tuple[object, str]:
    """The value that ``text`` begins with, and what follows it."""
    text = text.lstrip()
    if text[:1] == "{":
        return _mapping(text[1:])
    if text[:1] == "[":
        return _sequence(text[1:])
    if text[:1] in ("'", '"'):
        end = text.find(text[0], 1)
        if end < 0:
            raise ValueError(text)
        return text[1:end], text[end + 1 :]
    match = re.match(r"[^,}\]\n]*", text)
    word = match.group() if match else ""
    return _scalar(word.strip()), text[len(word) :]


def _mapping(text: str) -> tuple[Spec, str]:
    found: Spec = {}
    while True:
        text = text.lstrip(" \t\n,")
        if text[:1] == "}":
            return found, text[1:]
        match = _KEY.match(text)
        if not match:
            raise ValueError(text or "a brace that is never closed")
        key = next(g for g in match.groups() if g is not None)
        found[key], text = _value(text[match.end() :])


def _sequence(text: str) -> tuple[list[object], str]:
    found: list[object] = []
    while True:
        text = text.lstrip(" \t\n,")
        if text[:1] == "]":
            return found, text[1:]
        if not text:
            raise ValueError("a bracket that is never closed")
        value, text = _value(text)
        found.append(value)


def _scalar(word: str) -> object:
    if word.lower() in _WORDS:
        return _WORDS[word.lower()]
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word
