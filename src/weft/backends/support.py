"""Whether a backend works on this machine, and whether an implementation takes a case on it."""

from __future__ import annotations

import os
import shutil
from functools import cache
from importlib.util import find_spec

from weft import machine
from weft.core import FORWARD, YES, Case, Implementation, Support, check_only, no

CUDA_PACKAGES = ("cuda.core", "cuda.bindings", "cuda.pathfinder")


def support(
    implementation: Implementation, case: Case, device: str, direction: str = FORWARD
) -> Support:
    """What the backend says of ``device`` ('cpu' or 'cuda'), and the implementation of the case."""
    if direction not in implementation.directions:
        return no(
            f"{implementation.name} computes the {' and '.join(implementation.directions)} only"
        )
    if device not in case.devices:
        return no(f"this case is not meant for a {device} device")
    if device not in implementation.devices:
        made = " or ".join(implementation.devices)
        return no(f"{implementation.name} is made for a {made} device, and this is a {device}")
    here = backend_support(implementation.backend, device)
    if implementation.devices == ("cpu",):  # compiled for this CPU: nothing is simulated
        here = _installed(implementation.backend)
    return here and here & implementation.supports(case, device) & _interpreter(here, case)


@cache
def backend_support(backend: str, device: str) -> Support:
    """Whether a backend can run, or at least be checked, on ``device``; if not, why."""
    if device == "cuda" and not machine.has_gpu():
        return no("no NVIDIA GPU is visible here; run on a machine with one and its driver")
    checks = {"compile": _compile, "triton": _triton, "cuda": _cuda, "numba": _numba}
    return checks[backend](device) if backend in checks else YES


def _missing(*modules: str) -> str | None:
    for name in modules:
        try:
            found = find_spec(name)
        except ModuleNotFoundError:
            found = None
        if found is None:
            return name
    return None


def _compile(device: str) -> Support:
    if device == "cpu" and not any(shutil.which(c) for c in (os.environ.get("CXX", "g++"), "g++")):
        return no("torch.compile needs a C++ compiler on a CPU; install g++ or set CXX")
    return YES


def _triton(device: str) -> Support:
    if _missing("triton"):
        return no("triton is not installed; pip install 'triton>=3.6'")
    if device == "cuda":
        return YES
    from weft.backends.triton_jit import INTERPRETED

    if not INTERPRETED:
        return no("triton was imported before weft without TRITON_INTERPRET=1; set it and rerun")
    return check_only("no GPU: checked in Triton's interpreter and compiled, never timed")


def _cuda(device: str) -> Support:
    if missing := _missing(*CUDA_PACKAGES):
        return no(f"{missing} is not installed; pip install cuda-core cuda-bindings")
    if device == "cpu":
        return no("CUDA C++ needs a GPU to run; here it is compiled only (NVRTC, no driver needed)")
    return YES


def _numba(device: str) -> Support:
    if missing := _missing("numba", "numba.cuda"):
        return no(f"{missing} is not installed; pip install numba numba-cuda")
    if device == "cuda":
        return YES
    from weft.backends.numba_jit import SIMULATED

    if not SIMULATED:
        return no("numba was imported before weft without NUMBA_ENABLE_CUDASIM=1; set it and rerun")
    return check_only("no GPU: checked in numba.cuda's simulator at toy sizes, never timed")


def _installed(backend: str) -> Support:
    missing = _missing(backend) if backend in ("triton", "numba") else None
    return no(f"{missing} is not installed; pip install {missing}") if missing else YES


SIMULATOR_ELEMENTS = 1024
INTERPRETER_ELEMENTS = 1 << 22


def _interpreter(here: Support, case: Case) -> Support:
    """What an interpreter may be trusted with: small sizes, no bf16 (silently wrong there)."""
    if here.timed:
        return YES
    if any(i.dtype == "bfloat16" for i in case.inputs):
        return no(
            "bf16 is silently wrong in Triton's interpreter and unknown to numba; needs a GPU"
        )
    numel = max(i.numel for i in case.inputs)
    limit = SIMULATOR_ELEMENTS if "numba" in here.reason else INTERPRETER_ELEMENTS
    if numel > limit:
        return no(f"{numel} elements are too many for an interpreter (limit {limit}); needs a GPU")
    return YES
