"""Points: where implementations are measured side by side, and how a call names them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from weft.core import Case, Implementation, Operator, registry
from weft.core.operator import DIRECTIONS, unknown_name


@dataclass(frozen=True, kw_only=True)
class Point:
    """Where implementations are measured side by side: one operator, case, direction, device."""

    operator: Operator
    case: Case
    direction: str
    device: str
    baseline: Implementation | None
    implementations: tuple[Implementation, ...]

    @property
    def title(self) -> str:
        return f"{self.operator.name} {self.case.name} {self.direction}"


def select(
    operators: Sequence[str | Operator] | None,
    impls: Sequence[str | Implementation] | None,
    cases: Sequence[str] | None,
    directions: Sequence[str] | None,
    device: str,
    all_cases: bool,
    baselines: Mapping[str, Implementation] | None = None,
) -> Iterator[Point]:
    """The points that a call asks for; raises :class:`WeftError` where a name is not known.

    ``baselines`` are what sets the tolerance of operators that are not in the registry, by name.
    """
    for direction in directions or ():
        if direction not in DIRECTIONS:
            raise unknown_name("direction", direction, list(DIRECTIONS))
    chosen = [
        registry.operator(o) if isinstance(o, str) else o
        for o in (operators or registry.operator_names())
    ]
    unseen = set(cases or ())
    for operator in chosen:
        found = _implementations(operator, impls, alone=len(chosen) == 1)
        if not found:
            continue
        picked = _cases(operator, cases, device, all_cases, alone=len(chosen) == 1)
        unseen -= {c.name for c in picked}
        for case in picked:
            for direction in operator.directions:
                # A gradient that is a view (sum's) moves nothing: there is nothing to time.
                idle = not operator.cost(case, direction).written
                if direction in directions if directions else not idle:
                    yield Point(
                        operator=operator,
                        case=case,
                        direction=direction,
                        device=device,
                        baseline=_baseline(operator, found, baselines or {}),
                        implementations=tuple(found),
                    )
    if unseen:
        names = [c.name for o in chosen for c in o.cases]
        raise unknown_name("case", sorted(unseen)[0], names)


def _cases(
    operator: Operator, names: Sequence[str] | None, device: str, every: bool, alone: bool
) -> list[Case]:
    if names:
        if alone:
            return [operator.case(n) for n in names]
        return [c for c in operator.cases if c.name in names]
    bench = list(operator.select("bench", device))
    return bench if every else bench[:1]


def _implementations(
    operator: Operator, impls: Sequence[str | Implementation] | None, alone: bool
) -> list[Implementation]:
    """The implementations asked for; a name like ``cuda`` brings its ladder's steps too."""
    known = registry.implementation_names(operator.name) if is_ours(operator) else []
    if impls is None:
        return [registry.implementation(operator.name, n) for n in known]
    objects = [i for i in impls if isinstance(i, Implementation) and i.operator == operator.name]
    wanted = [i for i in impls if isinstance(i, str)]
    if not wanted:
        return objects
    names: list[str] = []
    for name in wanted:
        near = [k for k in known if k == name or k.startswith(name + "/")]
        if not near and alone:
            raise unknown_name(f"implementation of {operator.name}", name, known)
        names += [n for n in near if n not in names]
    return objects + [registry.implementation(operator.name, n) for n in names]


def is_ours(operator: Operator) -> bool:
    """Whether this operator is the registry's own, and not a stranger's by the same name."""
    known = operator.name in registry.operator_names()
    return known and registry.operator(operator.name) is operator


def _baseline(
    operator: Operator, found: Sequence[Implementation], given: Mapping[str, Implementation]
) -> Implementation | None:
    """The implementation whose error sets the tolerance, where it was brought along; else None,
    and the registry has it."""
    name = operator.tolerance.baseline
    return given.get(operator.name) or next((i for i in found if i.name == name), None)
