"""The operators as Markdown, generated from the registry: formula, cases, implementations, refusals."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module

from weft.core import Case, Implementation, Operator, registry
from weft.core.cases import SHORT
from weft.workbench.report.markdown import table
from weft.workbench.report.scales import unit

DEVICES = ("cpu", "cuda")
FOLDER = "../../src/weft/ops"  # as seen from docs/use/


def operators(names: Iterable[str] | None = None) -> str:
    """Return one section for each operator, in the registry's order."""
    return "\n".join(_section(n) for n in (names or registry.operator_names()))


def _section(name: str) -> str:
    op = registry.operator(name)
    package = registry.entry(name).package
    tolerance = op.tolerance
    paragraphs = [
        f"`weft.ops.{op.signature}`: {op.summary.rstrip('.')}. Source: [ops/{package}/]({FOLDER}/{package}).",
        f"    {op.formula}",
        _facts(op),
    ]
    if tolerance.reason:
        terms = (
            f"{tolerance.c:g} times the error of {tolerance.baseline}, plus {tolerance.ulps:g} units in the "
            f"last place and {tolerance.chain:g} of the accumulator's"
        )
        if tolerance.sum_length is not None:
            terms += ", more where a sum is long"
        paragraphs.append(f"Tolerance: {terms}. Reason: {_sentence(tolerance.reason)}")
    if op.scale_reason:
        paragraphs.append(f"Scale of the tolerance: {_sentence(op.scale_reason)}")
    if op.backward_note:
        paragraphs.append(f"Backward: {_sentence(op.backward_note)}")
    body = "\n\n".join(paragraphs)
    return f"## {name}\n\n{body}\n\n{_cases(op)}\n{_implementations(op)}"


def _sentence(text: str) -> str:
    return text if text.endswith(".") else f"{text}."


def _facts(op: Operator) -> str:
    dtypes = ", ".join(SHORT.get(d, d) for d in op.dtypes)
    gradients = ", ".join(f"`{n}`" for n in op.differentiable) or "none"
    text = f"Dtypes: {dtypes}. Gradients: {gradients}."
    if op.properties:
        text += f" Checked properties: {', '.join(p.name for p in op.properties)}."
    return text


def _cases(op: Operator) -> str:
    """Return the timed cases, one per row, and the number of the others."""
    counts = {t: sum(t in c.tags for c in op.cases) for t in ("check", "edge", "bench")}
    rows = []
    for case in op.cases:
        if "bench" not in case.tags:
            continue
        cost = op.cost(case, "forward")
        flops = unit(cost.flops, "FLOP") if cost.flops else ""
        rows.append([f"`{case.name}`", " ".join(case.devices), unit(cost.nbytes, "B"), flops])
    line = f"{counts['check']} check cases, {counts['edge']} edge cases, {counts['bench']} timed cases:\n"
    return f"{line}\n{table(('timed case', 'on', 'bytes to move', 'FLOPs'), rows, '  rr')}"


def _implementations(op: Operator) -> str:
    rows = []
    for name, target in registry.entry(op.name).implementations.items():
        implementation = registry.implementation(op.name, name)
        module = import_module(registry.module_name(op.name, target))
        link = f"[{name}]({FOLDER}/{str(module.__file__).rpartition('/ops/')[2]})"
        rows.append([link, _backward(op, implementation), implementation.idea, _refusals(op, implementation)])
    return table(("implementation", "backward", "idea", "not supported"), rows)


def _backward(op: Operator, implementation: Implementation) -> str:
    if not op.differentiable:
        return ""
    return "own kernel" if implementation.backward is not None else "autograd"


def _refusals(op: Operator, implementation: Implementation) -> str:
    """Return the cases that an implementation refuses on either kind of device, by reason."""
    refused: dict[str, list[tuple[Case, str]]] = {}
    total = 0
    for device in DEVICES:
        for case in op.cases:
            if device in case.devices:
                total += 1
                support = implementation.supports(case, device)
                if not support:
                    refused.setdefault(support.reason, []).append((case, device))
    texts = []
    for reason, refusals in refused.items():
        devices = {device for _, device in refusals}
        where = f"on {devices.pop()}: " if len(devices) == 1 else ""
        texts.append(f"{where}{reason} ({len(refusals)} of {total} cases)")
    return "; ".join(texts)
