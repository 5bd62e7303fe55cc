"""Code that torch.compile generates for a case: C++ without a GPU, Triton with one.

Inductor generates code for the device of the inputs, so its Triton code needs a GPU; the cubins are then
read from Triton's cache. The C++ is compiled by g++ as for execution, and objdump prints the assembly.
"""

from __future__ import annotations

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
from weft.backends.aot import Program
from weft.core import Case, Implementation, Operator, WeftError
from weft.core.json_files import read_json
from weft.workbench.explain.inspect import facts, sass
from weft.workbench.explain.inspect.counts import Counts, count
from weft.workbench.explain.inspect.kernel import Kernel

_CPP = re.compile(r"async_compile\.cpp_pybinding\([^\n]*?r?'''(.*?)'''", re.DOTALL)
_TRITON = re.compile(r"async_compile\.triton\([^\n]*?'''(.*?)'''", re.DOTALL)
_LIBRARY = re.compile(r"\b(?:extern_kernels|torch\.ops\.aten)\.(\w+)")
_VECTORS = {"zmm": 512, "ymm": 256, "xmm": 128}  # vector registers of x86 and their bits
_FUNCTION = re.compile(r"^[0-9a-f]+ <([^>]*)>:$")


@dataclass(frozen=True, kw_only=True)
class Generated:
    """Generated code: ``sources`` are inductor's kernels, ``library`` the calls that it left to libraries.

    ``vector_bits`` is the vector width of the C++. ``registers`` counts the assembly's instructions by the
    widest vector register that they name. ``kernels`` are those of a GPU.
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
        """Return plain data."""
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
        """Return the text for a terminal: the sources, then what they were compiled to."""
        lines = [f"{self.operator} {self.implementation} at {self.case}, {self.device}"]
        lines += [f"note: {note}" for note in self.notes]
        if self.library:
            lines.append(f"left to a library: {', '.join(self.library)}")
        for kernel in self.kernels:
            lines += ["", f"== {kernel.title}"]
            lines += [f"{name:26} {fact}" for name, fact in facts.facts(kernel).items()]
        for number, source in enumerate(self.sources, 1):
            lines += ["", f"== {self.language}, {number} of {len(self.sources)}", source.strip()]
        if self.registers:
            counts = ", ".join(f"{n} with {name}" for name, n in self.registers.items())
            width = f"vectors of {self.vector_bits} bits" if self.vector_bits else "no vectors"
            lines += ["", f"inductor writes {width}; instructions of the assembly: {counts}"]
        if self.assembly:
            lines += ["", "== assembly", self.assembly.rstrip()]
        return "\n".join(lines) + "\n"


def generated(
    operator: Operator, implementation: Implementation, case: Case | None, device: str | None = None
) -> Generated:
    """Compile and run the forward once, at ``case`` or the first supported bench case.

    ``device`` is ``"cuda"`` or ``"cpu"``, by default a GPU if there is one.
    """
    device = device or machine.default_device()
    chosen = case or _default_case(operator, implementation, device)
    support = implementation.supports(chosen, device)
    if not support or device not in chosen.devices:
        why = support.reason or f"this case is not meant for a {device} device"
        raise WeftError(f"{operator.name} {implementation.name} at {chosen.name}", got=why)
    # Inductor itself would fail later with a long traceback.
    if device == "cpu" and not shutil.which(os.environ.get("CXX", "g++")):
        raise WeftError("torch.compile on a CPU", expected="g++ or CXX", got="neither")
    empty = Generated(
        operator=operator.name,
        implementation=implementation.name,
        case=chosen.name,
        device=device,
        language="C++" if device == "cpu" else "Triton",
        sources=(),
    )
    return _run(empty, implementation, chosen)


def _default_case(operator: Operator, implementation: Implementation, device: str) -> Case:
    order = sorted(operator.cases, key=lambda c: ("bench" not in c.tags, c.inputs[0].numel))
    for case in order:
        if device in case.devices and implementation.supports(case, device):
            return case
    raise WeftError(f"{operator.name}: {implementation.name} supports no case on a {device} device")


def _run(generated: Generated, implementation: Implementation, case: Case) -> Generated:
    import torch._inductor.config as settings
    from torch._inductor import utils

    from weft.workbench.calls.inputs import make

    inputs = make(case, generated.device, 0)
    fresh_cache = getattr(utils, "fresh_cache", None) or utils.fresh_inductor_cache
    cache_files: dict[str, Any] = {}
    # An empty cache: inductor does not write again what it finds in the user's cache. One thread: a pool of
    # compiler processes would still use the user's cache. No precompiled headers: for one kernel they take
    # longer than they save.
    options = {"compile_threads": 1, "cpp_cache_precompile_headers": False}
    # A setting that this version of torch does not have would raise.
    options = {name: value for name, value in options.items() if hasattr(settings, name)}
    with settings.patch(options), fresh_cache(cache_files):
        # `fresh_cache` sets the variable to its folder and deletes that at its end: read all results before.
        cache = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        _, codes = utils.run_and_get_code(implementation.forward, *inputs, **case.params)
        code = "\n".join(codes)
        pattern = _CPP if generated.device == "cpu" else _TRITON
        library = tuple(dict.fromkeys(_LIBRARY.findall(code)))
        generated = replace(generated, sources=tuple(pattern.findall(code)), library=library)
        return _on_cpu(generated, cache) if generated.device == "cpu" else _on_gpu(generated, cache)


def _on_cpu(generated: Generated, cache: Path) -> Generated:
    why = "no GPU is visible here" if not machine.has_gpu() else "as for a CPU"
    notes = [f"{why}: the C++ that inductor writes for a CPU, not its Triton code"]
    if not generated.sources:
        notes.append("inductor wrote no kernel of its own: everything is left to the library")
        return replace(generated, notes=tuple(notes))
    if shutil.which("objdump") is None:
        notes.append("no assembly: objdump was not found; install binutils")
        return replace(generated, vector_bits=_vector_bits(), notes=tuple(notes))
    functions = [_functions(f) for f in sorted(cache.rglob("*.so"))]
    assembly = "\n".join(filter(None, functions))
    return replace(
        generated,
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
    """Return the assembly of inductor's functions in a library: ``kernel`` and its loops."""
    command = ["objdump", "-d", "-C", "--no-show-raw-insn", str(library)]
    printed = disassemble.run(command, "objdump")
    lines: list[str] = []
    inside = False
    for line in printed.splitlines():
        # Stubs of the procedure linkage table (@plt) have the same names and no code of ours.
        if head := _FUNCTION.match(line):
            inside = bool(re.match(r"(?:kernel|cpp_fused\w*)\b(?!.*@plt)", head[1]))
        if inside:
            lines.append(line.rstrip())
    return "\n".join(lines)


