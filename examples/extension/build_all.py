"""Builds in each of the four ways, from nothing, and compares what they compute, bit by bit.

`python build_all.py` prints a table, and exits with 0 only if all were built, are right and agree;
`python build_all.py pip cmake` takes these two; with `--build-only`, for a machine without a GPU,
the libraries are built and loaded, and nothing is called.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import toolchain

HERE = Path(__file__).resolve().parent
NAMES = ("load", "load_inline", "pip", "cmake")


def build(way: str, folder: Path) -> dict[str, Any]:
    """One way, in a process of its own: {library, seconds} or {reason}. The log lies beside."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(HERE / "ways.py"), way, str(folder), "--json"]
    log = folder.with_suffix(".log")
    with log.open("w") as talk:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=talk, text=True)
    lines = log.read_text().strip().splitlines()
    if done.returncode:
        last = lines[-1] if lines else f"exit {done.returncode}"
        return {"reason": f"{last.removeprefix('error: ')} (all of it: {log})"}
    return json.loads(done.stdout.splitlines()[-1])


def call(library: str, build_only: bool) -> dict[str, Any]:
    """Load the library in a fresh process and call it: {answers} or {reason}."""
    site = Path(library).parent.parent  # of what pip installed: the package itself is taken
    installed = Path(library).name.startswith("_C")
    known = {k: v for k, v in os.environ.items() if k != "TILES_LIBRARY"}
    first = str(site if installed else HERE / "src")
    known["PYTHONPATH"] = os.pathsep.join(filter(None, [first, known.get("PYTHONPATH")]))
    if not installed:
        known["TILES_LIBRARY"] = library
    command = [sys.executable, __file__, "--answers", *(["--build-only"] if build_only else [])]
    done = subprocess.run(command, capture_output=True, text=True, env=known, cwd=site)
    if done.returncode:
        return {"reason": (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def answers(build_only: bool) -> dict[str, Any]:
    """What the library that is loaded here computes: {operator: digest of its bits}, and whether it
    is right. No size is a multiple of a block or tile; relu's input is aligned the second time."""
    import tiles
    import torch

    if build_only:
        return {"answers": None}
    if not torch.cuda.is_available():
        raise SystemExit("no GPU: built and loaded, not called (--build-only asks for no more)")
    chance = torch.Generator().manual_seed(17)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=chance).cuda()

    x, a, b = normal(1_000_004)[1:], normal(17, 1000), normal(17, 1000)
    left, right = normal(129, 1000), normal(1000, 77)
    made = {
        "relu": torch.cat([tiles.relu(x), tiles.relu(x.clone())]),
        "add": tiles.add(a, b),
        "matmul": tiles.matmul(left, right),
    }
    exact = left.double() @ right.double()
    bound = left.double().abs() @ right.double().abs() * (1000 * 2.0**-24)  # of a sum of 1000
    good = {
        "relu": torch.equal(made["relu"], torch.relu(x).repeat(2)),
        "add": torch.equal(made["add"], a + b),
        "matmul": bool(((made["matmul"] - exact).abs() <= bound).all()),
    }
    hosts = {name: y.cpu() for name, y in made.items()}
    raw = {name: ctypes.string_at(y.data_ptr(), y.nbytes) for name, y in hosts.items()}
    bits = {name: hashlib.sha256(text).hexdigest() for name, text in raw.items()}
    where = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    return {"answers": bits, "right": good, **where}


def machine() -> dict[str, Any]:
    """What the seconds depend on: when, how many cores, which nvcc."""
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    said = {"date": now, "cores": os.cpu_count()}
    try:
        nvcc = str(toolchain.cuda_home() / "bin" / "nvcc")
        told = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
        found = re.search(r"release ([\d.]+)", told)
        return {**said, "nvcc": found.group(1) if found else None}
    except (toolchain.Missing, OSError) as error:
        return {**said, "nvcc": None, "why": str(error)}


def judge(found: dict[str, dict[str, Any]], build_only: bool) -> bool:
    """All were built and loaded; unless only that was asked, they are right and agree."""
    if any("reason" in one for one in found.values()):
        return False
    if build_only:
        return True
    same = len({json.dumps(one["answers"], sort_keys=True) for one in found.values()}) == 1
    return same and all(all(one["right"].values()) for one in found.values())


def show(found: dict[str, dict[str, Any]]) -> None:
    """A line a way; the first six hexadecimal digits stand for each operator's bits."""
    print(f"{'way':<12} {'build':>8}  {'relu':<7}{'add':<7}{'matmul':<7}")
    for way, one in found.items():
        took = f"{one['seconds']:.1f} s" if "seconds" in one else "-"
        if "reason" in one:
            told = one["reason"]
        elif one["answers"] is None:
            told = "loads; not called"
        else:
            told = "".join(f"{bits[:6]:<7}" for bits in one["answers"].values())
            wrong = [name for name, good in one["right"].items() if not good]
            told += f"wrong: {', '.join(wrong)}" if wrong else "right"
        print(f"{way:<12} {took:>8}  {told}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Build in all ways and compare what they compute.")
    parser.add_argument("ways", nargs="*", metavar="WAY", help=f"of {', '.join(NAMES)}; all")
    parser.add_argument("--folder", type=Path, default=HERE / "build", help="where to build")
    parser.add_argument("--build-only", action="store_true", help="load, and call nothing")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--answers", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if unknown := [w for w in asked.ways if w not in NAMES]:
        parser.error(f"no such way: {unknown[0]}; there are {', '.join(NAMES)}")
    if asked.answers:
        print(json.dumps(answers(asked.build_only)))
        return
    found = {}
    for way in asked.ways or NAMES:
        print(f"building: {way}", file=sys.stderr, flush=True)
        found[way] = build(way, asked.folder.resolve() / way)
        if "library" in found[way]:
            found[way] |= call(found[way]["library"], asked.build_only)
    good = judge(found, asked.build_only)
    if asked.json:
        print(json.dumps({"good": good, "machine": machine(), "ways": found}))
    else:
        show(found)
        if good:
            told = "load; none was called" if asked.build_only else "are right, with the same bits"
            print(f"all were built and {told}")
        else:
            print("not all were built, are right and have the same bits")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
