"""Last line of a command: its verdict with counts, time, and the reasons of all that did not run."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence

from weft.cli import output

# Kinds of reasons, by words in them, in the order in which they are tried. The table above the last line
# has the reasons themselves.
KINDS = (
    ("no GPU", ("GPU", "cuda device")),
    ("forward only", ("only the forward",)),
    ("memory", ("memory",)),
    ("data type", ("float16", "float32", "fp16", "bf16", "dtype")),
    ("no toolchain", ("not installed", "cannot import", "no compiler")),
)
OTHER = "other reasons"


class Stopwatch:
    """Seconds since its creation, as text: ``14 s``."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def __str__(self) -> str:
        return elapsed_text(time.monotonic() - self._start)


def elapsed_text(seconds: float) -> str:
    """Format a duration in one unit.

    >>> elapsed_text(0.42), elapsed_text(14.2), elapsed_text(200), elapsed_text(9000)
    ('0.4 s', '14 s', '3 min', '2.5 h')
    """
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def about(seconds: float) -> str:
    """Format an estimated duration with as many digits as an estimate deserves.

    >>> about(3), about(34), about(100), about(9000)
    ('about 10 s', 'about 40 s', 'about 2 min', 'about 2.5 h')
    """
    if seconds <= 60:
        return f"about {max(10, -(-int(seconds) // 10) * 10)} s"
    return f"about {-(-int(seconds) // 60)} min" if seconds < 5400 else f"about {seconds / 3600:.1f} h"


def kind_of_reason(reason: str) -> str:
    """Return the group of a reason.

    >>> kind_of_reason("numba compiles no float16 arithmetic for a CPU; use float32")
    'data type'
    """
    return next((kind for kind, words in KINDS if any(w in reason for w in words)), OTHER)


def not_run_text(reasons: Iterable[tuple[str, str]]) -> str:
    """Return the number of things that did not run, in groups; empty if all ran.

    ``reasons`` are pairs of backend (or name) and reason.

    >>> not_run_text([("cuda", "needs a GPU"), ("numba", "a GPU"), ("numba", "no float16")])
    '; not run: 3 (2 no GPU: cuda, numba; 1 data type: numba)'
    """
    pairs = [(kind_of_reason(reason), name) for name, reason in reasons]
    if not pairs:
        return ""
    groups = Counter(kind for kind, _ in pairs).most_common()
    texts = []
    for kind, count in groups:
        names = ", ".join(dict.fromkeys(name for k, name in pairs if k == kind))
        texts.append(f"{f'{count} ' if len(groups) > 1 else ''}{kind}: {names}")
    return f"; not run: {len(pairs)} ({'; '.join(texts)})"


def count_text(count: int, noun: str) -> str:
    """Return a count with its noun.

    >>> count_text(1, "point"), count_text(3, "point")
    ('1 point', '3 points')
    """
    return f"{count} {noun}{'' if count == 1 else 's'}"


def names_text(names: Sequence[str], noun: str) -> str:
    """Return up to three distinct names, or their number.

    >>> names_text(["gelu", "sum"], "operator"), names_text(list("abcd"), "operator")
    ('gelu, sum', '4 operators')
    """
    distinct = list(dict.fromkeys(names))
    return ", ".join(distinct) if len(distinct) <= 3 else count_text(len(distinct), noun)


def print_verdict(line: str, *, to_stderr: bool = False) -> None:
    """Print the last line of a command, to stderr beside JSON or CSV on stdout."""
    if to_stderr:
        output.log(line)
    else:
        output.show_notes([line], style="")


def speed_text(ratio: float) -> str:
    """Describe the reference's time over the candidate's.

    >>> speed_text(1.5), speed_text(0.1)
    ('1.50x faster than the reference', '10.00x slower than the reference')
    >>> speed_text(0.997)
    'as fast as the reference'
    """
    if 0.995 <= ratio < 1.005:  # either form would say 1.00x
        return "as fast as the reference"
    if ratio >= 1 or ratio <= 0:
        return f"{ratio:.2f}x faster than the reference"
    return f"{1 / ratio:.2f}x slower than the reference"
