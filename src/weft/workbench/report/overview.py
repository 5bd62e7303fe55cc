"""The README's picture and table: one row an operator, Weft beside torch and the best other implementation.

The rows follow a rule. The picture shows every operator for which torch was timed on a GPU, at one forward
case: bfloat16 where there is one, then the case at which most other implementations were timed, then the one
that moves most bytes, then the one listed first. The table shows the operators that torch offers as one call.

    python -m weft.workbench.report.overview     # writes docs/pictures/overview-light.svg and -dark.svg
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from weft.workbench.report.device_records import Row
from weft.workbench.report.markdown import MISSING, RESULTS, best, dates_and_commits, devices, table
from weft.workbench.report.scales import NONE, percent, time

PICTURES = Path("docs/pictures")
FIGURES_PAGE = "docs/contribute/figures.md"
# Operators that torch computes by one call; it composes the others of several.
ONE_CALL = ("gelu", "softmax", "sum", "matmul", "layer_norm", "rms_norm", "cross_entropy", "embedding",
            "attention", "linear")  # fmt: skip
THEMES: Mapping[str, Mapping[str, str]] = {
    "light": {"back": "#ffffff", "text": "#1f2328", "muted": "#59636e", "grid": "#d1d9e0", "bar": "#2f6fde",
              "torch": "#d1242f", "other": "#8250df"},
    "dark": {"back": "#0d1117", "text": "#e6edf3", "muted": "#9198a1", "grid": "#3d444d", "bar": "#4c8dff",
             "torch": "#ff7b72", "other": "#d2a8ff"},
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Times of one operator at one case: the fastest of Weft, torch's own call, the fastest of all others."""

    operator: str
    case: str
    weft: Row
    torch: Row
    other: Row | None

    @property
    def fastest(self) -> float:
        return min(r.cold or 0 for r in (self.weft, self.torch, self.other) if r is not None)


def comparisons(results: Path = RESULTS) -> tuple[str, list[Comparison]]:
    """Return the caption of the first GPU with records and its rows, the largest share of the limit first."""
    gpus = [m.records for m in devices(results) if m.records.kind == "cuda"]
    if not gpus:
        return "", []
    device = gpus[0]
    candidates: dict[str, list[tuple[tuple[bool, int, float], Comparison]]] = {}
    for (operator, case, direction), rows in device.points.items():
        weft = best(r for r in rows if r.ours and r.step is None)
        torch = best(r for r in rows if r.implementation == "torch")
        if direction != "forward" or weft is None or torch is None:
            continue
        others = [r for r in rows if not r.ours and r.implementation != "torch" and r.timed]
        row = Comparison(operator=operator, case=case, weft=weft, torch=torch, other=best(others))
        # The module's rule; of equal ones `max` takes the first, which is the one listed first.
        order = (case.startswith("bf16"), len(others), weft.nbytes or 0.0)
        candidates.setdefault(operator, []).append((order, row))
    chosen = [max(rows, key=lambda pair: pair[0])[1] for rows in candidates.values()]
    machine = device.machine
    versions = machine.get("versions") or {}
    caption = (
        f"{device.name}, records of {dates_and_commits(device.machines)}, torch {versions.get('torch')}, "
        f"triton {versions.get('triton')}"
    )
    return caption, sorted(chosen, key=lambda c: -(c.weft.efficiency or 0))


def readme(results: Path = RESULTS) -> str:
    """Return the README's table with the fastest time of each row in bold."""
    caption, rows = comparisons(results)
    if not rows:
        return MISSING + "\n"
    shown = [c for c in rows if c.operator in ONE_CALL]
    head = ("operator", "case", "Weft", "torch", "best other", "Weft, of limit")
    lines = []
    for c in shown:
        other = NONE if c.other is None else f"{_time(c, c.other)} {c.other.implementation}"
        numbers = [_time(c, c.weft), _time(c, c.torch), other]
        lines.append([c.operator, f"`{c.case}`", *numbers, percent(c.weft.efficiency)])
    return f"{caption} ([all records]({FIGURES_PAGE})).\n\n{table(head, lines, '  rrrr')}"


def _time(comparison: Comparison, row: Row) -> str:
    text = time(row.cold)
    return f"**{text}**" if row.cold == comparison.fastest else text


def picture(theme: str, results: Path = RESULTS) -> str:
    """Return the picture as SVG: a bar for Weft's share of the limit, marks for torch and the best other."""
    caption, rows = comparisons(results)
    colour = THEMES[theme]
    width, left, right, top, step = 880, 206, 200, 62, 25
    plot = width - left - right
    height = top + step * len(rows) + 46
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="system-ui, Segoe UI, Helvetica, Arial, sans-serif" role="img">',
        f"<title>Share of the machine's limit that each operator reaches: {caption}</title>",
        f'<rect width="{width}" height="{height}" rx="6" fill="{colour["back"]}"/>',
        _text(
            14,
            24,
            "Share of the machine's limit reached (longer is better)",
            colour["text"],
            size=16,
            bold=True,
        ),
        *_legend(14, 46, colour),
    ]
    bottom = top + step * len(rows)
    for tick in (0, 25, 50, 75, 100):
        x = left + plot * tick / 100
        parts.append(f'<path d="M{x:.1f} {top}V{bottom}" stroke="{colour["grid"]}"/>')
        parts.append(_text(x, bottom + 17, f"{tick} %", colour["muted"], size=13, anchor="middle"))
    for index, c in enumerate(rows):
        y = top + step * index
        middle = y + step / 2
        parts.append(_text(left - 10, middle + 5, c.operator, colour["text"], anchor="end"))
        parts.append(
            f'<rect x="{left}" y="{y + 5}" width="{plot * _share(c.weft):.1f}" height="{step - 10}" rx="2" '
            f'fill="{colour["bar"]}"/>'
        )
        for row, kind in ((c.torch, "torch"), (c.other, "other")):
            if row is not None:
                parts.append(_mark(kind, left + plot * _share(row), middle, colour))
        gain = (c.torch.cold or 0) / (c.weft.cold or 1)
        label = (
            f"{time(c.weft.cold)}, {gain:.2f}× torch"
            if gain < 10
            else f"{time(c.weft.cold)}, {gain:.0f}× torch"
        )
        parts.append(_text(left + plot + 16, middle + 5, label, colour["text"]))
    parts.append(_text(14, height - 9, caption, colour["muted"], size=12))
    return "\n".join([*parts, "</svg>\n"])


