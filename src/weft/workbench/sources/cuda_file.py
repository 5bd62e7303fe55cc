"""Load a user's ``.cu`` file: its header describes the launches, NVRTC compiles it, nothing is built.

``scalar_t`` is the C++ type of the first input; the file is compiled once for each dtype. Kernels
are ``extern "C"``. They receive tensors as pointers, integers as ``long long`` and other numbers as
``double``. A launch with an empty grid is skipped, because it has nothing to compute.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from weft import machine
from weft.backends.nvrtc import CudaSource, current_arch
from weft.core import BACKWARD, FORWARD, YES, Case, Implementation, Support, WeftError, no
from weft.core.operator import unknown_name
from weft.ops._common.layout import CUDA_TYPES
from weft.workbench.sources.cuda_expr import ExpressionError, Value, non_negative_integer
from weft.workbench.sources.cuda_header import Header, Launch, Program, at_location, parse_header
from weft.workbench.sources.source import LoadedFile, Source

INCLUDES = {"float16": "cuda_fp16.h", "bfloat16": "cuda_bf16.h"}  # put before the file's first line
DEFAULT_ARCH = "sm_90"  # compile target on a machine without a GPU
MAX_THREADS, MAX_BLOCKS = 1024, ((1 << 31) - 1, 65535, 65535)  # CUDA's limits for block and grid
# Between __global__ and the name are words and one level of parentheses, as in __launch_bounds__(256).
SIGNATURE = re.compile(r"__global__([^;{}()]|\([^()]*\))*?\b(\w+)\s*\(([^()]*)\)\s*\{")
MAX_ERRORS_SHOWN = 3


def load(source: Source) -> LoadedFile:
    """Load the one implementation that a ``.cu`` file declares.

    Raises :class:`WeftError` for a header that cannot be parsed, for a kernel that the file does
    not define or that takes other arguments, and for a file that does not compile.
    """
    path = Path(source.path)
    header = read_header(path)
    _compile(path, header, current_arch() if machine.has_gpu() else DEFAULT_ARCH)
    return LoadedFile(implementations=(_implementation(path, header),))


def read_header(path: Path) -> Header:
    """Parse the file's header and check it against its kernels; nothing is compiled."""
    if not path.is_file():
        raise WeftError(f"no file {path}", expected="a .cu file")
    text = path.read_text(errors="replace")
    header = parse_header(path.name, path.stem, text)
    for launch in header.launches:
        _check_signature(header, launch, text)
    return header


def compile_only(path: str | Path, arch: str = DEFAULT_ARCH) -> list[str]:
    """Compile a ``.cu`` file for a target without a GPU; return one line for each dtype.

    Raises :class:`WeftError` with the compiler's first errors if it does not compile.
    """
    path = Path(path)
    return _compile(path, read_header(path), arch)


def _compile(path: Path, header: Header, arch: str) -> list[str]:
    lines = []
    # Every dtype now, so that an error in one is a message of loading and not of some later call.
    for dtype in header.dtypes:
        try:
            cubin = cuda_source(path, header, dtype).compile(arch)
        except WeftError as error:
            raise _first_errors(path.name, dtype, arch, error) from error
        lines.append(f"{dtype}: {len(cubin)} bytes for {arch}")
    return lines


def cuda_source(path: Path, header: Header, dtype: str) -> CudaSource:
    """Return the file as a source to compile for one dtype of the first input."""
    cuda_type = CUDA_TYPES[getattr(torch, dtype)]
    return CudaSource(
        file=path,
        kernels=tuple(dict.fromkeys(launch.kernel for launch in header.launches)),
        defines=(("scalar_t", cuda_type), ("WEFT_T", cuda_type)),
        label=f"{path.stem}-{dtype}",
        options=(f"-include={INCLUDES[dtype]}",) if dtype in INCLUDES else (),
    )


def _first_errors(file: str, dtype: str, arch: str, error: WeftError) -> WeftError:
    """Shorten the compiler's log to its first errors, each as ``file:line: message``."""
    # NVRTC's form: "file(12): error: text". Notes and warnings in between are left out.
    errors = re.findall(r"([\w./-]+)\((\d+)\): (?:catastrophic )?error: (.*)", error.got or "")
    if not errors:
        return error
    shown = "; ".join(f"{Path(f).name}:{line}: {what}" for f, line, what in errors[:MAX_ERRORS_SHOWN])
    rest = f"; and {len(errors) - MAX_ERRORS_SHOWN} more" if len(errors) > MAX_ERRORS_SHOWN else ""
    return WeftError(f"{file} does not compile ({dtype}, {arch}): {shown}{rest}")


