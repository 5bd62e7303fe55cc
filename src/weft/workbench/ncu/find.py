"""Where ncu is, whether it may count here, and what its complaints mean to a user."""

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
    "the machine; in a container, start it with --cap-add=SYS_ADMIN. Where neither is yours to do, "
    "as in most rented containers, ask for a machine with its counters open"
)
PARAMETERS = Path("/proc/driver/nvidia/params")
STATUS = Path("/proc/self/status")
TOOLKITS = Path("/usr/local")
ALONE = Path("/opt/nvidia/nsight-compute")
# Either lets a process count: the driver asks for CAP_SYS_ADMIN, and newer ones for CAP_PERFMON.
_CAPABILITIES = (1 << 21) | (1 << 38)


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """What a line of the tool's that matches ``pattern`` means, and what to do."""

    pattern: str
    means: str
    do: str


TROUBLES = (
    Trouble(
        pattern=r"ERR_NVGPUCTRPERM|insufficient permission|permission to access NVIDIA GPU Perf",
        means="the driver lets only administrators read the GPU's counters (ERR_NVGPUCTRPERM)",
        do=ALLOW,
    ),
    Trouble(
        pattern=r"LibraryNotLoaded",
        means="a library of the driver's that counts is not to be had here (LibraryNotLoaded)",
        do="sandboxes such as gVisor pass the GPU on without its counters; run on the machine "
        "itself, or in a plain container with --cap-add=SYS_ADMIN",
    ),
    Trouble(
        pattern=r"driver resource was unavailable|HARDWARE_BUSY",
        means="something else is reading this GPU's counters (a driver resource was unavailable)",
        do="pause it (for DCGM: dcgmi profile --pause) and try again; in a container without "
        "--cap-add=SYS_ADMIN the driver says the same",
    ),
    Trouble(
        pattern=r"not supported on (?:the )?device|Unsupported GPU|not compatible with the driver"
        r"|driver (?:version )?is not (?:supported|compatible)|Cuda driver is not compatible",
        means="this version of the tool does not know this GPU, or its driver",
        do=f"install the {TOOL} that goes with the driver's CUDA version: {GET}",
    ),
    Trouble(
        pattern=r"lock file|InterprocessLockFailed",
        means="its lock file belongs to another user",
        do="remove /tmp/nsight-compute-lock, or set TMPDIR to a folder of your own",
    ),
    Trouble(
        pattern=r"unrecogni[sz]ed option|unknown option|the argument .* is invalid",
        means="this version of the tool lacks an option that Weft gives it",
        do=f"install a newer one (2022.1 or later): {GET}",
    ),
)


def find() -> Path | None:
    """Where ncu is: on PATH, in a CUDA toolkit, or in a folder of its own; the newest of these."""
    on_path = shutil.which(NAME)
    if on_path:
        return Path(on_path)
    homes = [Path(h, "bin") for h in map(os.environ.get, ("CUDA_HOME", "CUDA_PATH")) if h]
    toolkits = [p / "bin" for p in _newest_first(TOOLKITS, "cuda*")]
    for folder in (*homes, *toolkits, *_newest_first(ALONE, "*")):
        program = folder / NAME
        if program.is_file() and os.access(program, os.X_OK):
            return program
    return None


def _newest_first(folder: Path, pattern: str) -> list[Path]:
    return sorted(folder.glob(pattern), key=_version, reverse=True)


def _version(path: Path) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", path.name)]


def needed() -> Path:
    """Where ncu is, once nothing that can be known beforehand stands in its way.

    Raises :class:`WeftError` where it is not installed, where there is no GPU, and where the driver
    says that this user may not read its counters.
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
        raise trouble("ERR_NVGPUCTRPERM") or WeftError(f"{TOOL} may not count here")
    return program


def may_count() -> bool:
    """False where the driver says that only administrators may count, and this is none.

    What cannot be read (a sandbox's /proc) is no refusal: the tool itself will tell.
    """
    try:
        restricted = re.search(
            r"^(?:RmProfilingAdminOnly|RestrictProfilingToAdminUsers): 1$",
            PARAMETERS.read_text(),
            re.MULTILINE,
        )
        held = re.search(r"^CapEff:\s*([0-9a-f]+)$", STATUS.read_text(), re.MULTILINE)
    except OSError:
        return True
    return not restricted or held is None or bool(int(held[1], 16) & _CAPABILITIES)


def trouble(text: str) -> WeftError | None:
    """The first known trouble in what the tool printed, as an error that says what to do."""
    for one in TROUBLES:
        if re.search(one.pattern, text, re.IGNORECASE):
            return WeftError(f"{TOOL} cannot count here: {one.means}", hint=one.do)
    return None


def version(program: Path) -> str:
    """The tool's version, ``2025.3.1.0``; raises :class:`WeftError` where it does not start."""
    try:
        done = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise WeftError(f"{program} does not start", got=str(error), hint=GET) from error
    printed = done.stdout + done.stderr
    if done.returncode:
        known = trouble(printed)
        raise known or WeftError(
            f"{program} does not start (exit code {done.returncode})",
            got=" ".join(printed.split())[-300:] or "it printed nothing",
            hint=GET,
        )
    found = re.search(r"Version (\d[\d.]+\d)", printed)
    return found[1] if found else "unknown"