def _share(row: Row) -> float:
    return min(1.02, row.efficiency or 0.0)  # a little over 1 is possible where the measured peak is low


def _legend(x: float, y: float, colour: Mapping[str, str]) -> list[str]:
    entries = (
        ("bar", "Weft"),
        ("torch", "torch's own choice"),
        ("other", "best other (cuDNN, Liger, compile, ...)"),
    )
    parts = []
    for kind, label in entries:
        if kind == "bar":
            parts.append(f'<rect x="{x}" y="{y - 11}" width="24" height="12" rx="2" fill="{colour["bar"]}"/>')
        else:
            parts.append(_mark(kind, x + 12, y - 5, colour))
        parts.append(_text(x + 30, y, label, colour["muted"], size=13))
        x += 46 + 7 * len(label)
    return parts


def _mark(kind: str, x: float, y: float, colour: Mapping[str, str]) -> str:
    path = {"torch": f"M{x:.1f} {y - 9}v18", "other": f"M{x:.1f} {y - 6}l6 6l-6 6l-6 -6z"}[kind]
    fill, outline, line = ("none", 7, 4) if kind == "torch" else (colour[kind], 2, 0)
    strokes = ((colour["back"], outline), (colour[kind], line))  # the outline separates the mark from the bar
    return "".join(f'<path d="{path}" fill="{fill}" stroke="{s}" stroke-width="{w}"/>' for s, w in strokes)


def _text(
    x: float, y: float, text: str, fill: str, *, size: int = 14, anchor: str = "start", bold: bool = False
) -> str:
    weight = "600" if bold else "400"
    position = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    escaped = text.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text {position} fill="{fill}" font-size="{size}" font-weight="{weight}">{escaped}</text>'


def transcript(command: str, previous: str, files: Mapping[str, str] | None = None) -> str:
    """Run a ``weft`` command on the CPU and return it with its output as a fenced block.

    Seeds and times differ between runs: if ``previous`` has a block that differs from the new output in
    numbers and spaces only, that block is returned. ``files`` are written to the working folder first.
    """
    block = _run(command, tuple(sorted((files or {}).items())))
    earlier = [f"```{part}```" for part in previous.split("```") if part.startswith(f"\n$ {command}\n")]
    return next((text for text in earlier if _shape(text) == _shape(block)), block)


@cache  # several pages show the same command
def _run(command: str, files: tuple[tuple[str, str], ...]) -> str:
    root = Path.cwd()
    environment = {
        "PYTHONPATH": str(root / "src"),
        "CUDA_VISIBLE_DEVICES": "",
        "COLUMNS": "110",
        "NO_COLOR": "1",
        "WEFT_PROGRESS_SECONDS": "86400",  # no line that only a slow machine prints
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files:
            file = Path(folder) / name
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)
        run = subprocess.run(
            [sys.executable, "-m", *shlex.split(command)],
            cwd=folder,
            env={**_inherited(), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
    lines = [line.rstrip() for line in run.stdout.replace(f"{folder}/", "").splitlines()]
    return "\n".join([f"```\n$ {command}", *lines, "```"])


def failing_check(previous: str) -> str:
    """Return the code of examples/mine/softmax_naive.py and the check that finds its fault, as Markdown."""
    name, cases = "softmax_naive.py", "--case fp32-3x129 --case fp32-5x257-large"
    text = (Path("examples/mine") / name).read_text()
    code = text.rpartition('"""')[2].strip()
    command = f"weft check softmax --with {name} --direction forward {cases}"
    return f"```python\n{code}\n```\n\n{transcript(command, previous, {name: text})}"


def _inherited() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith("WEFT_") or k == "WEFT_CACHE_DIR"}


def _shape(text: str) -> str:
    """Return a text without what differs between runs: numbers, their units, runs of spaces and rules."""
    text = re.sub(r"\d[\d,.]*(e[+-]?\d+)?( ?(ns|us|µs|ms|s|GB/s|TB/s|MB/s|GFLOP/s|TFLOP/s)\b)?", "#", text)
    return re.sub(r"[\s─━-]+", " ", text).strip()


if __name__ == "__main__":
    for name in THEMES:
        (PICTURES / f"overview-{name}.svg").write_text(picture(name))
        print(PICTURES / f"overview-{name}.svg")
