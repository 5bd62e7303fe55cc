"""Run the GPU tests on every GPU of this machine: in shards, then those of two GPUs, then the timings.

    python3 tools/gpu_tests.py [--jobs N] [PYTEST ARGUMENTS...]

Each GPU gets one pytest run with ``--jobs`` workers and every n-th stretch of the collected tests, and beside
it one process for the tests that take a large part of its memory (marker ``large``), one after the other.
Then the tests that need two GPUs (``two_gpus``) run where there are two. Those that measure time (``alone``)
run at the end, by themselves, on the first GPU. The exit code is 1 if a run failed.

``--resume FILE`` is pytest's (tests/conftest.py): FILE keeps the outcomes, and after a stop the next call
with it runs the rest. All runs share the programs that NVRTC compiles; ``WEFT_TEST_PROGRAMS`` names a folder
of earlier ones. Four H200s with 14 workers each took 290 s for everything but the timings (docs/log.md,
2026-11-22).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NO_TESTS = 5  # pytest's exit code where no test is asked for: none is large, or a resumed run has none left
PYTEST = [sys.executable, "-m", "pytest", "--slow", "--live", "--durations=60", str(ROOT / "tests")]
SHARED = "gpu and not alone and not two_gpus"  # tests of which several run on a GPU at once
# Each worker would otherwise start a thread for each core, and a pool of compiling processes.
ONE_CORE = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "TORCHINDUCTOR_COMPILE_THREADS": "1"}


def visible_gpus() -> list[str]:
    """Return the GPUs as ``CUDA_VISIBLE_DEVICES`` names them. Exit with 2 if there are none."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named:
        return [g.strip() for g in named.split(",")]
    import torch

    count = torch.cuda.device_count()
    if not count:
        sys.exit("no GPU is visible here; hint: run this on a machine with an NVIDIA GPU and its driver")
    return [str(i) for i in range(count)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--jobs", type=int, default=6, help="workers for each GPU [default: 6]")
    options, pytest_arguments = parser.parse_known_args()
    gpus = visible_gpus()
    resumes = any(argument.partition("=")[0] == "--resume" for argument in pytest_arguments)
    base = {**os.environ, "WEFT_REQUIRE_GPU": "1", "PYTHONPATH": str(ROOT / "src")}
    start, codes = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder:
        base.setdefault("WEFT_TEST_PROGRAMS", f"{folder}/programs")
        runs = []
        for i, gpu in enumerate(gpus):
            shard = ["--shard", f"{i}/{len(gpus)}", *pytest_arguments]
            workers = ["-n", str(options.jobs), "--dist", "worksteal"]
            for what, command in (
                ("", [*PYTEST, "-m", f"{SHARED} and not large", *workers, *shard]),
                (", large cases", [*PYTEST, "-m", f"{SHARED} and large", *shard]),
            ):
                # The first run prints as it goes; the output of several would be mixed, and comes at the end.
                output = (Path(folder) / f"{gpu}{what}").open("w+") if what or len(gpus) > 1 else None
                environment = ONE_CORE | base | {"CUDA_VISIBLE_DEVICES": gpu}
                process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
                runs.append((f"{gpu}{what}", process, output))
        for name, process, output in runs:
            code = process.wait()
            codes.append(0 if code == NO_TESTS and "large" in name else code)
            if output is not None:
                output.seek(0)
                print(f"\n== GPU {name}: exit code {codes[-1]}\n{output.read()}", flush=True)
                output.close()
    if len(gpus) > 1:
        both = [*PYTEST, "-m", "two_gpus", "-n", str(options.jobs), *pytest_arguments]
        codes.append(
            subprocess.call(both, env=ONE_CORE | base | {"CUDA_VISIBLE_DEVICES": ",".join(gpus[:2])})
        )
    print(f"== answers on {len(gpus)} GPUs: {time.monotonic() - start:.0f} s; now the timings", flush=True)
    alone = [*PYTEST, "-m", "gpu and alone", *pytest_arguments]
    codes.append(subprocess.call(alone, env=base | {"CUDA_VISIBLE_DEVICES": gpus[0]}))
    if resumes:
        codes = [0 if code == NO_TESTS else code for code in codes]
    print(f"== all GPU tests: {time.monotonic() - start:.0f} s, exit codes {codes}", flush=True)
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
