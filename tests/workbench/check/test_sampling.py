"""A sample of the checks keeps what all checks show of each implementation; processes share the checks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import weft.cli.check
from weft.core import FORWARD, Case, Implementation, Operator, registry
from weft.core.record import FAIL, PASS
from weft.workbench.calls.case_kinds import kinds
from weft.workbench.calls.selection import BenchPoint, select
from weft.workbench.check.parallel import CheckTask, check_in_processes
from weft.workbench.check.sampling import Sample, sample
from weft.workbench.durations import CheckCost


def points_of(operator: Operator, device: str) -> list[BenchPoint]:
    def checked(operator: Operator) -> list[Case]:
        return [c for c in operator.cases if {"check", "edge"} & c.tags and device in c.devices]

    return list(select([operator], checked, device=device).points())


def cost(point: BenchPoint, implementation: Implementation) -> CheckCost | None:
    """Return a cost that differs by size and implementation; a backend refuses each case of a layout."""
    if implementation.backend == "numba" and "sliced" in point.case.layouts:
        return None
    own = 0.1 * len(implementation.name) + 1e-6 * max(i.numel for i in point.case.inputs)
    return CheckCost(own, (((point.case.name, point.direction), 0.1),))


def draw(points: list[BenchPoint], budget: float, seed: int) -> Sample:
    return sample(points, cost, budget=budget, seed=seed)


def runs(points: tuple[BenchPoint, ...] | list[BenchPoint]) -> Iterator[tuple[BenchPoint, str]]:
    """Yield each point with the name of each implementation that runs there."""
    yield from ((p, i.name) for p in points for i in p.implementations if cost(p, i))


def shown(point: BenchPoint) -> set[tuple[str, object]]:
    """Return the dtypes, edges and rules of a point, computed without ``sampling.traits``."""
    case, operator = point.case, point.operator
    every: set[tuple[str, object]] = {("dtype", i.dtype) for i in case.inputs}
    every |= {(i.name, kind) for i in case.inputs for kind in (i.layout, i.values)}
    every |= {("kind", kind) for kind in kinds(case, operator)}
    every |= {("tag", tag) for tag in case.tags}
    every |= {(name, str(value)) for name, value in case.params.items()}
    if point.direction == FORWARD:
        every |= {("property", p.name) for p in operator.properties if p.applies(case)}
    return every


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", registry.operator_names())
def test_a_sample_keeps_every_rule_edge_and_dtype_of_each_implementation(name: str, device: str) -> None:
    points = points_of(registry.operator(name), device)

    def by_implementation(these: tuple[BenchPoint, ...] | list[BenchPoint]) -> dict[tuple[str, ...], set]:
        traits: dict[tuple[str, ...], set] = {}
        for point, one in runs(these):
            # Autograd's gradient needs each dtype, and each edge in one of the directions.
            own_backward = registry.implementation(name, one).backward is not None
            edges = (one, point.direction) if own_backward else (one,)
            traits.setdefault(edges, set()).update(shown(point))
            traits.setdefault((one, point.direction, "dtypes"), set()).add(
                tuple(i.dtype for i in point.case.inputs)
            )
        return traits

    for seed in (1, 2):
        few = draw(points, 0.0, seed)
        assert by_implementation(few.points) == by_implementation(points)
        assert few.checks == len(list(runs(few.points))) and few.total == len(list(runs(points)))
        # Points that cannot run here are kept, since the report shows their reason.
        for_reason = [(p.case.name, p.direction, i.name) for p in few.points for i in p.implementations]
        assert all(
            (p.case.name, p.direction, i.name) in for_reason
            for p in points
            for i in p.implementations
            if cost(p, i) is None
        )


def test_a_sample_follows_from_its_seed_and_fills_its_time() -> None:
    points = points_of(registry.operator("gelu"), "cpu")

    def checks(budget: float, seed: int) -> set[tuple[str, str, str]]:
        chosen = draw(points, budget, seed).points
        return {(p.case.name, p.direction, name) for p, name in runs(chosen)}

    everything = {(p.case.name, p.direction, name) for p, name in runs(points)}
    few = checks(0.0, 7)
    assert len(few) < 0.7 * len(everything)
    assert few == checks(0.0, 7) and few != checks(0.0, 8)
    budget = 0.6 * sum(draw(points, 1e9, 7).seconds)
    more, spent = checks(budget, 7), sum(draw(points, budget, 7).seconds)
    assert few < more < everything and 0.8 * budget < spent <= budget * (1 + 1e-9)
    # The random part reaches every check in some run.
    assert set().union(*(checks(budget, seed) for seed in range(20))) == everything
    assert draw(points, 1e9, 7).is_all and draw(points, 1e9, 7).points == tuple(points)


def task(*implementations: str, case: str = "fp32-7x129", seeds: tuple[int, ...] = ()) -> CheckTask:
    return CheckTask(
        operator="gelu", case=case, direction=FORWARD, device="cpu", implementations=implementations,
        seeds=seeds, n_seeds=2,
    )  # fmt: skip


def test_processes_share_the_checks_and_one_that_ends_costs_one_check(capfd: pytest.CaptureFixture) -> None:
    # The process that looks for this name ends with a traceback.
    tasks = [task("eager", "no-such-name", "torch"), task("torch", case="fp32-4099-sweep", seeds=(5,))]
    verdicts = {(v.case, v.implementation): v for v in check_in_processes(tasks, 2)}
    assert {key: v.status for key, v in verdicts.items()} == {
        ("fp32-7x129", "eager"): PASS,
        ("fp32-7x129", "no-such-name"): FAIL,
        ("fp32-7x129", "torch"): PASS,
        ("fp32-4099-sweep", "torch"): PASS,
    }
    failed = verdicts["fp32-7x129", "no-such-name"]
    assert failed.reason == "channel: the process that checked it ended (exit code 1)"
    assert "no-such-name" in capfd.readouterr().err
    assert verdicts["fp32-4099-sweep", "torch"].seeds == (5,)
    assert len(verdicts["fp32-7x129", "eager"].seeds) == 2


IMPLS = ("--impl", "eager", "--impl", "cuda", "--direction", "forward", "--device", "cpu")


def command(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(weft.cli.check.check)
    done = CliRunner().invoke(app, ["dropout", *IMPLS, *arguments])
    assert done.exit_code == 0, done.output
    return done


def test_the_command_says_what_it_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weft.cli.check, "SAMPLE_SECONDS", {"processes": 0.0, "one process": 0.0})
    done = command("--seed", "5")
    line = done.stdout.rstrip().splitlines()[-1]
    match = re.match(r"passed: (\d+) of (\d+) checks of dropout", line)
    sampled = re.search(r"a sample of (\d+) of (\d+) checks \(repeat: --seed 5, all: --all-cases\)", line)
    assert match and sampled and match[1] == match[2] == sampled[1], line
    assert int(sampled[1]) < int(sampled[2])
    assert sampled[0] in done.stderr  # before the first check, too
    assert "not run" in line
    report = json.loads(command("--seed", "5", "--json").stdout)
    assert report["sample"] == {"seed": 5, "checks": int(sampled[1]), "of": int(sampled[2])}
