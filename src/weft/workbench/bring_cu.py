"""A ``.cu`` file of one's own: its header says how it is launched, NVRTC compiles it, no build.

``scalar_t`` is defined as the C++ type of the first input, and the file is compiled once for each
dtype. Kernels are ``extern "C"``. Tensors go to them as pointers, whole numbers as ``long long``,
others as ``double``. A launch of an empty grid is left out, as there is nothing to compute.
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
from weft.workbench import bring_cu_header as header
from weft.workbench.bring import Brought, Source
from weft.workbench.bring_cu_header import Header, Launch, Program
from weft.workbench.bring_cu_numbers import Refused, Value, whole

TYPES = {
    "float64": "double",
    "float32": "float",
    "float16": "__half",
    "bfloat16": "__nv_bfloat16",
    "int64": "long long",
    "int32": "int",
    "bool": "bool",
}
HEADERS = {"float16": "cuda_fp16.h", "bfloat16": "cuda_bf16.h"}  # before the file's first line
WITHOUT_GPU = "sm_90"  # what a file is compiled for where there is no GPU to ask
MOST_THREADS, MOST_BLOCKS = 1024, ((1 << 31) - 1, 65535, 65535)
SIGNATURE = re.compile(r"__global__([^;{}()]|\([^()]*\))*?\b(\w+)\s*\(([^()]*)\)\s*\{")
SHOWN = 3  # of the compiler's errors


def load(source: Source) -> Brought:
    """The one implementation that a ``.cu`` file declares.

    Raises :class:`WeftError` for a header that cannot be read, for a kernel that the file does not
    have or that takes other arguments, and for a file that does not compile.
    """
    path = Path(source.path)
    found = read(path)
    _compiled(path, found, current_arch() if machine.has_gpu() else WITHOUT_GPU)
    return Brought(implementations=(_implementation(path, found),))


def read(path: Path) -> Header:
    """The file's header, held against its kernels; nothing is compiled."""
    if not path.is_file():
        raise WeftError(f"no file {path}", expected="a .cu file")
    text = path.read_text(errors="replace")
    found = header.read(path.name, path.stem, text)
    for launch in found.launches:
        _fits(found, launch, text)
    return found


def compile_only(path: str | Path, arch: str = WITHOUT_GPU) -> list[str]:
    """Compile a ``.cu`` file for a target, with no GPU: a line for each dtype that it is for.

    Raises :class:`WeftError` with the compiler's first errors where it does not compile.
    """
    path = Path(path)
    return _compiled(path, read(path), arch)


def _compiled(path: Path, found: Header, arch: str) -> list[str]:
    lines = []
    for dtype in found.dtypes:
        try:
            cubin = program(path, found, dtype).compile(arch)
        except WeftError as error:
            raise _first_errors(path.name, dtype, arch, error) from error
        lines.append(f"{dtype}: {len(cubin)} bytes for {arch}")
    return lines


def program(path: Path, found: Header, dtype: str) -> CudaSource:
    """The file for one dtype of the first input."""
    return CudaSource(
        file=path,
        kernels=tuple(dict.fromkeys(launch.kernel for launch in found.launches)),
        defines=(("scalar_t", TYPES[dtype]), ("WEFT_T", TYPES[dtype])),
        label=f"{path.stem}-{dtype}",
        options=(f"-include={HEADERS[dtype]}",) if dtype in HEADERS else (),
    )


def _first_errors(file: str, dtype: str, arch: str, error: WeftError) -> WeftError:
    """The compiler's log by its first errors, ``file:line: what``; the rest is counted."""
    seen = re.findall(r"([\w./-]+)\((\d+)\): (?:catastrophic )?error: (.*)", error.got or "")
    if not seen:
        return error
    told = "; ".join(f"{Path(f).name}:{line}: {what}" for f, line, what in seen[:SHOWN])
    more = f"; and {len(seen) - SHOWN} more" if len(seen) > SHOWN else ""
    return WeftError(f"{file} does not compile ({dtype}, {arch}): {told}{more}")


