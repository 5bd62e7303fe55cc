"""Each wrong kernel that can run here is refused by the check that should, and by no accident."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache, partial

import pytest
import torch

from helpers.alone import is_large, only_large_case
from helpers.interpreting import asked_twice
from weft import backends
from weft.core import BACKWARD, Case, Implementation, Operator, Verdict, WeftError, registry
from weft.core.record import FAIL, PASS, UNSUPPORTED
from weft.workbench.calls.case_kinds import KINDS, kinds
from weft.workbench.check.check import check
from weft.workbench.check.oracle import Oracle
from weft.workbench.selftest.mutants import catalogue, find
from weft.workbench.selftest.mutants.mutant import Mutant
from weft.workbench.sources.source import Source, load

OPERATORS = ("softmax", "gelu", "sum", "matmul")
ROWS = [f"W{i:02}" for i in range(1, 25)]
# Rows that an operator cannot be wrong by, with the reason.
MAKES_NO_SENSE = {
    ("W09", "gelu"): "takes no maximum",
    ("W09", "sum"): "takes no exponential",
    ("W09", "matmul"): "takes no exponential",
    ("W11", "gelu"): "keeps no statistic of its inputs",
    ("W13", "softmax"): "takes no tanh",
    ("W13", "sum"): "takes no tanh",
    ("W13", "matmul"): "takes no tanh",
}
OF_NAN = ("W12", "W16")  # rows whose fault shows where the answer is a NaN
# Where a fault shows that few cases show: these come first.
SHOWS_AT = {
    "W03/sum/eager/one-element": "fp32-scalar",
    "W04/sum/eager/bench-alone": "fp32-1048576",
    "W08/sum/eager/running": "bf16-30011",
    "W24/sum/eager/nan-part": "fp32-1031",
    "W10/gelu/eager/above-the-ramp": "fp32-4099-sweep",
    "W20/gelu/eager/in-place": "fp32-4099-sweep",
    "W10/matmul/eager/leaning": "fp16-67x129x97",
    "W03/matmul/eager/a-factor": "fp32-128x256x192",
}
WRONG = [m for m in catalogue() if m.row in ROWS]
HERE = [m for m in WRONG if "cpu" in m.devices]
EAGER = [m for m in HERE if m.backend == "eager"]
INTERPRETED = [m for m in HERE if m.backend in ("triton", "numba")]
UNIQUE = [m for m in EAGER if m.only]
SEEDS = (11, 222, 3333)
# Checks without which nothing here survives, with the reason.
NEVER_ALONE = {
    "returns": "a call that raised returned nothing, which is no tensor",
    "device": "numbers on another device cannot be compared at all",
}


@cache
def oracle(operator: str, case: str, direction: str, device: str, seeds: int) -> Oracle:
    spec = registry.operator(operator)
    return Oracle(spec, spec.case(case), direction, device, SEEDS[:seeds])


def cases(mutant: Mutant, device: str = "cpu") -> list[Case]:
    """All, those that show its fault first, then plain before hard ones, small before large."""
    operator = registry.operator(mutant.operator)
    all_cases = operator.select("check", device) + operator.select("edge", device)

    def worth(case: Case) -> tuple[bool, int, bool, int]:
        size, kind = max(i.numel for i in case.inputs), kinds(case, operator)
        special = any(i.values == "special" for i in case.inputs)
        shows = special if mutant.row in OF_NAN else mutant.only in kind
        shows = shows or SHOWS_AT.get(mutant.id) == case.name
        return not shows, len(kind - {"sizes"}), not 16 <= size <= 5000, size

    return sorted(all_cases, key=worth)


def verdicts(mutant: Mutant, left: list[Case], without: str = "", device: str = "cpu") -> Iterator[Verdict]:
    """At each case and direction; the kernel is made anew for each."""
    operator = registry.operator(mutant.operator)
    directions = operator.directions[::-1] if mutant.only == BACKWARD else operator.directions
    for case in left:
        for direction in directions:
            if without in kinds(case, operator) or without == direction:
                continue
            mutated, seeds = mutant.make(), 1 if without == "seeds" else 3
            if not backends.support(mutated, case, device, direction):
                continue
            shared = oracle(operator.name, case.name, direction, device, seeds)
            rules = (without,) if without and without not in KINDS else ()
            yield check(operator, mutated, case, direction, device, oracle=shared, without=rules)


def refused_by(mutant: Mutant, left: list[Case], without: str = "") -> tuple[str, str]:
    """The check that fails first, and its reason; blanks where all pass."""
    judged = 0
    for verdict in verdicts(mutant, left, without):
        judged += verdict.status != UNSUPPORTED
        if verdict.status == FAIL:
            return verdict.reason.split(":")[0], f"{verdict.case}: {verdict.reason}"
    assert judged, f"{mutant.id} was judged nowhere"
    return "", ""


@pytest.mark.sampled(2, each=lambda mutant: mutant.row)
@pytest.mark.parametrize("mutant", EAGER, ids=lambda m: m.id)
def test_a_mutant_is_refused_by_the_named_check(mutant: Mutant) -> None:
    rule, reason = refused_by(mutant, cases(mutant))
    assert rule in mutant.killed_by, reason


@pytest.mark.parametrize("mutant", INTERPRETED, ids=lambda m: m.id)
@pytest.mark.sampled(4, each=lambda mutant: mutant.backend)
@pytest.mark.slow
def test_an_interpreted_mutant_is_refused(mutant: Mutant) -> None:
    rule, reason = refused_by(mutant, cases(mutant))
    assert rule in mutant.killed_by, reason


@pytest.mark.sampled(1, each=lambda mutant: mutant.only)
@pytest.mark.parametrize("mutant", UNIQUE, ids=lambda m: m.id)
def test_without_its_check_a_mutant_survives_the_case_that_killed_it(mutant: Mutant) -> None:
    killed = next(v for v in verdicts(mutant, cases(mutant)) if v.status == FAIL)
    operator = registry.operator(mutant.operator)
    left = [operator.case(killed.case)]
    if mutant.only in (*KINDS, BACKWARD):
        left = [c for c in cases(mutant) if mutant.only not in kinds(c, operator)][:3]
    assert refused_by(mutant, left, mutant.only) == ("", "")


@pytest.mark.parametrize("mutant", [m for m in HERE if m.only], ids=lambda m: m.id)
@pytest.mark.exhaustive
def test_without_its_check_a_mutant_survives_all_cases(mutant: Mutant) -> None:
    assert refused_by(mutant, cases(mutant), mutant.only) == ("", "")


def test_every_row_is_planted_in_every_operator_or_gives_a_reason() -> None:
    planted = {(m.row, m.operator) for m in WRONG}
    missing = {(r, o) for r in ROWS for o in OPERATORS} - planted
    assert missing == set(MAKES_NO_SENSE)


def test_every_check_kills_a_mutant_that_survives_without_it() -> None:
    """Each rule and each kind of cases has a mutant that it alone kills, or cannot have one."""
    from weft.workbench.check.check import ACROSS
    from weft.workbench.check.rules import RULES

    alone = {m.only for m in catalogue()}  # what is replaced is a cheat's doing
    due = {*RULES, *ACROSS, "kept", *KINDS, "seeds", BACKWARD} - set(NEVER_ALONE)
    assert due <= alone, f"nothing shows what these are for: {sorted(due - alone)}"


@pytest.mark.sampled(2, each=lambda backend, operator: backend)
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("backend", ["triton", "numba"])
def test_the_same_kernel_without_its_fault_passes(operator: str, backend: str) -> None:
    most = 2500 if backend == "triton" else 150
    for verdict in faultless(backend, operator, "cpu", most):
        assert verdict.status == PASS, f"{verdict.case}: {verdict.reason}"


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("backend", ["triton", "numba", "cuda"])
@pytest.mark.gpu
def test_the_same_kernel_without_its_fault_passes_on_a_gpu(operator: str, backend: str) -> None:
    for verdict in faultless(backend, operator, "cuda", 1 << 25):
        assert verdict.status in (PASS, UNSUPPORTED), f"{verdict.case}: {verdict.reason}"


def faultless(backend: str, operator: str, device: str, most: int) -> Iterator[Verdict]:
    """A flawed kernel with no fault chosen, at the cases that are no larger than ``most``."""
    like = next(m for m in WRONG if (m.operator, m.backend) == (operator, backend))
    forward = like.make().forward
    assert isinstance(forward, partial)
    nothing = 0 if backend == "numba" else ""
    right = Implementation(
        operator=operator,
        name="right",
        backend=backend,
        forward=partial(forward.func, nothing, {}),
        supports=like.make().supports,
        directions=("forward",),
    )
    spec: Operator = registry.operator(operator)
    some: dict[object, Case] = {}
    for case in spec.select("check", device) + spec.select("edge", device):
        small = max(i.numel for i in case.inputs) <= most
        if small and backends.support(right, case, device):
            some.setdefault((case.dtype, kinds(case, spec)) if device == "cpu" else case, case)
    assert some
    for case in some.values():
        large = device == "cuda" and is_large(spec, case)
        with only_large_case() if large else nullcontext(), asked_twice(device == "cpu"):
            shared = oracle(operator, case.name, "forward", device, 1)
            verdict = check(spec, right, case, "forward", device, oracle=shared)
            if large:
                del shared
                oracle.cache_clear()
                torch.cuda.empty_cache()
        yield verdict


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_cuda_kernels_compile(operator: str) -> None:
    from weft.workbench.selftest.mutants.cuda_kernels import source

    assert source(operator, torch.float32).compile("sm_90")


COMPILED = """
import weft
from weft.backends import numba_jit, triton_jit
from weft.workbench.selftest.mutants import numba_kernels, triton_kernels
for operator in ("softmax", "gelu", "sum", "matmul"):
    kernel = triton_kernels.aot_kernel(operator, "W17/int32")
    assert triton_jit.compile_aot_kernel(kernel, 90).asm["ptx"], operator
    assert numba_jit.compile_aot_kernel(numba_kernels.aot_kernel(operator), 90), operator
