"""Compilation of an implementation's kernels, at one case or all of them, and their disassembly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from weft.backends import aot, disassemble
from weft.core import BACKWARD, Case, Implementation, Log, Operator, WeftError, no_log
from weft.workbench.explain.inspect import sass
from weft.workbench.explain.inspect.counts import Counts, count
from weft.workbench.explain.inspect.dry_run import Launch, dry_run, identity
from weft.workbench.explain.inspect.kernel import Kernel
from weft.workbench.explain.inspect.subjects import has_kernels

NO_KERNEL = "has no kernel of its own to disassemble: it calls PyTorch's"


@dataclass(frozen=True, kw_only=True)
class CompileTarget:
    """AOT kernel to compile, with the launch and the cases of each of its kernels by name."""

    aot_kernel: Any
    launches: dict[str, Launch]
    cases: dict[str, tuple[str, ...]]


def compile_kernels(
    operator: Operator,
    implementation: Implementation,
    arch: str,
    *,
    case: str | None = None,
    direction: str | None = None,
    matching: str = "",
    log: Log = no_log,
) -> list[Kernel]:
    """Compile the kernels of an implementation for a target such as ``sm_90``; instructions are not counted.

    With ``case`` these are the kernels that it launches, with the arguments of these launches; otherwise
    all that compile without a GPU. ``matching`` selects kernels and labels that contain this text. Raises
    :class:`WeftError` with the reason if there are none.
    """
    number = target_number(implementation, arch)
    kernels: list[Kernel] = []
    skipped: list[str] = []
    for target in _compile_targets(operator, implementation, number, case, direction):
        if not aot.suits(target.aot_kernel, number):
            skipped.append(f"{target.aot_kernel.label} (needs {aot.needs(target.aot_kernel)})")
            continue
        log(f"{operator.name} {implementation.name} {target.aot_kernel.label} sm_{number}")
        kernels += _compile(operator, implementation, target, number)
    kernels = [k for k in kernels if matching in k.code.name or matching in k.program.label]
    if case or direction:
        kernels = [k for k in kernels if k.launch is not None]
        # The forward's kernels first; the sort keeps the launch order within a direction.
        kernels.sort(key=lambda k: k.cases[0].endswith("backward"))
    if not kernels:
        why = f"all need another: {', '.join(skipped)}" if skipped else "none by that name"
        raise WeftError(f"kernels of {operator.name} {implementation.name} for {arch}", got=why)
    return kernels


def target_number(implementation: Implementation, arch: str) -> int:
    """Return the target's number, 90 for ``sm_90``.

    Raises :class:`WeftError` if the implementation has no kernel to compile.
    """
    if has_kernels(implementation):
        return aot.known_target(implementation.backend, arch)
    hint = f"see which kernels ran: weft profile {implementation.operator}"
    raise WeftError(
        f"{implementation.operator} {implementation.name} {NO_KERNEL}",
        expected=f"an implementation in {', '.join(aot.COMPILING)} or compile",
        got=implementation.backend,
        hint=f"{hint} --impl {implementation.name}",
    )


def _compile_targets(
    operator: Operator,
    implementation: Implementation,
    arch: int,
    case: str | None,
    direction: str | None,
) -> list[CompileTarget]:
    directions = [d for d in operator.directions if direction in (None, d)]
    if direction is not None and not directions:
        raise WeftError("--direction", expected=" or ".join(operator.directions), got=direction)
    if case is None:
        # Without a case all kernels are shown, also those that no case launches.
        targets = [CompileTarget(aot_kernel=k, launches={}, cases={}) for k in implementation.aot_kernels]
        # Bench cases first, since a kernel's launch is that of the first case that launches it.
        cases: Sequence[Case] = sorted(operator.cases, key=lambda c: "bench" not in c.tags)
        return _with_launches(operator, implementation, arch, cases, directions, targets, add_new=False)
    chosen = operator.case(case)
    support = implementation.supports(chosen, "cuda")
    if not support:
        raise WeftError(f"{operator.name} {implementation.name} at {case}", got=support.reason)
    targets = _with_launches(operator, implementation, arch, [chosen], directions, [], add_new=True)
    if not targets:
        raise WeftError(
            f"{operator.name} {implementation.name} launches no kernel of its own at {case}",
            hint="the host answers a smaller or empty case; see weft ops",
        )
    return targets


def _with_launches(
    operator: Operator,
    implementation: Implementation,
    arch: int,
    cases: Sequence[Case],
    directions: Sequence[str],
    targets: list[CompileTarget],
    *,
    add_new: bool,
) -> list[CompileTarget]:
    """Return ``targets`` with the launches of the cases.

    With ``add_new`` a launch of another AOT kernel adds a target for it.
    """
    known = {identity(t.aot_kernel): t for t in targets}
    labels = {identity(k): k.label for k in implementation.aot_kernels}
    for case in cases:
        for direction in directions:
            if direction not in implementation.directions or not implementation.supports(case, "cuda"):
                continue
            # Autograd differentiates the forward, and launches PyTorch's kernels, not ours.
            if direction == BACKWARD and implementation.backward is None:
                continue
            try:
                launches = dry_run(operator, implementation, case, direction, arch)
            except WeftError:
                if add_new:  # somebody asked for this case, and gets the reason
                    raise
                continue  # refused on this architecture, as a window without wgmma: it launches nothing there
            for launch in launches:
                key = identity(launch.aot_kernel)
                if key not in known and add_new:
                    label = labels.get(key, launch.aot_kernel.label)
                    labelled = replace(launch.aot_kernel, label=label)
                    known[key] = CompileTarget(aot_kernel=labelled, launches={}, cases={})
                if key in known:
                    target = known[key]
                    # The first case that launches a kernel gives its grid; later cases only add their names.
                    target.launches.setdefault(launch.kernel, launch)
                    earlier = target.cases.get(launch.kernel, ())
                    point = f"{case.name} {direction}"
                    if point not in earlier:
                        target.cases[launch.kernel] = (*earlier, point)
    return list(known.values())


def _compile(
    operator: Operator, implementation: Implementation, target: CompileTarget, arch: int
) -> list[Kernel]:
    try:
        program = aot.compile_for(implementation.backend, target.aot_kernel, arch)
    except WeftError:
        raise
    except Exception as error:  # each toolchain raises its own kind
        raise WeftError(
            f"{operator.name} {implementation.name} {target.aot_kernel.label} for sm_{arch}",
            got=f"{type(error).__name__}: {error}",
        ) from error
    kernels = []
    for code in program.kernels:
        name = code.name
        # Compilers mangle names that are not extern "C", numba's among them. The launch of a program's
        # only kernel belongs to it under any name.
        if name not in target.launches and len(program.kernels) == 1:
            name = next(iter(target.launches), name)
        kernels.append(
            Kernel(
                operator=operator.name,
                implementation=implementation.name,
                arch=arch,
                program=program,
                code=code,
                counts=Counts(),
                launch=target.launches.get(name),
                cases=target.cases.get(name, ()),
            )
        )
    return kernels


def with_counts(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Return the kernels with their instructions counted.

    nvdisasm takes half a second to start. All kernels of one target are therefore disassembled in one
    call, and equal code once.
    """
    counts: dict[bytes, Counts] = {}
    for arch in dict.fromkeys(k.arch for k in kernels):
        codes = list(dict.fromkeys(k.code.text for k in kernels if k.arch == arch))
        listings = disassemble.sass_of_all(codes, arch)
        for code, listing in zip(codes, listings, strict=True):
            counts[code] = count(sass.parse(listing).get("", ()))
    # Variants of one kernel often compile to equal code, which was disassembled once.
    return [replace(k, counts=counts[k.code.text]) for k in kernels]


def instructions(kernel: Kernel) -> tuple[sass.Instruction, ...]:
    """Return a kernel's instructions with the source and PTX lines that they came from."""
    return _instructions_by_kernel(kernel.program.cubin).get(kernel.code.name, ())


@lru_cache(maxsize=32)
def _instructions_by_kernel(cubin: bytes) -> dict[str, tuple[sass.Instruction, ...]]:
    """Disassemble a cubin once for all its kernels."""
    return sass.parse(disassemble.sass(cubin))
