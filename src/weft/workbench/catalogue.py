"""The operators as Markdown, from the registry: formula, cases, implementations, refusals."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module

from weft.core import Case, Implementation, Operator, registry
from weft.core.cases import SHORT
from weft.workbench.figures import table
from weft.workbench.report.scales import unit

DEVICES = ("cpu", "cuda")
FOLDER = "../src/weft/ops"  # as seen from docs/


def operators(names: Iterable[str] | None = None) -> str:
    """One section an operator, in the registry's order."""
    return "\n".join(_section(n) for n in (names or registry.operator_names()))


def _section(name: str) -> str:
    op = registry.operator(name)
    tolerance = op.tolerance
    facts = [
        f"`weft.ops.{op.signature}`: {op.summary.rstrip('.')}. Everything about it stands in "
        f"[ops/{name}/]({FOLDER}/{name}).",
        f"    {op.formula}",
        _facts(op),
    ]
    if tolerance.reason:
        facts.append(
            f"Tolerance: {tolerance.c:g} times the error of {tolerance.baseline}, plus "
            f"{tolerance.ulps:g} units in the last place and {tolerance.chain:g} of the "
            f"accumulator's. {tolerance.reason}"
        )
    if op.scale_reason:
        facts.append(f"Scale of the tolerance: {op.scale_reason}")
    if op.backward_note:
        facts.append(f"Backward: {op.backward_note}")
    body = "\n\n".join(facts)
    return f"## {name}\n\n{body}\n\n{_cases(op)}\n{_implementations(op)}"


def _facts(op: Operator) -> str:
    dtypes = ", ".join(SHORT.get(d, d) for d in op.dtypes)
    gradients = ", ".join(f"`{n}`" for n in op.differentiable) or "none"
    told = f"Dtypes: {dtypes}. Gradients: {gradients}."
    if op.properties:
        told += f" Must hold besides: {', '.join(p.name for p in op.properties)}."
    return told


def _cases(op: Operator) -> str:
    """The cases that are timed, one a line; of those only checked, how many."""
    counts = {t: sum(t in c.tags for c in op.cases) for t in ("check", "edge", "bench")}
    rows = []
    for case in op.cases:
        if "bench" not in case.tags:
            continue
        cost = op.cost(case, "forward")
        flops = unit(cost.flops, "FLOP") if cost.flops else ""
        rows.append([f"`{case.name}`", " ".join(case.devices), unit(cost.nbytes, "B"), flops])
    told = (
        f"{counts['check']} cases to check, {counts['edge']} edge cases, {counts['bench']} timed:\n"
    )
    return f"{told}\n{table(('timed case', 'on', 'bytes to move', 'FLOPs'), rows, '  rr')}"


def _implementations(op: Operator) -> str:
    rows = []
    for name, target in registry.REGISTRY[op.name].items():
        found = registry.implementation(op.name, name)
        module = import_module(f"weft.ops.{op.name}.{target.partition(':')[0]}")
        inside = str(module.__file__).rpartition(f"/ops/{op.name}/")[2]
        link = f"[{name}]({FOLDER}/{op.name}/{inside})"
        rows.append([link, found.backend, _backward(op, found), found.idea, _refuses(op, found)])
    head = ("implementation", "backend", "backward", "idea", "takes")
    return table(head, rows)


def _backward(op: Operator, found: Implementation) -> str:
    if not op.differentiable:
        return ""
    return "its own" if found.backward is not None else "autograd"


def _refuses(op: Operator, found: Implementation) -> str:
    """What it takes by its own word, every case being asked on both kinds of device."""
    refused: dict[str, list[tuple[Case, str]]] = {}
    asked = 0
    for device in DEVICES:
        for case in op.cases:
            if device in case.devices:
                asked += 1
                answer = found.supports(case, device)
                if not answer:
                    refused.setdefault(answer.reason, []).append((case, device))
    if not refused:
        return "every case"
    told = []
    for reason, where in refused.items():
        on = {device for _, device in where}
        place = f"on {on.pop()}: " if len(on) == 1 else ""
        told.append(f"{place}{reason} ({len(where)} of {asked} cases)")
    return "refuses " + "; ".join(told)
