"""Draw the report from records in Python: ``draw_a_page.py RECORDS... PAGE.html``."""

from __future__ import annotations

import sys
from pathlib import Path

from weft.workbench.report import load, page


def main(*arguments: str) -> None:
    *records, target = map(Path, arguments)
    loaded, torn = load(records)
    fast = [r for r in loaded if (r.efficiency or 0) > 0.5]
    html = page(fast, torn=torn, title="Within a factor of two of the limit")
    target.write_text(html, encoding="utf-8")
    print(f"{len(fast)} of {len(loaded)} records drawn on {target}")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("usage: draw_a_page.py RECORDS... PAGE.html")
    main(*sys.argv[1:])
