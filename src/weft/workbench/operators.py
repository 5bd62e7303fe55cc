"""Operators as data: what runs on this machine and, for one operator, everything that is known about it."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from weft import machine
from weft.backends import missing_package, support
from weft.core import Implementation, Operator, registry
from weft.core.implementation import BACKENDS
from weft.core.json_files import read_json
from weft.workbench.report import markdown
from weft.workbench.report.device_records import Row

PACKAGE = Path(__file__).resolve().parents[1]
RESULTS = PACKAGE.parents[1] / "results"  # in a checkout
# States of an implementation on this machine, the best first.
RUNS, CHECKED, NEEDS_GPU, REFUSED = "runs", "check", "GPU", "no"
STATES = (RUNS, CHECKED, NEEDS_GPU, REFUSED)
OTHER = "other"  # family of the operators that have a package of their own


def family(operator_name: str) -> str:
    """Return the family of an operator: the package that it shares with others, or ``other``."""
    package = registry.entry(operator_name).package
    members = [e for e in registry.REGISTRY.values() if e.package == package]
    return package if len(members) > 1 else OTHER


def by_family() -> list[str]:
    """Return all operators, those of a family together, in the registry's order; single ones last."""
    names = registry.operator_names()
    order = list(dict.fromkeys(map(family, names)))
    return sorted(names, key=lambda n: (family(n) == OTHER, order.index(family(n))))


def summary(operator_name: str, device: str) -> dict[str, Any]:
    """Return an operator with the state of each implementation on ``device`` ('cpu' or 'cuda')."""
    operator = registry.operator(operator_name)
    implementations = registry.implementations(operator_name)
    return {
        "operator": operator_name,
        "summary": operator.summary,
        "family": family(operator_name),
        "implementations": [_implementation(operator, i, device) for i in implementations],
    }


def _implementation(operator: Operator, implementation: Implementation, device: str) -> dict[str, Any]:
    """Describe an implementation. It is supported if one check case is; else the first reason is given."""
    answers = [support(implementation, c, device) for c in operator.select("check", device)]
    best = next((a for a in answers if a), answers[0] if answers else None)
    if best:
        state = RUNS if best.timed else CHECKED
    else:
        state = NEEDS_GPU if _runs_on_a_gpu(operator, implementation) else REFUSED
    backward = "own kernel" if implementation.backward is not None else "autograd"
    return {
        "name": implementation.name,
        "backend": implementation.backend,
        "supported": bool(best),
        "reason": best.reason if best is not None else f"no check case for {device}",
        "idea": implementation.idea,
        "state": state,
        "step": implementation.is_step,
        "backward": backward if operator.differentiable and "backward" in implementation.directions else None,
    }


def _runs_on_a_gpu(operator: Operator, implementation: Implementation) -> bool:
    """Return whether a GPU is all that this machine lacks to run an implementation."""
    if machine.has_gpu() or missing_package(implementation.backend) or "cuda" not in implementation.devices:
        return False
    return any(implementation.supports(c, "cuda") for c in operator.select("check", "cuda"))


def backend_states(implementations: list[dict[str, Any]]) -> dict[str, str]:
    """Return the best state among each backend's implementations, for the backends that have any."""
    states: dict[str, str] = {}
    for backend in BACKENDS:
        own = [i["state"] for i in implementations if i["backend"] == backend]
        if own:
            states[backend] = min(own, key=STATES.index)
    return states


def detail(operator_name: str, device: str) -> dict[str, Any]:
    """Return the summary of an operator with its contract, cases, best records and files."""
    operator = registry.operator(operator_name)
    tolerance = operator.tolerance
    return {
        **summary(operator_name, device),
        "signature": f"weft.ops.{operator.signature}",
        "formula": operator.formula,
        "dtypes": list(operator.dtypes),
        "gradients": list(operator.differentiable),
        "properties": [p.name for p in operator.properties],
        "tolerance": {
            "baseline": tolerance.baseline,
            "factor": tolerance.c,
            "ulps": tolerance.ulps,
            "accumulator_ulps": tolerance.chain,
            "grows_with_length": tolerance.sum_length is not None,
            "reason": tolerance.reason,
            "scale": operator.scale_reason,
        },
        "backward": operator.backward_note,
        "cases": [
            {"name": c.name, "tags": sorted(c.tags), "devices": list(c.devices)} for c in operator.cases
        ],
        "records": records(operator_name),
        "files": [str(f) for f in files(operator_name)],
    }


def records(operator_name: str, results: Path = RESULTS) -> list[dict[str, Any]]:
    """Return the fastest recorded implementation for each device, case and direction.

    The records of a checkout are read; without one, the dispatch tables in the package, which were built
    from the same records and have no share of the limit.
    """
    if not results.is_dir():
        return _shipped(operator_name)
    entries = []
    for device in markdown.devices(results, operator_name):
        for (_, case, direction), rows in device.records.points.items():
            fastest = markdown.best(rows)
            if fastest is not None and fastest.cold:
                entries.append(_record(device.records.name, case, direction, fastest, rows))
    return entries


def _record(device: str, case: str, direction: str, fastest: Row, rows: list[Row]) -> dict[str, Any]:
    return {
        "device": device,
        "case": case,
        "direction": direction,
        "implementation": fastest.implementation,
        "us": fastest.cold,
        "of_limit": fastest.efficiency,
        "doubt": fastest.doubt,
        "torch_us": next((r.cold for r in rows if r.implementation == "torch"), None),
    }


def _shipped(operator_name: str) -> list[dict[str, Any]]:
    """Return the fastest implementation at each point of the dispatch tables in the package."""

    from weft.dispatch import choice

    entries = []
    for path in sorted(choice.SHIPPED.glob("*.json")):
        table = read_json(path)
        for point in table["points"]:
            for direction in ("forward", "backward"):
                # 0: the result is a view, so that nothing is timed.
                times = {name: cold for name, (cold, _) in point[direction].items() if cold}
                if point["operator"] == operator_name and times:
                    name = min(times, key=lambda n: times[n])
                    entry = {"device": table["device"], "case": point["case"], "direction": direction}
                    entry |= {"implementation": name, "us": times[name], "of_limit": None, "doubt": ""}
                    entries.append({**entry, "torch_us": times.get("torch")})
    return entries


def files(operator_name: str) -> list[Path]:
    """Return the files of an operator: README, contract, modules of its implementations, kernels."""
    entry = registry.entry(operator_name)
    folder = PACKAGE / "ops" / entry.package
    modules = {registry.module_name(operator_name, t) for t in (entry.spec, *entry.implementations.values())}
    sources = {Path(str(import_module(m).__file__)) for m in modules}
    kernels = {f for f in folder.rglob("*.cu") if family(operator_name) == OTHER or _serves(f, operator_name)}
    return sorted(sources | kernels | {folder / "README.md", folder / "__init__.py"})


def _serves(kernel: Path, operator_name: str) -> bool:
    """Return whether a kernel of a family belongs to this member: it has its name, or no member's."""
    package = registry.entry(operator_name).package
    members = [n for n, e in registry.REGISTRY.items() if e.package == package]
    named = [n for n in members if kernel.stem == n or kernel.stem.startswith(f"{n}_")]
    return not named or operator_name in named
