"""Support of a backend by this machine, and of a case by an implementation."""

from __future__ import annotations

import os
import shutil
from functools import cache
from importlib.util import find_spec

from weft import machine
from weft.core import BACKWARD, FORWARD, YES, Case, Implementation, Support, check_only, no
from weft.core.cases import FLOAT8

CUDA_PACKAGES = ("cuda.core", "cuda.bindings", "cuda.pathfinder")


def support(implementation: Implementation, case: Case, device: str, direction: str = FORWARD) -> Support:
    """Return whether ``implementation`` can run ``case`` on ``device`` ('cpu' or 'cuda'), and if not, why."""
    if direction not in implementation.directions:
        return no(f"{implementation.name} computes only the {' and '.join(implementation.directions)}")
    if direction == BACKWARD and not any("float" in i.dtype for i in case.inputs):
        return no("integers have no gradient")
    if device not in case.devices:
        return no(f"this case is not meant for a {device} device")
    if device not in implementation.devices:
        devices = " or ".join(implementation.devices)
        return no(f"{implementation.name} is made for a {devices} device, and this is a {device}")
    # The order of the tests is the order of the reasons: the first that applies is the one a user can act on.
    here = backend_support(implementation.backend, device)
    if implementation.devices == ("cpu",):  # compiled for this CPU: nothing is simulated
        here = _installed(implementation.backend)
    return here and here & implementation.supports(case, device) & _interpreter(here, case)


@cache
def backend_support(backend: str, device: str) -> Support:
    """Return whether a backend can run, or at least be checked, on ``device``; if not, why."""
    if device == "cuda" and not machine.has_gpu():
        return no("no NVIDIA GPU is visible here; run on a machine with one and its driver")
    checks = {"compile": _compile, "triton": _triton, "cuda": _cuda, "numba": _numba}
    return checks[backend](device) if backend in checks else YES


def _missing(*modules: str) -> str | None:
    for name in modules:
        # find_spec of a submodule imports its parent, which may be missing.
        try:
            spec = find_spec(name)
        except ModuleNotFoundError:
            spec = None
        if spec is None:
            return name
    return None


def missing_package(backend: str) -> str | None:
    """Return the first package that a backend needs and that is not installed, or None."""
    packages = {"triton": ("triton",), "cuda": CUDA_PACKAGES, "numba": ("numba", "numba.cuda")}
    return _missing(*packages.get(backend, ()))


def _compile(device: str) -> Support:
    if device == "cpu" and not any(shutil.which(c) for c in (os.environ.get("CXX", "g++"), "g++")):
        return no("torch.compile needs a C++ compiler on a CPU; install g++ or set CXX")
    return YES


def _triton(device: str) -> Support:
    if missing_package("triton"):
        return no("triton is not installed; pip install 'triton>=3.6'")
    if device == "cuda":
        return YES
    from weft.backends.triton_jit import INTERPRETED

    if not INTERPRETED:
        return no("triton was imported before weft without TRITON_INTERPRET=1; set it and rerun")
    return check_only("not timed (no GPU): checked in Triton's interpreter, and compiled")


def _cuda(device: str) -> Support:
    # The packages first: without them nothing can be compiled either.
    if missing := missing_package("cuda"):
        return no(f"{missing} is not installed; pip install cuda-core cuda-bindings")
    if device == "cpu":
        return no("CUDA C++ needs a GPU to run; here it is compiled only (NVRTC, no driver needed)")
    return YES


def _numba(device: str) -> Support:
    if missing := missing_package("numba"):
        return no(f"{missing} is not installed; pip install numba numba-cuda")
    if device == "cuda":
        return YES
    from weft.backends.numba_jit import SIMULATED

    if not SIMULATED:
        return no("numba was imported before weft without NUMBA_ENABLE_CUDASIM=1; set it and rerun")
    return check_only("not timed (no GPU): checked in numba.cuda's simulator at small sizes")


def _installed(backend: str) -> Support:
    missing = _missing(backend) if backend in ("triton", "numba") else None
    return no(f"{missing} is not installed; pip install {missing}") if missing else YES


# Each GPU thread is a Python thread in numba's simulator, which is therefore limited to small arrays.
SIMULATOR_ELEMENTS = 1024
INTERPRETER_ELEMENTS = 1 << 22


def _interpreter(here: Support, case: Case) -> Support:
    """Refuse what an interpreter cannot do: bf16, which it computes wrongly, and large sizes."""
    if here.timed:
        return YES
    if any(i.dtype == "bfloat16" for i in case.inputs):
        return no("bf16 needs a GPU: Triton's interpreter gets it wrong silently, and numba has none")
    if any(i.dtype in FLOAT8 for i in case.inputs):
        return no("fp8 needs a GPU: Triton's interpreter gets it wrong silently, and numba has none")
    # The largest input decides: an interpreter's time grows with the elements, not with the bytes.
    numel = max(i.numel for i in case.inputs)
    limit = SIMULATOR_ELEMENTS if "numba" in here.reason else INTERPRETER_ELEMENTS
    if numel > limit:
        return no(f"{numel} elements need a GPU: an interpreter takes at most {limit}")
    return YES
