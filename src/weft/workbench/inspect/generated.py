"""What torch.compile writes for a case: C++ where there is no GPU, Triton where there is one.

Inductor writes for the device that the inputs are on, so its Triton code cannot be had without a
GPU: there it is read from the source it generates, and its cubins from Triton's cache. The C++ is
compiled by g++ as it would be run; the assembly is objdump's.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from weft import machine
from weft.backends import cubin as elf
from weft.backends import disassemble
from weft.backends.take_apart import Program
from weft.core import Case, Implementation, Operator, WeftError
from weft.workbench.inspect import facts, sass
from weft.workbench.inspect.counts import Counts, count
from weft.workbench.inspect.kernel import Kernel

_CPP = re.compile(r"async_compile\.cpp_pybinding\([^\n]*?r?'''(.*?)'''", re.DOTALL)
_TRITON = re.compile(r"async_compile\.triton\([^\n]*?'''(.*?)'''", re.DOTALL)
_LIBRARY = re.compile(r"\b(?:extern_kernels|torch\.ops\.aten)\.(\w+)")
_VECTORS = {"zmm": 512, "ymm": 256, "xmm": 128}  # x86's registers, and their bits
_FUNCTION = re.compile(r"^[0-9a-f]+ <([^>]*)>:$")


@dataclass(frozen=True, kw_only=True)
class Generated:
    """``sources`` are the kernels that inductor wrote, ``library`` the calls it left to others.

    ``vector_bits`` is the width that it vectorises C++ for; ``registers`` counts the instructions
    of the assembly by the widest vector register that they name; ``kernels`` are a GPU's.
    """

    operator: str
    implementation: str
    case: str
    device: str
    language: str
    sources: tuple[str, ...]
    library: tuple[str, ...] = ()
    vector_bits: int | None = None
    registers: dict[str, int] = field(default_factory=dict)
    assembly: str = ""
    kernels: tuple[Kernel, ...] = ()
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "operator": self.operator,
            "implementation": self.implementation,
            "case": self.case,
            "device": self.device,
            "language": self.language,
            "sources": list(self.sources),
            "library": list(self.library),
            "vector_bits": self.vector_bits,
            "registers": self.registers,
            "assembly": self.assembly,
            "kernels": [k.to_json() for k in self.kernels],
            "notes": list(self.notes),
        }

    def text(self) -> str:
        """For a terminal: what was written, then what became of it."""
        lines = [f"{self.operator} {self.implementation} at {self.case}, {self.device}"]
        lines += [f"note: {note}" for note in self.notes]
        if self.library:
            lines.append(f"left to a library: {', '.join(self.library)}")
        for kernel in self.kernels:
            lines += ["", f"== {kernel.title}"]
            lines += [f"{name:26} {told}" for name, told in facts.facts(kernel).items()]
        for number, source in enumerate(self.sources, 1):
            lines += ["", f"== {self.language}, {number} of {len(self.sources)}", source.strip()]
        if self.registers:
            told = ", ".join(f"{n} with {name}" for name, n in self.registers.items())
            width = f"vectors of {self.vector_bits} bits" if self.vector_bits else "no vectors"
            lines += ["", f"inductor writes {width}; instructions of the assembly: {told}"]
        if self.assembly:
            lines += ["", "== assembly", self.assembly.rstrip()]
        return "\n".join(lines) + "\n"


def generated(
    operator: Operator, implementation: Implementation, case: Case | None, on: str | None = None
) -> Generated:
    """Compile and run the forward once, at ``case`` or the first that the device takes.

    ``on`` is ``"cuda"`` or ``"cpu"``, by default a GPU if there is one.
    """
    device = on or machine.default_device()
    chosen = case or _small(operator, implementation, device)
    refused = implementation.supports(chosen, device)
    if not refused or device not in chosen.devices:
        why = refused.reason or f"this case is not meant for a {device} device"
        raise WeftError(f"{operator.name} {implementation.name} at {chosen.name}", got=why)
    if device == "cpu" and not shutil.which(os.environ.get("CXX", "g++")):
        raise WeftError("torch.compile on a CPU", expected="g++ or CXX", got="neither")
    made = Generated(
        operator=operator.name,
        implementation=implementation.name,
        case=chosen.name,
        device=device,
        language="C++" if device == "cpu" else "Triton",
        sources=(),
    )
    return _run(made, implementation, chosen)


def _small(operator: Operator, implementation: Implementation, device: str) -> Case:
    order = sorted(operator.cases, key=lambda c: ("bench" not in c.tags, c.inputs[0].numel))
    for case in order:
        if device in case.devices and implementation.supports(case, device):
            return case
    raise WeftError(f"{operator.name}: {implementation.name} takes no case on a {device} device")


def _run(made: Generated, implementation: Implementation, case: Case) -> Generated:
    import torch._inductor.config as settings
    from torch._inductor import utils

    from weft.workbench.inputs import make

    inputs = make(case, made.device, 0)
    fresh = getattr(utils, "fresh_cache", None) or utils.fresh_inductor_cache
    folder: dict[str, Any] = {}
    # A cache of its own: what inductor finds in the user's, it does not write again. One thread: a
    # pool of compilers would have been started with the user's. Headers compiled ahead would take
    # longer than they save, for one kernel.
    chosen = {"compile_threads": 1, "cpp_cache_precompile_headers": False}
    chosen = {name: value for name, value in chosen.items() if hasattr(settings, name)}
    with settings.patch(chosen), fresh(folder):
        where = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        _, codes = utils.run_and_get_code(implementation.forward, *inputs, **case.params)
        whole = "\n".join(codes)
        pattern = _CPP if made.device == "cpu" else _TRITON
        library = tuple(dict.fromkeys(_LIBRARY.findall(whole)))
        made = replace(made, sources=tuple(pattern.findall(whole)), library=library)
        return _on_cpu(made, where) if made.device == "cpu" else _on_gpu(made, where)


def _on_cpu(made: Generated, where: Path) -> Generated:
    why = "no GPU is visible here" if not machine.has_gpu() else "as for a CPU"
    notes = [f"{why}: the C++ that inductor writes for a CPU, not its Triton code"]
    if not made.sources:
        notes.append("inductor wrote no kernel of its own: all is left to the library")
        return replace(made, notes=tuple(notes))
    if shutil.which("objdump") is None:
        notes.append("no assembly: objdump was not found; install binutils")
        return replace(made, vector_bits=_vector_bits(), notes=tuple(notes))
    listed = [_functions(f) for f in sorted(where.rglob("*.so"))]
    assembly = "\n".join(filter(None, listed))
    return replace(
        made,
        vector_bits=_vector_bits(),
        registers=_by_register(assembly),
        assembly=assembly,
        notes=tuple(notes),
    )


def _vector_bits() -> int | None:
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    isa = pick_vec_isa()
    return int(isa.bit_width()) if isa else None


def _functions(library: Path) -> str:
    """The assembly of a library's functions that are inductor's: ``kernel`` and its loops."""
    command = ["objdump", "-d", "-C", "--no-show-raw-insn", str(library)]
    printed = disassemble.run(command, "objdump")
    kept: list[str] = []
    inside = False
    for line in printed.splitlines():
        if head := _FUNCTION.match(line):
            inside = bool(re.match(r"(?:kernel|cpp_fused\w*)\b(?!.*@plt)", head[1]))
        if inside:
            kept.append(line.rstrip())
    return "\n".join(kept)


def _by_register(assembly: str) -> dict[str, int]:
    """Instructions by the widest vector register that they name, and the number of all."""
    code = [line for line in assembly.splitlines() if re.match(r"\s+[0-9a-f]+:\s", line)]
    found: Counter[str] = Counter()
    for line in code:
        found[next((name for name in _VECTORS if f"%{name}" in line), "none of these")] += 1
    return {name: found[name] for name in (*_VECTORS, "none of these")}


def _on_gpu(made: Generated, where: Path) -> Generated:
    if not made.sources:
        note = "inductor wrote no kernel of its own: all is left to the library"
        return replace(made, notes=(note,))
    kernels = tuple(_cached(made, where))
    note = "inductor may try several configurations of one kernel; each that was compiled is listed"
    if not kernels:
        note = "no cubin was left in Triton's cache: the source alone can be shown"
    return replace(made, kernels=kernels, notes=(note,))


def _cached(made: Generated, where: Path) -> Iterator[Kernel]:
    """The kernels in Triton's cache: each a cubin, with what Triton knows of it beside it."""
    for file in sorted(where.rglob("*.cubin")):
        beside = file.with_suffix(".json")
        known = json.loads(beside.read_text()) if beside.is_file() else {}
        arch = int(re.sub(r"\D", "", str(known.get("target", {}).get("arch", "0"))) or 0)
        content = file.read_bytes()
        program = Program(
            label=file.stem,
            target=f"sm_{arch}{'a' if arch >= 90 else ''}",
            by=f"Triton {known.get('triton_version', 'of unknown version')}",
            cubin=content,
            kernels=elf.kernels(content, arch),
            ptx=elf.ptx(content),
            file=file.with_suffix(".py"),
            dynamic=known.get("shared"),
        )
        for code in program.kernels:
            counts = Counts()
            for said in disassemble.sass_of_all([code.text], arch):
                counts = count(sass.parse(said).get("", ()))
            yield Kernel(
                operator=made.operator,
                implementation=made.implementation,
                arch=arch,
                program=program,
                code=code,
                counts=counts,
                cases=(f"{made.case} forward",),
            )
