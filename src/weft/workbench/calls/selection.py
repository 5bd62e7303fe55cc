"""Selection of operators, implementations, cases and directions by name, the same for all commands.

A name such as ``cuda`` selects the implementation and the steps of its ladder (``cuda/01-naive``), and
``cuda/invariant`` its batch-invariant variant. A name that none of the chosen operators has is
an error that lists the nearest names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from weft.core import Case, Implementation, Operator, registry
from weft.core.implementation import without_suffix
from weft.core.operator import DIRECTIONS, unknown_name


@dataclass(frozen=True, kw_only=True)
class BenchPoint:
    """Operator, case, direction and device at which implementations are checked or timed.

    ``baseline`` sets the tolerance of an operator that is not in the registry; None otherwise.
    """

    operator: Operator
    case: Case
    direction: str
    device: str
    baseline: Implementation | None
    implementations: tuple[Implementation, ...]

    @property
    def title(self) -> str:
        return f"{self.operator.name} {self.case.name} {self.direction}"


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Chosen operators with the implementations, cases and directions of each, by operator name.

    An operator without a chosen implementation has no points.
    """

    operators: tuple[Operator, ...]
    implementations: Mapping[str, tuple[Implementation, ...]]
    cases: Mapping[str, tuple[Case, ...]]
    directions: tuple[str, ...]  # empty: all that the operator has
    device: str

    def points(
        self, baselines: Mapping[str, Implementation] | None = None, *, skip_views: bool = False
    ) -> Iterator[BenchPoint]:
        """Yield the points; ``baselines`` set the tolerance of operators outside the registry.

        With ``skip_views`` a direction that moves no bytes is left out unless it is named: a
        gradient that is a view (sum's) has nothing to time.
        """
        for operator in self.operators:
            implementations = self.implementations[operator.name]
            baseline = _baseline(operator, implementations, baselines or {})
            for case in self.cases[operator.name] if implementations else ():
                for direction in operator.directions:
                    if self.directions and direction not in self.directions:
                        continue
                    if skip_views and not self.directions and not operator.cost(case, direction).written:
                        continue
                    yield BenchPoint(
                        operator=operator,
                        case=case,
                        direction=direction,
                        device=self.device,
                        baseline=baseline,
                        implementations=implementations,
                    )


def select(
    operators: Sequence[Operator],
    default_cases: Callable[[Operator], Sequence[Case]],
    *,
    device: str,
    impls: Sequence[str] = (),
    cases: Sequence[str] = (),
    directions: Sequence[str] = (),
    external: Sequence[Implementation] = (),
    always_external: bool = False,
) -> Selection:
    """Select by names; raises :class:`WeftError` for a name that no chosen operator has.

    Without ``impls`` the ``external`` implementations are selected where there are any, else all.
    With ``impls`` the named ones are, and with ``always_external`` the external ones too. Without
    ``cases`` each operator has its ``default_cases``.
    """
    for direction in directions:
        if direction not in DIRECTIONS:
            raise unknown_name("direction", direction, list(DIRECTIONS))
    known = {o.name: known_implementations(o, external) for o in operators}
    of_operator = f" of {operators[0].name}" if len(operators) == 1 else ""
    for name in impls:
        if not any(with_steps(name, by_name) for by_name in known.values()):
            names = list(dict.fromkeys(n for by_name in known.values() for n in by_name))
            raise unknown_name(f"implementation{of_operator}", name, names)
    case_names = [c.name for o in operators for c in o.cases]
    for name in cases:
        if name not in case_names:
            listed_by = f"weft ops {operators[0].name}" if len(operators) == 1 else "weft ops NAME"
            raise unknown_name(
                f"case{of_operator}", name, list(dict.fromkeys(case_names)), listed_by=listed_by
            )
    chosen: dict[str, tuple[Implementation, ...]] = {}
    for operator in operators:
        own = [i for i in external if i.operator == operator.name]
        named = [i for name in impls for i in with_steps(name, known[operator.name])]
        if not impls:
            # A user who brings a file asks about that file; Weft's own implementations are added by name.
            named = own if external else list(known[operator.name].values())
        elif always_external:
            named = own + named
        # `cuda` also selects `cuda/01-naive`: an implementation that was named twice counts once.
        chosen[operator.name] = tuple({i.name: i for i in named}.values())
    return Selection(
        operators=tuple(operators),
        implementations=chosen,
        cases={
            o.name: tuple([c for c in o.cases if c.name in cases] if cases else default_cases(o))
            for o in operators
        },
        directions=tuple(directions),
        device=device,
    )


def select_points(
    operators: Sequence[str | Operator] | None,
    impls: Sequence[str | Implementation] | None,
    cases: Sequence[str] | None,
    directions: Sequence[str] | None,
    device: str,
    all_cases: bool,
    baselines: Mapping[str, Implementation] | None = None,
) -> Iterator[BenchPoint]:
    """Yield the points of a bench: each operator's first bench case, or all of them.

    Objects among ``impls`` are external implementations and always selected.
    """
    chosen = [
        registry.operator(o) if isinstance(o, str) else o for o in (operators or registry.operator_names())
    ]

    def default_cases(operator: Operator) -> Sequence[Case]:
        # Cases name the devices that their size suits, so the first differs between a CPU and a GPU.
        bench_cases = operator.select("bench", device)
        return bench_cases if all_cases else bench_cases[:1]

    selection = select(
        chosen,
        default_cases,
        device=device,
        impls=[i for i in impls or () if isinstance(i, str)],
        cases=cases or (),
        directions=directions or (),
        external=[i for i in impls or () if isinstance(i, Implementation)],
        always_external=True,
    )
    return selection.points(baselines, skip_views=True)


def is_builtin(operator: Operator) -> bool:
    """Return True for the registry's own operator, and False for another one of the same name."""
    known = operator.name in registry.operator_names()
    # A user's file may define an operator under a name of the registry: only the object tells them apart.
    return known and registry.operator(operator.name) is operator


def known_implementations(
    operator: Operator, external: Sequence[Implementation] = ()
) -> dict[str, Implementation]:
    """Return an operator's implementations by name: Weft's own, then the external ones."""
    builtin = registry.implementations(operator.name) if is_builtin(operator) else []
    return {i.name: i for i in (*builtin, *(e for e in external if e.operator == operator.name))}


def with_steps(name: str, known: Mapping[str, Implementation]) -> list[Implementation]:
    """Return the implementation of this name and the steps of its ladder; empty if there is none.

    A batch-invariant variant is found by its own name only.
    """
    base = without_suffix(name)
    if base != name and base in known:
        variant = known[base].invariant
        return [variant] if variant else []
    return [i for key, i in known.items() if key == name or key.startswith(name + "/")]


def with_variants(point: BenchPoint) -> BenchPoint:
    """Return the point with the batch-invariant variant of each implementation right after it.

    Implementations without one stay as they are.
    """
    both = [v for i in point.implementations for v in (i, i.invariant) if v is not None]
    return replace(point, implementations=tuple({i.name: i for i in both}.values()))


def _baseline(
    operator: Operator, chosen: Sequence[Implementation], baselines: Mapping[str, Implementation]
) -> Implementation | None:
    """Return the implementation whose error sets the tolerance, if it is among those at hand."""
    name = operator.tolerance.baseline
    return baselines.get(operator.name) or next((i for i in chosen if i.name == name), None)
