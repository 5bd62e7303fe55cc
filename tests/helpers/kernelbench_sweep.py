"""Judge KernelBench's own problems, each with a right, a wrong and a cached candidate.

Run it by hand: ``python -m helpers.kernelbench_sweep LEVEL_FOLDER [LEVEL_FOLDER ...] --count 20``. The
sizes are divided until a problem is small, or stay as they are (``--own-sizes``, for a GPU). The files are
read where they are; the copies and the candidates are written to a temporary folder. It prints a row for
each judgement and ends with 1 if a verdict is not the expected one.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from helpers.process_memory import run
from weft.workbench.judge.kernelbench import estimate_bytes

TARGET_BYTES = 1 << 21
FACTORS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
SMALLEST = 16  # smaller integers are kernel sizes, numbers of groups and similar
FEW = ("batch", "height", "width", "depth", "length", "size", "dim", "N", "M", "K", "L")
EXPECTED = {"right": True, "wrong": False, "cached": False}
RIGHT = "\nclass ModelNew(Model):\n    pass\n"
WRONG = """
class ModelNew(Model):
    def forward(self, *arguments):
        out = super().forward(*arguments).clone()
        flat = out.view(-1)
        at = flat.numel() // 2
        if out.is_floating_point():
            flat[at] += 0.05 * (flat.double().pow(2).mean().sqrt().to(out.dtype) + 1e-3)
        else:
            flat[at] += 1
        return out
"""
CACHED = """
class ModelNew(Model):
    def forward(self, *arguments):
        key = tuple(a.shape for a in arguments if hasattr(a, "shape"))
        if getattr(self, "key", None) != key:
            self.key, self.answer = key, super().forward(*arguments)
        return self.answer.clone()
"""
CANDIDATES = {"right": RIGHT, "wrong": WRONG, "cached": CACHED}


def divided(text: str, factor: int, names: tuple[str, ...] | None) -> str:
    """Return the file with module-level integers divided, none below ``SMALLEST``."""
    lines = text.splitlines()
    for node in ast.parse(text).body:
        if not isinstance(node, ast.Assign) or node.lineno != node.end_lineno:
            continue
        target = ast.unparse(node.targets[0])
        if names is not None and not any(n in target for n in names):
            continue
        try:
            value = eval(ast.unparse(node.value), {})  # numbers, products and tuples of them
        except (NameError, SyntaxError, TypeError):
            continue
        lines[node.lineno - 1] = f"{ast.unparse(node.targets[0])} = {_divide(value, factor)!r}"
    return "\n".join(lines) + "\n"


def _divide(value: object, factor: int) -> object:
    if isinstance(value, tuple):
        return tuple(_divide(v, factor) for v in value)
    if type(value) is int and value > SMALLEST:
        return max(SMALLEST, value // factor)
    return value


def small_copy(path: Path, folder: Path) -> Path | None:
    """Write the problem with sizes divided until it is small; None if no division leaves it valid."""
    text, copy = path.read_text(), folder / path.name
    best: tuple[int, str] | None = None
    for names in (None, FEW):
        for factor in FACTORS:
            copy.write_text(divided(text, factor, names))
            nbytes = estimate_bytes(copy)
            if nbytes and (best is None or nbytes < best[0]):
                best = nbytes, copy.read_text()
            if 0 < nbytes <= TARGET_BYTES:
                return copy
    if best is None:
        return None
    copy.write_text(best[1])
    return copy


class DeviceMemory:
    """Measures the peak of the memory in use on the first visible GPU, by all processes, until ``stop``.

    If nothing else runs on that GPU, this is the peak of the judgement, CUDA contexts included.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        if shutil.which("nvidia-smi"):
            gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
            query = ["--query-gpu=memory.used", "--format=csv,noheader,nounits", "-lms", "50", "-i", gpu]
            self._process = subprocess.Popen(["nvidia-smi", *query], stdout=subprocess.PIPE, text=True)

    def stop(self) -> int:
        """Return the peak in bytes; 0 without a GPU."""
        if self._process is None:
            return 0
        self._process.terminate()
        readings = self._process.communicate()[0].split()
        self._process = None
        return max((int(mib) << 20 for mib in readings if mib.isdigit()), default=0)


def judgements(path: Path, folder: Path, options: argparse.Namespace) -> Iterator[tuple[str, bool]]:
    """Judge the three candidates of a problem; yield a row of the table and whether it is as expected."""
    problem = path if options.own_sizes else small_copy(path, folder)
    if problem is None:
        yield f"{path.stem[:44]:44} cannot be divided", True
        return
    for kind in options.candidate or CANDIDATES:
        ending = CANDIDATES[kind]
        candidate = folder / f"{path.stem}-{kind}.py"
        candidate.write_text(problem.read_text() + ending)
        command = [sys.executable, "-m", "weft", "judge", str(problem), str(candidate), "--json"]
        if options.time == "none" or (options.time == "right" and kind != "right"):
            command.append("--no-time")
        device = DeviceMemory()
        code, output, errors, seconds, peak = run(command, timeout=600)
        device_peak = device.stop()
        if code not in (0, 1) or not output:
            yield f"{path.stem[:44]:44} {kind:6} exit {code}: {errors.strip()[-200:]}", False
            continue
        result = json.loads(output)
        as_expected = result["correct"] == EXPECTED[kind]
        verdict = "correct" if result["correct"] else re.split(r"[:(]", result["reason"])[0]
        own = (result["own_check"] or {}).get("passed")
        row = f"{path.stem[:44]:44} {kind:6} {verdict:8} own {own!s:5} {seconds:6.1f} s {peak >> 20:5} MiB"
        row += f" of {result['problem_bytes'] / 2**20:.1f}"
        if device_peak:
            row += f", device {device_peak / 2**20:.0f} MiB ({device_peak / result['problem_bytes']:.1f}x)"
        if result["speedup"] is not None:
            row += f", {result['speedup']:.2f}x"
        row += "; " + ", ".join(f"{step} {s:.1f}" for step, s in result["seconds_by_step"].items())
        yield row if as_expected else f"{row}  UNEXPECTED: {result['reason'][:300]}", as_expected


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--count", type=int, default=20, help="problems of each folder")
    parser.add_argument("--own-sizes", action="store_true", help="do not divide the sizes")
    parser.add_argument("--time", choices=("none", "right", "all"), default="none", help="candidates to time")
    parser.add_argument("--candidate", action="append", choices=CANDIDATES, help="which (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="problems judged at once")
    options = parser.parse_args()
    chosen: list[Path] = []
    for folder in options.folders:
        paths = sorted(folder.glob("*.py"), key=lambda p: int(p.stem.split("_")[0]))
        step = max(1, len(paths) // options.count)
        chosen += paths[::step][: options.count]
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(options.jobs) as pool:
        unexpected = sum(pool.map(lambda path: _print_rows(path, Path(temporary), options), chosen))
    print(f"{unexpected} verdicts of {len(chosen)} problems are not the expected ones")
    sys.exit(1 if unexpected else 0)


def _print_rows(path: Path, folder: Path, options: argparse.Namespace) -> int:
    unexpected = 0
    for row, as_expected in judgements(path, folder, options):
        print(row, flush=True)
        unexpected += not as_expected
    return unexpected


if __name__ == "__main__":
    main()