def _by_register(assembly: str) -> dict[str, int]:
    """Count instructions by the widest vector register that they name."""
    code = [line for line in assembly.splitlines() if re.match(r"\s+[0-9a-f]+:\s", line)]
    counts: Counter[str] = Counter()
    for line in code:
        # _VECTORS has the widest registers first.
        counts[next((name for name in _VECTORS if f"%{name}" in line), "none of these")] += 1
    return {name: counts[name] for name in (*_VECTORS, "none of these")}


def _on_gpu(generated: Generated, cache: Path) -> Generated:
    if not generated.sources:
        note = "inductor wrote no kernel of its own: everything is left to the library"
        return replace(generated, notes=(note,))
    kernels = tuple(_cached_kernels(generated, cache))
    # Autotuning leaves a cubin for each configuration that it tried.
    note = "inductor may try several configurations of one kernel; each that was compiled is listed"
    if not kernels:
        note = "Triton's cache has no cubin: only the source can be shown"
    return replace(generated, kernels=kernels, notes=(note,))


def _cached_kernels(generated: Generated, cache: Path) -> Iterator[Kernel]:
    """Yield the kernels in Triton's cache, each a cubin with a JSON file of metadata."""
    for file in sorted(cache.rglob("*.cubin")):
        metadata_file = file.with_suffix(".json")
        metadata = read_json(metadata_file) if metadata_file.is_file() else {}
        # The target may be written as 90 or as sm_90.
        arch = int(re.sub(r"\D", "", str(metadata.get("target", {}).get("arch", "0"))) or 0)
        content = file.read_bytes()
        program = Program(
            label=file.stem,
            target=f"sm_{arch}{'a' if arch >= 90 else ''}",
            by=f"Triton {metadata.get('triton_version', 'of unknown version')}",
            cubin=content,
            kernels=elf.kernels(content, arch),
            ptx=elf.ptx(content),
            file=file.with_suffix(".py"),
            dynamic=metadata.get("shared"),
        )
        for code in program.kernels:
            counts = Counts()
            for listing in disassemble.sass_of_all([code.text], arch):
                counts = count(sass.parse(listing).get("", ()))
            yield Kernel(
                operator=generated.operator,
                implementation=generated.implementation,
                arch=arch,
                program=program,
                code=code,
                counts=counts,
                cases=(f"{generated.case} forward",),
            )
