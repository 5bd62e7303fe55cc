"""Which kernels an implementation has, at a case or at all, each compiled and taken apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from weft.backends import disassemble, take_apart
from weft.core import Case, Implementation, Operator, WeftError
from weft.workbench.inspect import sass
from weft.workbench.inspect.counts import Counts, count
from weft.workbench.inspect.kernel import Kernel
from weft.workbench.inspect.rehearse import Launch, identity, rehearse

Progress = Callable[[str], None]
NO_KERNEL = "has no kernel of its own to take apart: it calls PyTorch's"


@dataclass(frozen=True, kw_only=True)
class Use:
    """A specimen, and by kernel how it is launched and at which cases."""

    specimen: Any
    launches: dict[str, Launch]
    cases: dict[str, tuple[str, ...]]


def kernels(
    operator: Operator, implementation: Implementation, arch: str, **which: Any
) -> list[Kernel]:
    """The kernels of an implementation for a target such as ``sm_90``, their instructions counted.

    ``which`` and errors are those of :func:`compiled`.
    """
    return counted(compiled(operator, implementation, arch, **which))


def compiled(
    operator: Operator,
    implementation: Implementation,
    arch: str,
    *,
    case: str | None = None,
    direction: str | None = None,
    matching: str = "",
    progress: Progress = lambda line: None,
) -> list[Kernel]:
    """The kernels of an implementation, their instructions not yet counted.

    With ``case`` those that it launches, compiled as it launches them; without, all that it can
    compile with no GPU. ``matching``: only where the kernel's or the specimen's name holds this.
    Raises :class:`WeftError` where there are none, with the reason.
    """
    number = able(implementation, arch)
    uses = _at(operator, implementation, number, case, direction)
    found: list[Kernel] = []
    skipped: list[str] = []
    for use in uses:
        if not take_apart.suits(use.specimen, number):
            skipped.append(f"{use.specimen.label} (needs {take_apart.needs(use.specimen)})")
            continue
        progress(f"{operator.name} {implementation.name} {use.specimen.label} sm_{number}")
        found += _compiled(operator, implementation, use, number)
    found = [k for k in found if matching in k.code.name or matching in k.program.label]
    if case or direction:
        found = [k for k in found if k.launch is not None]
        found.sort(key=lambda k: k.cases[0].endswith("backward"))
    if not found:
        why = f"all need another: {', '.join(skipped)}" if skipped else "none by that name"
        raise WeftError(f"kernels of {operator.name} {implementation.name} for {arch}", got=why)
    return found


def able(implementation: Implementation, arch: str) -> int:
    """The target's number; :class:`WeftError` where the implementation has nothing to compile."""
    if implementation.backend in take_apart.COMPILING and implementation.devices != ("cpu",):
        return take_apart.known_target(implementation.backend, arch)
    hint = f"see which kernels ran: weft profile {implementation.operator}"
    raise WeftError(
        f"{implementation.operator} {implementation.name} {NO_KERNEL}",
        expected=f"an implementation in {', '.join(take_apart.COMPILING)} or compile",
        got=implementation.backend,
        hint=f"{hint} --impl {implementation.name}",
    )


def _at(
    operator: Operator,
    implementation: Implementation,
    arch: int,
    case: str | None,
    direction: str | None,
) -> list[Use]:
    directions = [d for d in operator.directions if direction in (None, d)]
    if direction is not None and not directions:
        raise WeftError("--direction", expected=" or ".join(operator.directions), got=direction)
    if case is None:
        uses = [Use(specimen=s, launches={}, cases={}) for s in implementation.specimens]
        cases: Sequence[Case] = sorted(operator.cases, key=lambda c: "bench" not in c.tags)
        return _launched(operator, implementation, arch, cases, directions, uses, strict=False)
    chosen = operator.case(case)
    here = implementation.supports(chosen, "cuda")
    if not here:
        raise WeftError(f"{operator.name} {implementation.name} at {case}", got=here.reason)
    uses = _launched(operator, implementation, arch, [chosen], directions, [], strict=True)
    if not uses:
        raise WeftError(
            f"{operator.name} {implementation.name} launches no kernel of its own at {case}",
            hint="a smaller or empty case is answered by the host; see weft ops",
        )
    return uses


