"""Kernel names: the origin of a kernel, a short form of its name, and the facts that the name states.

A driver reports only the name of a kernel. Libraries have distinctive names: ``at::native::...`` is
PyTorch's, ``nvjet_...`` and ``..._xmma_gemm_...`` are cuBLAS's. Many names also state what the kernel is
made for, which :func:`decode` reads.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import re
from functools import cache

from weft.workbench.kernels import gemm_names, other_names
from weft.workbench.kernels.fields import Kernel

# The prefix of a kernel that an interpreter ran, where a driver has nothing to name.
INTERPRETED = {"triton": "triton:", "numba": "numba:"}

# The first pattern that matches a demangled name gives its origin. Copies and fills come first: any
# candidate that calls contiguous() or zeros() runs PyTorch's.
PATTERNS: tuple[tuple[str, str], ...] = (
    ("memory", r"^\[CUDA mem|^Mem(?:cpy|set)\b|^mem(?:cpy|set)$"),
    (
        "memory",
        r"\bat::native::.*(?:direct_copy_kernel|FillFunctor|float8_copy|float16_copy"
        r"|CatArrayBatchedCopy|loops::copy)",
    ),
    ("triton", r"^triton:"),
    ("numba", r"^numba:|\bcudapy::"),
    ("inductor", r"^triton_(?:poi|red|per|tem|for|spl|unk|mix)_|^triton_(?:mm|bmm|addmm)_\d+$"),
    ("inductor", r"^cpp_fused"),
    ("aten", r"PyTorchMemEffAttention|\bpytorch_flash::|^fmha_cutlass[FB]|\bat_cuda_detail::"),
    ("aten", r"\bat::(?:native|cuda|functorch|detail)\b|\bc10::|\bcunn_\w+"),
    ("aten", r"\(anonymous namespace\)::softmax_warp_(?:forward|backward)|^multi_tensor_apply_k"),
    ("cudnn", r"\bcudnn(?:::|[A-Z]|_infer|_generated|_ops)|_scudnn_|xmma_(?:[fd]prop|[dw]grad)"),
    ("cudnn", r"\bimplicit_convolve_sgemm|_5x_cudnn\b|\b(?:xmma|cutlass)_cudnn::"),
    ("cublas", r"\bnvjet_|_xmma_gemm|\bcublas(?:Lt)?(?:::|[A-Z])|\binternal::gemvx::"),
    ("cublas", r"\b(?:maxwell|volta|turing|ampere)_(?:\w+_)?[a-z]\d*gemm_\w*\d+x\d+"),
    ("cutlass", r"\bcutlass_(?:\d+|wmma|tensorop|simt)_|\bcutlass3x_|\bcutlass::"),
    ("cub", r"\b(?:cub|thrust)::"),
)
_COMPILED = tuple((origin, re.compile(pattern)) for origin, pattern in PATTERNS)

# Origins that only decode() distinguishes; no verdict depends on them.
_DECODED_ONLY = (
    ("nccl", re.compile(r"^nccl(?:Dev)?Kernel_")),
    ("flash-attn", re.compile(r"\bFlash_(?:fwd|bwd)_kernel_traits<|\bflash::FlashAttn(?:Fwd|Bwd)")),
)
# Readers of each library's names. A name without a known mark is not read.
_READERS = {
    "cublas": gemm_names.FAMILIES,
    "cutlass": gemm_names.FAMILIES,
    "cudnn": (*gemm_names.FAMILIES, other_names.attention, other_names.cudnn),
    "aten": other_names.TORCH,
    "memory": (other_names.copy_or_fill, *other_names.TORCH),
    "inductor": (other_names.inductor,),
    "cub": (other_names.cub,),
    "nccl": (other_names.nccl,),
    "flash-attn": (other_names.attention,),
}
# A name of nested templates may have tens of thousands of letters; the useful part is at the front.
_MAX_READ = 8000

LIBRARIES = ("cublas", "cudnn", "cutlass", "aten", "cub", "inductor")

# Template arguments that describe a kernel whose own name is generic.
_HINT = re.compile(r"\w*(?:Functor|KernelImpl|_kernel_cuda|_kernel_impl|Ops)\w*|cutlass_\w+")
_GENERIC = re.compile(r"(?:elementwise|reduce|apply|Reduce|Kernel2?|device_kernel)\w*$")
LONGEST = 120


@cache
def origin(name: str) -> str:
    """Return a kernel's origin: cublas, cutlass, cudnn, aten, triton, numba, inductor, cub, memory.

    ``memory`` is a copy or a fill, including PyTorch's own. ``unknown`` is a name that no library is known
    to use: a user's kernel, including those of Triton and numba on a GPU.
    """
    readable = demangle(name)[:_MAX_READ]
    for library, pattern in _COMPILED:
        if pattern.search(readable):
            return library
    return "unknown"


def is_library(kernel_origin: str, name: str, backend: str) -> bool:
    """True if a candidate of this backend cannot have written the kernel of this origin and name.

    CUTLASS and CUB are templates, which CUDA C++ may legitimately instantiate. A kernel named
    ``cutlass_80_...`` is an instance that cuBLAS or PyTorch ships.
    """
    if backend == "cuda" and kernel_origin in ("cutlass", "cub"):
        return re.search(r"\bcutlass(?:3x|_\d+)_", name) is not None
    interpreted_by_another = kernel_origin in INTERPRETED and kernel_origin != backend
    return kernel_origin in LIBRARIES or interpreted_by_another


@cache
def demangle(name: str) -> str:
    """Return the name as C++ writes it; a name that is not mangled is returned unchanged."""
    if not name.startswith("_Z"):
        return name
    function = _demangler()
    if function is None:
        return name
    status = ctypes.c_int()
    text = function(name.encode(errors="replace"), None, None, ctypes.byref(status))
    if not text:
        return name
    try:
        return ctypes.string_at(text).decode(errors="replace")
    finally:
        _free()(text)


@cache
def plain(name: str) -> str:
    """Return a name that fits a line: no parameter types, and only descriptive template arguments.

    The result is the same for a name from the profiler (demangled) and from the driver (mangled).
    """
    readable = demangle(name).removeprefix("void ").strip()
    if readable.startswith(("[", "Mem", *INTERPRETED.values())):
        return readable[:LONGEST]
    readable = re.sub(r"\[abi:\w+\]", "", readable)
    head = _head(readable)
    hint = _HINT.search(readable, len(head)) if _GENERIC.search(head) else None
    return (head + (f"<{hint.group()}>" if hint else ""))[:LONGEST]


@cache
def decode(name: str) -> Kernel:
    """Return the facts that a name states: library, operation, tile, types (see :class:`Kernel`).

    It takes any text, mangled or not, and never raises. A fact that the name does not state is None. A name
    without a library's mark is ``unknown``: kernels in Triton and numba are named by their authors.
    """
    readable = demangle(name)[:_MAX_READ]
    library = origin(name)
    if library in ("unknown", "cutlass"):
        library = next((finer for finer, mark in _DECODED_ONLY if mark.search(readable)), library)
    for reader in _READERS.get(library, ()):
        fields = reader(readable)
        if fields is not None:
            return Kernel(name=name, short=plain(name), library=library, **fields)
    return Kernel(name=name, short=plain(name), library=library)


def _head(name: str) -> str:
    """Return the name without template arguments and without parameters."""
    head: list[str] = []
    depth = 0
    # Its parenthesis is no parameter list, which ends the head.
    for letter in name.replace("(anonymous namespace)", "{anonymous}"):
        if letter == "(" and not depth:
            break
        depth += (letter == "<") - (letter == ">")
        if not depth and letter != ">":
            head.append(letter)
    return "".join(head).replace("{anonymous}", "(anonymous namespace)")


@cache
def _demangler() -> ctypes._NamedFuncPointer | None:
    """Return ``__cxa_demangle`` of the C++ library that PyTorch loads; None if there is none."""
    for library in ("libstdc++.so.6", "libc++.1.dylib", ctypes.util.find_library("stdc++")):
        if library is None:
            continue
        try:
            function = ctypes.CDLL(library)["__cxa_demangle"]
        except (OSError, AttributeError):
            continue
        # Not c_char_p, which ctypes converts: the address to free would be lost.
        function.restype = ctypes.c_void_p
        return function
    return None


@cache
def _free() -> ctypes._NamedFuncPointer:
    # __cxa_demangle allocates its result by malloc.
    free = ctypes.CDLL(None)["free"]
    free.argtypes = [ctypes.c_void_p]
    free.restype = None
    return free
