"""Search for ncu, permission to count, and explanations of the tool's error messages."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from weft import machine
from weft.core import WeftError

NAME = "ncu"
TOOL = "Nsight Compute"
GET = (
    "it comes with the CUDA toolkit (then set PATH or CUDA_HOME), or alone: apt-get install "
    "cuda-nsight-compute-13-0 (NVIDIA's packages), apt-get install nsight-compute (Debian's, in "
    "non-free), or conda install -c nvidia/label/cuda-13.0.0 nsight-compute; take the version of "
    "your CUDA"
)
ALLOW = (
    "run as root, or let every user count: put 'options nvidia "
    "NVreg_RestrictProfilingToAdminUsers=0' into /etc/modprobe.d/nvidia-profiling.conf and restart "
    "the machine; in a container, start it with --cap-add=SYS_ADMIN. If you can do neither, as in most "
    "rented containers, ask for a machine whose counters are open to all users"
)
PARAMETERS = Path("/proc/driver/nvidia/params")
STATUS = Path("/proc/self/status")
TOOLKITS = Path("/usr/local")
STANDALONE = Path("/opt/nvidia/nsight-compute")
# Either lets a process count: old drivers require CAP_SYS_ADMIN (bit 21), new ones accept CAP_PERFMON (38).
_CAPABILITIES = (1 << 21) | (1 << 38)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Meaning of a message of the tool that matches ``pattern``, and what the user can do."""

    pattern: str
    meaning: str
    hint: str


PROBLEMS = (
    Problem(
        pattern=r"ERR_NVGPUCTRPERM|insufficient permission|permission to access NVIDIA GPU Perf",
        meaning="the driver lets only administrators read the GPU's counters (ERR_NVGPUCTRPERM)",
        hint=ALLOW,
    ),
    Problem(
        pattern=r"LibraryNotLoaded",
        meaning="the driver's library for counting is not available here (LibraryNotLoaded)",
        hint="sandboxes such as gVisor pass the GPU on without its counters; run on the machine "
        "itself, or in a plain container with --cap-add=SYS_ADMIN",
    ),
    Problem(
        pattern=r"driver resource was unavailable|HARDWARE_BUSY",
        meaning="something else is reading this GPU's counters (a driver resource was unavailable)",
        hint="pause it (for DCGM: dcgmi profile --pause) and try again; in a container without "
        "--cap-add=SYS_ADMIN the driver says the same",
    ),
    Problem(
        pattern=r"not supported on (?:the )?device|Unsupported GPU|not compatible with the driver"
        r"|driver (?:version )?is not (?:supported|compatible)|Cuda driver is not compatible",
        meaning="this version of the tool does not know this GPU, or its driver",
        hint=f"install the {TOOL} that goes with the driver's CUDA version: {GET}",
    ),
    Problem(
        pattern=r"lock file|InterprocessLockFailed",
        meaning="its lock file belongs to another user",
        hint="remove /tmp/nsight-compute-lock, or set TMPDIR to a folder of your own",
    ),
    Problem(
        pattern=r"unrecogni[sz]ed option|unknown option|the argument .* is invalid",
        meaning="this version of the tool lacks an option that Weft gives it",
        hint=f"install a newer one (2022.1 or later): {GET}",
    ),
)


def find() -> Path | None:
    """Return the path of ncu; None without one."""
    return find_program(NAME, STANDALONE)


def find_program(name: str, standalone: Path, below: str = ".") -> Path | None:
    """Return the path of a tool: on PATH, in the newest CUDA toolkit, or in its own folder; None without one.

    ``below`` is where the program lies in a version's folder of ``standalone``.
    """
    on_path = shutil.which(name)
    if on_path:
        return Path(on_path)
    # A toolkit that the user names comes before those that are found.
    homes = [Path(h, "bin") for h in map(os.environ.get, ("CUDA_HOME", "CUDA_PATH")) if h]
    toolkits = [p / "bin" for p in _newest_first(TOOLKITS, "cuda*")]
    alone = [p / below for p in _newest_first(standalone, "*")]
    for folder in (*homes, *toolkits, *alone):
        program = folder / name
        if program.is_file() and os.access(program, os.X_OK):
            return program
    return None


def _newest_first(folder: Path, pattern: str) -> list[Path]:
    return sorted(folder.glob(pattern), key=_version, reverse=True)


def _version(path: Path) -> list[int]:
    # As numbers: as text, cuda-12.9 would be newer than cuda-12.10.
    return [int(n) for n in re.findall(r"\d+", path.name)]


def require() -> Path:
    """Return the path of ncu after all checks that need no run of it.

    Raises :class:`WeftError` if it is not installed, if there is no GPU, and if the driver does not let this
    user read its counters.
    """
    program = find()
    if program is None:
        raise WeftError(f"{TOOL} ({NAME}) is not installed here", hint=GET)
    if not machine.has_gpu():
        raise WeftError(
            f"{TOOL} counts what a kernel does on a GPU",
            got=machine.gpu_reason(),
            hint="the other tools of weft profile work on a CPU too",
        )
    if not may_count():
        raise explain_problem("ERR_NVGPUCTRPERM") or WeftError(f"{TOOL} may not count here")
    return program


def may_count() -> bool:
    """Return False if the driver lets only administrators count and this process is none.

    Files that cannot be read (in a sandbox's /proc) are no refusal: the tool itself reports one.
    """
    try:
        restricted = re.search(
            r"^(?:RmProfilingAdminOnly|RestrictProfilingToAdminUsers): 1$",
            PARAMETERS.read_text(),
            re.MULTILINE,
        )
        capabilities = re.search(r"^CapEff:\s*([0-9a-f]+)$", STATUS.read_text(), re.MULTILINE)
    except OSError:
        return True
    return not restricted or capabilities is None or bool(int(capabilities[1], 16) & _CAPABILITIES)


def explain_problem(text: str) -> WeftError | None:
    """Return an error with a hint for the first known problem in the tool's output; None without one."""
    for problem in PROBLEMS:
        if re.search(problem.pattern, text, re.IGNORECASE):
            return WeftError(f"{TOOL} cannot count here: {problem.meaning}", hint=problem.hint)
    return None


def version(program: Path) -> str:
    """Return the tool's version, ``2025.3.1.0``; raises :class:`WeftError` if it does not start."""
    try:
        completed = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise WeftError(f"{program} does not start", got=str(error), hint=GET) from error
    output = completed.stdout + completed.stderr
    if completed.returncode:
        raise explain_problem(output) or WeftError(
            f"{program} does not start (exit code {completed.returncode})",
            got=" ".join(output.split())[-300:] or "it printed nothing",
            hint=GET,
        )
    match = re.search(r"Version (\d[\d.]+\d)", output)
    return match[1] if match else "unknown"