def _launched(
    operator: Operator,
    implementation: Implementation,
    arch: int,
    cases: Sequence[Case],
    directions: Sequence[str],
    uses: list[Use],
    *,
    strict: bool,
) -> list[Use]:
    """``uses`` with the launches that the cases make; ``strict``: with new ones for the others.

    Not strict, a case that the host code cannot take is passed over: it gives no launch.
    """
    known = {identity(u.specimen): u for u in uses}
    labels = {identity(s): s.label for s in implementation.specimens}
    for case in cases:
        for way in directions:
            if way not in implementation.directions or not implementation.supports(case, "cuda"):
                continue
            if way == "backward" and implementation.backward is None:
                continue
            for launch in rehearse(operator, implementation, case, way, arch):
                same = identity(launch.specimen)
                if same not in known and strict:
                    label = labels.get(same, launch.specimen.label)
                    own = replace(launch.specimen, label=label)
                    known[same] = Use(specimen=own, launches={}, cases={})
                if same in known:
                    use = known[same]
                    use.launches.setdefault(launch.kernel, launch)
                    told = use.cases.get(launch.kernel, ())
                    named = f"{case.name} {way}"
                    if named not in told:
                        use.cases[launch.kernel] = (*told, named)
    return list(known.values())


def _compiled(
    operator: Operator, implementation: Implementation, use: Use, arch: int
) -> list[Kernel]:
    try:
        program = take_apart.compile_for(implementation.backend, use.specimen, arch)
    except WeftError:
        raise
    except Exception as error:  # each toolchain raises its own kind
        raise WeftError(
            f"{operator.name} {implementation.name} {use.specimen.label} for sm_{arch}",
            got=f"{type(error).__name__}: {error}",
        ) from error
    found = []
    for code in program.kernels:
        # The compilers mangle what is not extern "C": numba's one kernel goes by its specimen.
        name = code.name if code.name in use.launches else _only(use.launches, program, code.name)
        found.append(
            Kernel(
                operator=operator.name,
                implementation=implementation.name,
                arch=arch,
                program=program,
                code=code,
                counts=Counts(),
                launch=use.launches.get(name),
                cases=use.cases.get(name, ()),
            )
        )
    return found


def _only(launches: dict[str, Launch], program: Any, name: str) -> str:
    """The launch that a mangled name stands for: that of the program's only kernel."""
    return next(iter(launches), name) if len(program.kernels) == 1 else name


def counted(found: Sequence[Kernel]) -> list[Kernel]:
    """With the instructions counted: of all kernels for one target in one go, the same code once.

    nvdisasm takes half a second to start, whatever it is given.
    """
    counts: dict[bytes, Counts] = {}
    for arch in dict.fromkeys(k.arch for k in found):
        texts = list(dict.fromkeys(k.code.text for k in found if k.arch == arch))
        printed = disassemble.sass_of_all(texts, arch)
        for text, said in zip(texts, printed, strict=True):
            counts[text] = count(sass.parse(said).get("", ()))
    return [replace(k, counts=counts[k.code.text]) for k in found]


def listing(kernel: Kernel) -> tuple[sass.Instruction, ...]:
    """A kernel's instructions with the lines of source and PTX that they came of."""
    return _read(kernel.program.cubin).get(kernel.code.name, ())


@lru_cache(maxsize=32)
def _read(cubin: bytes) -> dict[str, tuple[sass.Instruction, ...]]:
    """Every kernel's instructions in a cubin, disassembled once for all that show them."""
    return sass.parse(disassemble.sass(cubin))
