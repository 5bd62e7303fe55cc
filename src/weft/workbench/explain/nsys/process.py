"""Run of nsys over the target, and the export of its report: commands, limits and errors."""

from __future__ import annotations

import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from weft import machine
from weft.core import Log, WeftError
from weft.machine import nvtx
from weft.workbench.explain.ncu.find import find_program
from weft.workbench.explain.tool_process import ToolProcess
from weft.workbench.sanitizer import subprocess_target
from weft.workbench.sanitizer.subprocess_target import RunFiles

NAME, TOOL = "nsys", "Nsight Systems"
STANDALONE, BELOW = Path("/opt/nvidia/nsight-systems"), "bin"  # /opt/nvidia/nsight-systems/VERSION/bin/nsys
GET = (
    "it comes with the CUDA toolkit (then set PATH or CUDA_HOME), or alone: apt-get install "
    "cuda-nsight-systems-13-0 (NVIDIA's packages) or nsight-systems (Debian's, in non-free). An export "
    "that was made elsewhere needs no tool: weft profile --from FILE.sqlite"
)
TIMEOUT = 600.0  # seconds of the traced run
EXPORT_TIMEOUT = 300.0
HINT = "a smaller case compiles and runs sooner"
REPORT, DATABASE = "report.nsys-rep", "report.sqlite"
_STEPS = {
    "": "starting, importing",
    "started": "importing",
    "subject": "generating inputs",
    "warming": "compiling and warming up",
    "tracing": "tracing",
    "traced": "writing",
    "finished": "writing",
}


def find() -> Path | None:
    """Return the path of nsys; None without one."""
    return find_program(NAME, STANDALONE, BELOW)


def require() -> Path:
    """Return the path of nsys; raises :class:`WeftError` if it is not installed or there is no GPU."""
    program = find()
    if program is None:
        raise WeftError(f"{TOOL} ({NAME}) is not installed here", hint=GET)
    if not machine.has_gpu():
        raise WeftError(
            f"{TOOL} traces what runs on a GPU",
            got=machine.gpu_reason(),
            hint="read an export that was made elsewhere: weft profile --from FILE.sqlite",
        )
    return program


def trace_options(report: Path) -> list[str]:
    """Return the options of ``nsys profile``.

    Only CUDA and NVTX are traced: sampling of the CPU needs permissions that rented machines do not give.
    Kernels of a CUDA graph are traced one by one. The trace begins at ``cudaProfilerStart``, after all
    compilation; at its end the program goes on, where nsys by default would end it.
    """
    return [
        *("--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none", "--cuda-graph-trace=node"),
        *("--capture-range=cudaProfilerApi", "--capture-range-end=stop"),
        # nsys appends its extension itself.
        *("--force-overwrite=true", f"--output={report.with_suffix('')}"),
    ]


def trace(program: Path, job: dict[str, Any], out: Path, log: Log) -> Path:
    """Trace the job's calls and write report and export into ``out``; return the export's path.

    Raises :class:`WeftError` if nsys cannot trace, the call fails, or the export fails. All processes are
    ended.
    """
    report, database = out / REPORT, out / DATABASE
    # Files of an earlier run must not pass for those of this one.
    for file in (report, database):
        file.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="weft-nsys-") as folder:
        run = ToolProcess(
            [str(program), "profile", *trace_options(report)],
            title=TOOL,
            module="weft.workbench.explain.nsys.target",
            job=job,
            files=RunFiles(Path(folder)),
            environment=subprocess_target.environment(LC_ALL="C", **{nvtx.SWITCH: "1"}),
            steps=_STEPS,
            timeout=TIMEOUT,
            hint=HINT,
        )
        run.wait(time.monotonic() + TIMEOUT, log)
        run.final_state(succeeded=report.exists())
        if not report.exists():
            raise WeftError(f"{TOOL} wrote no report", expected=str(report), got=run.tail())
    log(f"{NAME}: exporting")
    export(program, report, database)
    return database


def export(program: Path, report: Path, database: Path) -> None:
    """Export a report as SQLite; raises :class:`WeftError` with the tool's own words if that fails."""
    options = ["--type=sqlite", "--force-overwrite=true", f"--output={database}"]
    command = [str(program), "export", *options, str(report)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=EXPORT_TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise WeftError(f"{NAME} export does not run", got=error, hint=GET) from error
    if done.returncode or not database.exists():
        output = " ".join((done.stdout + done.stderr).split())[-300:]
        raise WeftError(
            f"{NAME} export failed (exit code {done.returncode})", got=output or "it printed nothing"
        )
