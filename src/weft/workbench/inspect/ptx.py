"""PTX, as far as it is read: where a kernel's text begins and ends."""

from __future__ import annotations

import re
from collections.abc import Sequence


def body(lines: Sequence[str], name: str) -> range:
    """The numbers, from 1, of the lines from a kernel's ``.entry`` to its closing brace."""
    entry = re.compile(rf"\.entry\s+{re.escape(name)}\s*(?:\(|$)")
    begins = next((i for i, line in enumerate(lines) if entry.search(line)), None)
    if begins is None:
        return range(0)
    ends = next((i for i in range(begins, len(lines)) if lines[i].startswith("}")), len(lines) - 1)
    return range(begins + 1, ends + 2)
