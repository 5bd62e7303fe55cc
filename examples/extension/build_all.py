"""Build with each of the four methods, from nothing, and compare the results bit by bit.

`python build_all.py` prints a table; its exit code is 0 only if all were built, are correct and agree.
`python build_all.py pip cmake` uses these two. With `--build-only`, for a machine without a GPU, the
libraries are built and loaded, and no operator is called.
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


def build(method: str, folder: Path) -> dict[str, Any]:
    """Build with one method in a separate process: {library, seconds} or {reason}; the log is beside."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(HERE / "build_methods.py"), method, str(folder), "--json"]
    log = folder.with_suffix(".log")
    with log.open("w") as log_file:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log_file, text=True)
    lines = log.read_text().strip().splitlines()
    if done.returncode:
        last = lines[-1] if lines else f"exit {done.returncode}"
        return {"reason": f"{last.removeprefix('error: ')} (full log: {log})"}
    return json.loads(done.stdout.splitlines()[-1])


def call(library: str, build_only: bool) -> dict[str, Any]:
    """Load the library in a fresh process and call it: {answers} or {reason}."""
    site = Path(library).parent.parent  # for pip, the folder that the package is installed in
    installed = Path(library).name.startswith("_C")
    environment = {k: v for k, v in os.environ.items() if k != "TILES_LIBRARY"}
    python_path = str(site if installed else HERE / "src")
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [python_path, environment.get("PYTHONPATH")]))
    if not installed:
        environment["TILES_LIBRARY"] = library
    command = [sys.executable, __file__, "--answers", *(["--build-only"] if build_only else [])]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=site)
    if done.returncode:
        return {"reason": (done.stderr.strip().splitlines() or ["it ended without a message"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def answers(build_only: bool) -> dict[str, Any]:
    """Call the loaded library: {operator: digest of its bits}, and whether each result is correct.

    No size is a multiple of a block or tile. relu runs on an unaligned and on an aligned input.
    """
    import tiles
    import torch

    if build_only:
        return {"answers": None}
    if not torch.cuda.is_available():
        raise SystemExit("no GPU: built and loaded, not called (as with --build-only)")
    generator = torch.Generator().manual_seed(17)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).cuda()

    x, a, b = normal(1_000_004)[1:], normal(17, 1000), normal(17, 1000)
    left, right = normal(129, 1000), normal(1000, 77)
    results = {
        "relu": torch.cat([tiles.relu(x), tiles.relu(x.clone())]),
        "add": tiles.add(a, b),
        "matmul": tiles.matmul(left, right),
    }
    exact = left.double() @ right.double()
    bound = left.double().abs() @ right.double().abs() * (1000 * 2.0**-24)  # rounding of a sum of 1000
    correct = {
        "relu": torch.equal(results["relu"], torch.relu(x).repeat(2)),
        "add": torch.equal(results["add"], a + b),
        "matmul": bool(((results["matmul"] - exact).abs() <= bound).all()),
    }
    hosts = {name: y.cpu() for name, y in results.items()}
    raw = {name: ctypes.string_at(y.data_ptr(), y.nbytes) for name, y in hosts.items()}
    bits = {name: hashlib.sha256(text).hexdigest() for name, text in raw.items()}
    versions = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    return {"answers": bits, "right": correct, **versions}


def machine() -> dict[str, Any]:
    """Return the date, the number of cores, and nvcc's version: the seconds depend on them."""
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    fingerprint = {"date": now, "cores": os.cpu_count()}
    try:
        nvcc = str(toolchain.cuda_home() / "bin" / "nvcc")
        output = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
        release = re.search(r"release ([\d.]+)", output)
        return {**fingerprint, "nvcc": release.group(1) if release else None}
    except (toolchain.Missing, OSError) as error:
        return {**fingerprint, "nvcc": None, "why": str(error)}


def judge(results: dict[str, dict[str, Any]], build_only: bool) -> bool:
    """Return true if all were built and loaded and, unless ``build_only``, are correct and agree."""
    if any("reason" in result for result in results.values()):
        return False
    if build_only:
        return True
    same = len({json.dumps(result["answers"], sort_keys=True) for result in results.values()}) == 1
    return same and all(all(result["right"].values()) for result in results.values())


def show(results: dict[str, dict[str, Any]]) -> None:
    """Print a line for each method, with the first six hexadecimal digits of each operator's digest."""
    print(f"{'method':<12} {'build':>8}  {'relu':<7}{'add':<7}{'matmul':<7}")
    for method, result in results.items():
        seconds = f"{result['seconds']:.1f} s" if "seconds" in result else "-"
        if "reason" in result:
            text = result["reason"]
        elif result["answers"] is None:
            text = "loads; not called"
        else:
            text = "".join(f"{bits[:6]:<7}" for bits in result["answers"].values())
            wrong = [name for name, correct in result["right"].items() if not correct]
            text += f"wrong: {', '.join(wrong)}" if wrong else "correct"
        print(f"{method:<12} {seconds:>8}  {text}")


def summary(results: dict[str, dict[str, Any]], good: bool, build_only: bool) -> str:
    """Return one sentence on the builds and one on the results."""
    count = sum("library" in result for result in results.values())
    if good:
        outcome = "All load; none was called." if build_only else "All are correct, with the same bits."
    elif all(result.get("reason", "").startswith("no GPU") for result in results.values()):
        outcome = "Not run: no GPU."
    else:
        outcome = "Not all are correct, with the same bits."
    return f"Built {count} of {len(results)}. {outcome}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Build with all methods and compare the results.")
    parser.add_argument("methods", nargs="*", metavar="METHOD", help=f"of {', '.join(NAMES)}; default: all")
    parser.add_argument("--folder", type=Path, default=HERE / "build", help="where to build")
    parser.add_argument("--build-only", action="store_true", help="build and load, call no operator")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--answers", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := [m for m in options.methods if m not in NAMES]:
        parser.error(f"unknown method: {unknown[0]}; choose from {', '.join(NAMES)}")
    if options.answers:
        print(json.dumps(answers(options.build_only)))
        return
    results = {}
    for method in options.methods or NAMES:
        print(f"building: {method}", file=sys.stderr, flush=True)
        results[method] = build(method, options.folder.resolve() / method)
        if "library" in results[method]:
            results[method] |= call(results[method]["library"], options.build_only)
    good = judge(results, options.build_only)
    if options.json:
        print(json.dumps({"good": good, "machine": machine(), "ways": results}))
    else:
        show(results)
        print(summary(results, good, options.build_only))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