def _fits(found: Header, launch: Launch, text: str) -> None:
    """The kernel is there, and takes as many pointers and numbers as it is given."""
    code = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    where = f"{found.file}:{launch.line}"
    if not re.search(rf"\b{launch.kernel}\b", code):
        names = [m[2] for m in SIGNATURE.finditer(code)]
        raise header.placed(where, unknown_name("kernel", launch.kernel, names))
    if 'extern "C"' not in code:
        hint = (
            f'extern "C" __global__ void {launch.kernel}(...): the name is looked up as it stands'
        )
        raise WeftError(f'{found.file}: no kernel is extern "C"', hint=hint)
    taken = next((m[3] for m in SIGNATURE.finditer(code) if m[2] == launch.kernel), None)
    if taken is None:
        return  # its signature is made by a macro: the compiler alone can read it
    takes = [p.strip() for p in taken.split(",")] if taken.strip() else []
    if len(takes) != len(launch.arguments):
        raise WeftError(
            f"{where}: arguments of {launch.kernel}",
            expected=f"{len(takes)} ({', '.join(takes)})",
            got=str(len(launch.arguments)),
        )
    for parameter, argument in zip(takes, launch.arguments, strict=True):
        pointer = "*" in parameter
        if pointer != isinstance(argument, str) or re.search(r"\bfloat\b(?!.*\*)", parameter):
            raise WeftError(
                f"{where}: {launch.kernel} takes {parameter!r}",
                expected="a pointer for a tensor, long long or double for a number",
                got=f"tensor {argument}" if isinstance(argument, str) else "a number",
            )


def _implementation(path: Path, found: Header) -> Implementation:
    programs = {d: program(path, found, d) for d in found.dtypes}

    def forward(*inputs: Any, **params: Any) -> Any:
        made = _run(found, found.forward, programs, inputs, params)
        return made[0] if len(made) == 1 else made

    def backward(*given: Any, **params: Any) -> tuple[Any, ...]:
        assert found.backward is not None
        return _run(found, found.backward, programs, given, params)

    return Implementation(
        operator=found.operator.name,
        name=found.name,
        backend="cuda",
        forward=forward,
        backward=backward if found.backward else None,
        supports=lambda case, device: _supports(found, case),
        deterministic=found.deterministic,
        directions=(FORWARD, BACKWARD) if found.backward else (FORWARD,),
        specimens=tuple(programs.values()),
        idea=found.idea,
    )


def _supports(found: Header, case: Case) -> Support:
    if case.dtype not in found.dtypes:
        return no(f"{found.file} is written for {', '.join(found.dtypes)} (its line 'dtypes')")
    for param, value in case.params.items():
        taken = found.only.get(param)
        if taken is not None and str(value) not in taken:
            return no(f"{found.file} is written for {param} = {', '.join(taken)} (its line 'only')")
        if taken is None and type(value) not in (int, float):
            return no(f"{found.file} does not say what it does with {param} = {value!r}: 'only'")
    return YES


def _run(
    found: Header,
    wanted: Program,
    programs: Mapping[str, CudaSource],
    given: tuple[Any, ...],
    params: Mapping[str, Any],
) -> tuple[torch.Tensor, ...]:
    """The program's steps on what is given; raises :class:`WeftError` with the line of a step."""
    kinds = [type(g).__name__ for g in given if not isinstance(g, torch.Tensor)]
    if len(given) != len(wanted.arguments) or kinds:
        expected = f"{len(wanted.arguments)} tensors ({', '.join(wanted.arguments)})"
        got = f"{len(given)} arguments" + (f", among them a {kinds[0]}" if kinds else "")
        raise WeftError(f"{found.file}: what it is given", expected=expected, got=got)
    names: dict[str, Any] = {**params, **dict(zip(wanted.arguments, given, strict=True))}
    source = programs[str(given[0].dtype).removeprefix("torch.")]
    for line, step in wanted.steps:
        try:
            if isinstance(step, Launch):
                _launch(source, step, names)
            else:
                step(names)
        except Refused as error:
            raise WeftError(f"{found.file}:{line}: {error}") from error
    return tuple(names[name] for name in wanted.outputs)


def _launch(source: CudaSource, launch: Launch, names: dict[str, Any]) -> None:
    grid, block = _sizes("grid", launch.grid, names), _sizes("block", launch.block, names)
    if 0 in grid:
        return
    threads = block[0] * block[1] * block[2]
    if not 1 <= threads <= MOST_THREADS:
        raise Refused(f"a block of {threads} threads, expected 1 to {MOST_THREADS}")
    if any(n > most for n, most in zip(grid, MOST_BLOCKS, strict=True)):
        raise Refused(f"a grid of {grid} blocks, expected at most {MOST_BLOCKS}")
    shared = whole(launch.shared(names), "shared memory")
    arguments = [names[a] if isinstance(a, str) else a(names) for a in launch.arguments]
    source[launch.kernel](grid, block, *arguments, shared=shared)


def _sizes(what: str, values: tuple[Value, ...], names: dict[str, Any]) -> tuple[int, int, int]:
    x, y, z = [whole(v(names), f"the {what}") for v in values] + [1] * (3 - len(values))
    return x, y, z