def _check_signature(header: Header, launch: Launch, text: str) -> None:
    """Check that the kernel exists and takes the pointers and numbers that the launch passes."""
    # Without comments: a kernel's name in one is not a definition.
    code = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    location = f"{header.file}:{launch.line}"
    # Only the name at first: a macro may generate the definition, which SIGNATURE does not match.
    if not re.search(rf"\b{launch.kernel}\b", code):
        names = [m[2] for m in SIGNATURE.finditer(code)]
        raise at_location(location, unknown_name("kernel", launch.kernel, names))
    # Anywhere in the file, since one extern "C" block may hold all kernels.
    if 'extern "C"' not in code:
        hint = f'extern "C" __global__ void {launch.kernel}(...): C++ would mangle the name'
        raise WeftError(f'{header.file}: no kernel is extern "C"', hint=hint)
    signature = next((m[3] for m in SIGNATURE.finditer(code) if m[2] == launch.kernel), None)
    if signature is None:
        return  # a macro generates the signature: only the compiler can read it
    parameters = [p.strip() for p in signature.split(",")] if signature.strip() else []
    if len(parameters) != len(launch.arguments):
        raise WeftError(
            f"{location}: arguments of {launch.kernel}",
            expected=f"{len(parameters)} ({', '.join(parameters)})",
            got=str(len(launch.arguments)),
        )
    for parameter, argument in zip(parameters, launch.arguments, strict=True):
        # A number arrives as 8 bytes: a parameter of type float would read half of a double.
        is_pointer = "*" in parameter
        if is_pointer != isinstance(argument, str) or re.search(r"\bfloat\b(?!.*\*)", parameter):
            raise WeftError(
                f"{location}: {launch.kernel} takes {parameter!r}",
                expected="a pointer for a tensor, long long or double for a number",
                got=f"tensor {argument}" if isinstance(argument, str) else "a number",
            )


def _implementation(path: Path, header: Header) -> Implementation:
    sources = {d: cuda_source(path, header, d) for d in header.dtypes}

    def forward(*inputs: Any, **params: Any) -> Any:
        outputs = _run(header, header.forward, sources, inputs, params)
        return outputs[0] if len(outputs) == 1 else outputs

    def backward(*arguments: Any, **params: Any) -> tuple[Any, ...]:
        assert header.backward is not None
        return _run(header, header.backward, sources, arguments, params)

    return Implementation(
        operator=header.operator.name,
        name=header.name,
        backend="cuda",
        forward=forward,
        backward=backward if header.backward else None,
        supports=lambda case, device: _supports(header, case),
        deterministic=header.deterministic,
        directions=(FORWARD, BACKWARD) if header.backward else (FORWARD,),
        aot_kernels=tuple(sources.values()),
        idea=header.idea,
    )


def _supports(header: Header, case: Case) -> Support:
    if case.dtype not in header.dtypes:
        return no(f"{header.file} supports {', '.join(header.dtypes)} (its line 'dtypes')")
    for param, value in case.params.items():
        supported = header.only.get(param)
        if supported is not None and str(value) not in supported:
            return no(f"{header.file} supports {param} = {', '.join(supported)} (its line 'only')")
        # A kernel can receive numbers; of a string or a flag the file must say what it supports.
        # `type`, not `isinstance`: a bool is an int, but a flag is no number.
        if supported is None and type(value) not in (int, float):
            return no(f"{header.file} has no line 'only' for the parameter {param} = {value!r}")
    return YES


def _run(
    header: Header,
    program: Program,
    sources: Mapping[str, CudaSource],
    arguments: tuple[Any, ...],
    params: Mapping[str, Any],
) -> tuple[torch.Tensor, ...]:
    """Run the program's steps; raise :class:`WeftError` with the line of the step that fails."""
    others = [type(a).__name__ for a in arguments if not isinstance(a, torch.Tensor)]
    if len(arguments) != len(program.arguments) or others:
        expected = f"{len(program.arguments)} tensors ({', '.join(program.arguments)})"
        got = f"{len(arguments)} arguments" + (f", one of them a {others[0]}" if others else "")
        raise WeftError(f"{header.file}: arguments of the call", expected=expected, got=got)
    names: dict[str, Any] = {**params, **dict(zip(program.arguments, arguments, strict=True))}
    source = sources[str(arguments[0].dtype).removeprefix("torch.")]
    for line, step in program.steps:
        try:
            if isinstance(step, Launch):
                _launch(source, step, names)
            else:
                step(names)
        except ExpressionError as error:
            raise WeftError(f"{header.file}:{line}: {error}") from error
    return tuple(names[name] for name in program.outputs)


def _launch(source: CudaSource, launch: Launch, names: dict[str, Any]) -> None:
    grid, block = _dim3("grid", launch.grid, names), _dim3("block", launch.block, names)
    if 0 in grid:  # CUDA refuses an empty grid; an empty tensor has nothing to compute
        return
    threads = block[0] * block[1] * block[2]
    if not 1 <= threads <= MAX_THREADS:
        raise ExpressionError(f"a block of {threads} threads, expected 1 to {MAX_THREADS}")
    if any(n > most for n, most in zip(grid, MAX_BLOCKS, strict=True)):
        raise ExpressionError(f"a grid of {grid} blocks, expected at most {MAX_BLOCKS}")
    shared = non_negative_integer(launch.shared(names), "shared memory")
    arguments = [names[a] if isinstance(a, str) else a(names) for a in launch.arguments]
    source[launch.kernel](grid, block, *arguments, shared=shared)


def _dim3(what: str, values: tuple[Value, ...], names: dict[str, Any]) -> tuple[int, int, int]:
    sizes = [non_negative_integer(v(names), f"the {what}") for v in values]
    x, y, z = sizes + [1] * (3 - len(sizes))
    return x, y, z