assert triton_jit.compile_aot_kernel(triton_kernels.aot_kernel("sum", "W14/one-cell"), 90).asm["ptx"]
"""


@pytest.mark.slow
def test_kernels_for_a_gpu_only_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own: this one interprets and simulates where there is no GPU."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "0")
    done = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_source_loads_a_mutant_by_its_id() -> None:
    (mutated,) = load(Source(kind="mutant", path="W02/softmax/eager/zeros")).implementations
    assert (mutated.operator, mutated.name) == ("softmax", "W02/softmax/eager/zeros")
    with pytest.raises(WeftError, match="W02/softmax/eager/zeros"):
        find("W02/softmax/eager/zeroes")


def test_the_kinds_of_a_case() -> None:
    softmax, gelu = registry.operator("softmax"), registry.operator("gelu")
    matmul = registry.operator("matmul")
    assert kinds(softmax.case("fp32-3x32"), softmax) == set()
    assert kinds(softmax.case("fp32-3x129"), softmax) == {"sizes"}
    assert kinds(gelu.case("fp32-scalar"), gelu) == {"empties"}
    assert kinds(gelu.case("fp32-33x65-sliced"), gelu) == {"sizes", "strides"}
    assert kinds(gelu.case("fp32-3x1000-large"), gelu) == {"values"}
    assert kinds(matmul.case("bf16-65536x40000x16"), matmul) == {"huge"}


@pytest.mark.parametrize(
    "change",
    [{"id": "W02/softmax/zeros"}, {"operator": "gelu"}, {"killed_by": ()}, {"devices": ("cuda",)}],
)
def test_an_incomplete_mutant_is_refused(change: dict[str, object]) -> None:
    good = find("W02/softmax/eager/zeros")
    with pytest.raises(ValueError, match="zeros"):
        Mutant(**{**{f: getattr(good, f) for f in Mutant.__dataclass_fields__}, **change})  # type: ignore[arg-type]
