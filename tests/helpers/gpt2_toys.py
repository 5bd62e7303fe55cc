"""A small byte-pair encoding in GPT-2's two files, and a call of ``weft data``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

# In the alphabet of GPT-2's files, where a space is U+0120 and a line end U+010A.
MERGES = ["h e", "l l", "he ll", "hell o", "\u0120 w", "o r", "l d", "\u0120w or", "\u0120wor ld"]
MERGES += ["\u0120 \u0120", "\u010a \u010a", "\u0120 hello", "' s", "3 4"]


def bpe(folder: Path, names: tuple[str, str] = ("encoder.json", "vocab.bpe")) -> Path:
    """Write a vocabulary of 256 bytes in GPT-2's order, the merges and the end of text."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(b) for b in shown] + [chr(256 + i) for i in range(256 - len(shown))]
    whole = [*letters, *("".join(m.split()) for m in MERGES), "<|endoftext|>"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(json.dumps({t: i for i, t in enumerate(whole)}))
    (folder / names[1]).write_text("#version: 0.2\n" + "\n".join(MERGES) + "\n")
    return folder


def weft(*arguments: object) -> int:
    """Call ``weft data`` and return its exit code."""
    from weft.cli import main

    before, sys.argv = sys.argv, ["weft", "data", *map(str, arguments)]
    try:
        main()
    except SystemExit as stopped:
        return int(stopped.code or 0)
    finally:
        sys.argv = before
    return 0
