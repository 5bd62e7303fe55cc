"""Kernel names: who wrote the kernel that a profiler or a graph names, the name short, and read.

A name is all that a driver tells of a kernel, but libraries name theirs unmistakably:
``at::native::...`` is PyTorch's, ``nvjet_...`` and ``..._xmma_gemm_...`` are cuBLAS's; and many
write into it what they are made for. :func:`decode` reads that.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import re
from functools import cache

from weft.workbench import kernel_gemms, kernel_others
from weft.workbench.kernel_words import Kernel

# The prefix of a kernel that an interpreter ran, where a driver has nothing to name.
INTERPRETED = {"triton": "triton:", "numba": "numba:"}

# The first that is found in a name says whose it is; the names are demangled. Copies and fills come
# first: PyTorch's are what any candidate makes who asks for contiguous() or zeros().
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

# Marks that only decode() tells apart: whose a kernel is does not bear on any verdict here.
_FINER = (
    ("nccl", re.compile(r"^nccl(?:Dev)?Kernel_")),
    ("flash-attn", re.compile(r"\bFlash_(?:fwd|bwd)_kernel_traits<|\bflash::FlashAttn(?:Fwd|Bwd)")),
)
# Whose names are read how. A name of no known mark is not read at all.
_READERS = {
    "cublas": kernel_gemms.FAMILIES,
    "cutlass": kernel_gemms.FAMILIES,
    "cudnn": (*kernel_gemms.FAMILIES, kernel_others.attention, kernel_others.cudnn),
    "aten": kernel_others.TORCH,
    "memory": (kernel_others.moved, *kernel_others.TORCH),
    "inductor": (kernel_others.inductor,),
    "cub": (kernel_others.cub,),
    "nccl": (kernel_others.nccl,),
    "flash-attn": (kernel_others.attention,),
}
# A name of nested templates may run to tens of thousands of letters; what tells stands in front.
_READ = 8000

LIBRARIES = ("cublas", "cudnn", "cutlass", "aten", "cub", "inductor")

# What a template's arguments say of a kernel whose own name says little.
_HINT = re.compile(r"\w*(?:Functor|KernelImpl|_kernel_cuda|_kernel_impl|Ops)\w*|cutlass_\w+")
_TELLS_LITTLE = re.compile(r"(?:elementwise|reduce|apply|Reduce|Kernel2?|device_kernel)\w*$")
LONGEST = 120


@cache
def origin(name: str) -> str:
    """Whose kernel this is: cublas, cutlass, cudnn, aten, triton, numba, inductor, cub, memory.

    ``memory`` is a copy or a fill, PyTorch's own included. ``unknown`` is what no library is known
    to name so: a kernel that somebody wrote, Triton's and numba's on a GPU among them.
    """
    readable = demangle(name)[:_READ]
    for found, pattern in _COMPILED:
        if pattern.search(readable):
            return found
    return "unknown"


def is_library(found: str, name: str, backend: str) -> bool:
    """Whether a candidate of this backend cannot have written the kernel of this origin and name.

    CUTLASS and CUB are templates, which CUDA C++ may rightly instantiate; what is called
    ``cutlass_80_...`` is an instance out of cuBLAS or PyTorch, whoever calls it.
    """
    if backend == "cuda" and found in ("cutlass", "cub"):
        return re.search(r"\bcutlass(?:3x|_\d+)_", name) is not None
    return found in LIBRARIES or (found in INTERPRETED and found != backend)


@cache
def demangle(name: str) -> str:
    """The name as C++ would write it; a name that is not mangled, as it is."""
    if not name.startswith("_Z"):
        return name
    function = _demangler()
    if function is None:
        return name
    status = ctypes.c_int()
    found = function(name.encode(errors="replace"), None, None, ctypes.byref(status))
    if not found:
        return name
    try:
        return ctypes.string_at(found).decode(errors="replace")
    finally:
        _free()(found)


@cache
def plain(name: str) -> str:
    """A name that fits a line: no argument types, of the template's arguments only what tells.

    The same for a name from the profiler (demangled) and from the driver (mangled).
    """
    readable = demangle(name).removeprefix("void ").strip()
    if readable.startswith(("[", "Mem", *INTERPRETED.values())):
        return readable[:LONGEST]
    readable = re.sub(r"\[abi:\w+\]", "", readable)
    head = _head(readable)
    hint = _HINT.search(readable, len(head)) if _TELLS_LITTLE.search(head) else None
    return (head + (f"<{hint.group()}>" if hint else ""))[:LONGEST]


@cache
def decode(name: str) -> Kernel:
    """The name taken apart: library, what it does, tile, types and so on (see :class:`Kernel`).

    Takes any text, mangled or not, and never raises. What the name does not tell is None, and a
    name that bears no library's mark is ``unknown`` in all: Triton's and numba's kernels on a GPU
    are named by who wrote them.
    """
    readable = demangle(name)[:_READ]
    library = origin(name)
    if library in ("unknown", "cutlass"):
        library = next((found for found, mark in _FINER if mark.search(readable)), library)
    for reader in _READERS.get(library, ()):
        fields = reader(readable)
        if fields is not None:
            return Kernel(name=name, short=plain(name), library=library, **fields)
    return Kernel(name=name, short=plain(name), library=library)


def _head(name: str) -> str:
    """The name without its template's arguments and without its parameters."""
    head: list[str] = []
    depth = 0
    for letter in name.replace("(anonymous namespace)", "{anonymous}"):
        if letter == "(" and not depth:
            break
        depth += (letter == "<") - (letter == ">")
        if not depth and letter != ">":
            head.append(letter)
    return "".join(head).replace("{anonymous}", "(anonymous namespace)")


@cache
def _demangler() -> ctypes._NamedFuncPointer | None:
    """``__cxa_demangle`` of the C++ library that PyTorch brings along; None where there is none."""
    for library in ("libstdc++.so.6", "libc++.1.dylib", ctypes.util.find_library("stdc++")):
        if library is None:
            continue
        try:
            function = ctypes.CDLL(library)["__cxa_demangle"]
        except (OSError, AttributeError):
            continue
        function.restype = ctypes.c_void_p
        return function
    return None


@cache
def _free() -> ctypes._NamedFuncPointer:
    free = ctypes.CDLL(None)["free"]
    free.argtypes = [ctypes.c_void_p]
    free.restype = None
    return free
