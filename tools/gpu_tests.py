"""Run the GPU tests on every GPU of this machine: in shards, then those of two GPUs, then the timings.

    python3 tools/gpu_tests.py [--jobs N] [--no-mps] [PYTEST ARGUMENTS...]

First come the tests of operators, of dispatch and of starting files, which are most. Each GPU gets one pytest
run with ``--jobs`` workers and every n-th stretch of the collected tests, and beside it one process for the
tests that take much of its memory (marker ``large``), one after the other. Then the other tests run in
shards, then those that need two GPUs (``two_gpus``), if there are two. Those that measure time (``alone``)
run at the end, one at a time on each GPU. The exit code is 1 if a run failed, or if no test was selected.

A GPU runs the kernels of one process at a time, unless NVIDIA's Multi-Process Service (MPS) sends them on.
Where MPS works, the first tests use it; ``--no-mps`` leaves it out. The others never do: they break contexts,
profile them or kill processes, and a fault of one client ends all clients of MPS.

``--resume FILE`` is pytest's (tests/conftest.py): FILE keeps the outcomes, and after a stop the next call
with it runs the rest. All runs share the programs that NVRTC compiles; ``WEFT_TEST_PROGRAMS`` names a folder
of earlier ones. Four H200s with 14 workers each took 290 s for everything but the timings (docs/log.md,
2026-11-22).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
NO_TESTS = 5  # pytest's exit code where it selects no test: by `-k`, or because a resumed run has none left
TESTS = ROOT / "tests"
PYTEST = [sys.executable, "-m", "pytest", "--slow", "--live", "--durations=60"]
SHARED = "gpu and not alone and not two_gpus"  # tests of which several run on a GPU at once
OPERATORS = ("ops", "dispatch", "scaffold")  # folders of tests whose processes can share a context
WORK_STEALING = ["--dist", "worksteal"]
# A client of MPS does some work; then the daemon names a server.
PROBE = "import torch; assert int(torch.ones(1000, device='cuda').sum()) == 1000"
PROBE_SECONDS = 60
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


@dataclass(frozen=True)
class Run:
    """A run of pytest: the GPUs it sees, its command and environment, and which tests these are."""

    gpus: str
    command: list[str]
    environment: dict[str, str]
    tests: str = ""

    @property
    def name(self) -> str:
        return ", ".join(filter(None, (self.gpus, self.tests)))


def ask_daemon(control: str, question: str, environment: dict[str, str]) -> str:
    """Return what the MPS daemon of ``environment`` answers to a line; raise SubprocessError without one."""
    done = subprocess.run(
        [control],
        input=question + "\n",
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        timeout=PROBE_SECONDS,
        check=True,
    )
    return done.stdout.strip()


@contextmanager
def shared_context(folder: str, wanted: bool) -> Iterator[dict[str, str]]:
    """Run an MPS daemon of our own; yield the variables of its clients, or none where MPS does not work.

    No setting of a GPU changes: the daemon's pipes are in ``folder``, and only processes with these variables
    are its clients.
    """
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None or not wanted:
        reason = "there is no nvidia-cuda-mps-control on the PATH" if wanted else "--no-mps"
        print(f"== without MPS: {reason}", flush=True)
        yield {}
        return
    clients = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/mps", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/mps-log"}
    for path in clients.values():
        os.makedirs(path)
    # The daemon serves all GPUs; a client's CUDA_VISIBLE_DEVICES chooses among them.
    environment = {n: v for n, v in os.environ.items() if n != "CUDA_VISIBLE_DEVICES"} | clients
    try:
        for command in ([control, "-d"], [sys.executable, "-c", PROBE]):
            # Silent: the daemon would hold our pipe open.
            subprocess.run(
                command,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
                timeout=PROBE_SECONDS,
                check=True,
            )
        reason = "" if ask_daemon(control, "get_server_list", environment) else "its daemon has no server"
    except (OSError, subprocess.SubprocessError) as error:
        reason = str(error)
    print(f"== without MPS: {reason}" if reason else "== the first tests with MPS", flush=True)
    try:
        yield {} if reason else clients
    finally:
        try:
            ask_daemon(control, "quit -t 5", environment)
        except (OSError, subprocess.SubprocessError) as error:
            print(f"== MPS did not end: {error}", flush=True)


def finish(run: Run, process: subprocess.Popen[bytes], output: IO[str] | None) -> int:
    """Wait for a run, print its output unless it printed itself, and return its exit code."""
    code = process.wait()
    if output is not None:
        output.seek(0)
        print(f"\n== GPU {run.name}: exit code {code}\n{output.read()}", flush=True)
    return code


def together(runs: list[Run]) -> list[int]:
    """Make runs at the same time; return their exit codes. Print their outputs one after the other.

    On a single GPU the first run prints as it goes.
    """
    prints = runs[0] if len({run.gpus for run in runs}) == 1 else None
    with ExitStack() as files:
        started = []
        for run in runs:
            output = None if run is prints else files.enter_context(tempfile.TemporaryFile("w+"))
            environment = run.environment | {"CUDA_VISIBLE_DEVICES": run.gpus}
            process = subprocess.Popen(run.command, env=environment, stdout=output, stderr=subprocess.STDOUT)
            started.append((run, process, output))
        codes: list[int] = []
        try:
            for members in started:
                codes.append(finish(*members))
        except KeyboardInterrupt:  # it reaches the runs, too, whose failures are not to be lost
            for members in started[len(codes) :]:
                finish(*members)
            raise
    return codes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--jobs", type=int, default=6, help="workers for each GPU [default: 6]")
    parser.add_argument("--no-mps", action="store_true", help="keep the processes' contexts apart")
    options, pytest_arguments = parser.parse_known_args()
    gpus = visible_gpus()
    resumes = any(argument.partition("=")[0] == "--resume" for argument in pytest_arguments)
    base = {**os.environ, "WEFT_REQUIRE_GPU": "1", "PYTHONPATH": str(ROOT / "src")}
    start, workers = time.monotonic(), ["-n", str(options.jobs)]
    shards = [["--shard", f"{i}/{len(gpus)}", *pytest_arguments] for i in range(len(gpus))]
    folders = [str(TESTS / name) for name in OPERATORS]
    others = [str(TESTS), *(f"--ignore={folder}" for folder in folders)]
    with tempfile.TemporaryDirectory() as folder:
        base.setdefault("WEFT_TEST_PROGRAMS", f"{folder}/programs")
        with shared_context(folder, not options.no_mps) as clients:
            runs = []
            for gpu, shard in zip(gpus, shards, strict=True):
                small = [*PYTEST, *folders, "-m", f"{SHARED} and not large", *workers, *WORK_STEALING, *shard]
                runs.append(Run(gpu, small, ONE_CORE | base | clients))
                large = [*PYTEST, *folders, "-m", f"{SHARED} and large", *shard]
                runs.append(Run(gpu, large, ONE_CORE | base | clients, "large cases"))
            codes = together(runs)
        print(
            f"== the first tests on {len(gpus)} GPUs: {time.monotonic() - start:.0f} s; the others",
            flush=True,
        )
        rest = [[*PYTEST, *others, "-m", SHARED, *workers, *WORK_STEALING, *shard] for shard in shards]
        codes += together([Run(g, r, ONE_CORE | base, "others") for g, r in zip(gpus, rest, strict=True)])
        if len(gpus) > 1:
            pair = [*PYTEST, str(TESTS), "-m", "two_gpus", *workers, *pytest_arguments]
            codes += together([Run(",".join(gpus[:2]), pair, ONE_CORE | base)])
        else:
            print("== not run: the tests that need two GPUs (marker two_gpus)", flush=True)
        print(
            f"== answers on {len(gpus)} GPUs: {time.monotonic() - start:.0f} s; now the timings", flush=True
        )
        timings = [[*PYTEST, str(TESTS), "-m", "gpu and alone", *shard] for shard in shards]
        codes += together([Run(g, t, base, "timings") for g, t in zip(gpus, timings, strict=True)])
    print(f"== all GPU tests: {time.monotonic() - start:.0f} s, exit codes {codes}", flush=True)
    had_tests = [code for code in codes if code != NO_TESTS]
    return int(any(had_tests) or not (had_tests or resumes))


if __name__ == "__main__":
    sys.exit(main())
