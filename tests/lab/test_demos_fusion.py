"""Demonstrations of fusion: predicted bytes agree with what torch dispatches, and outputs are verified."""

from __future__ import annotations

import doctest
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from weft import machine
from weft.core import FORWARD, WeftError, case, no_log, registry
from weft.core.cases import Input
from weft.lab import demos
from weft.lab.demos import chain, fused_chain, fused_gelu, fusion, report, run, traffic
from weft.lab.demos.chain import COLUMNS, COMPILED, EAGER, FUSED, ROWS, Chain
from weft.lab.demos.demo import BAD, GOOD, Measurement
from weft.workbench.explain.ncu import find

CHAINS = {"fused-gelu": fused_gelu.CHAIN, "fused-chain": fused_chain.CHAIN}
SMALL = 64  # rows


class DispatchedBytes(TorchDispatchMode):
    """Sum of the bytes of all tensors that the operators below autograd read and write, views apart."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        if not func.is_view:
            tensors = [*args, *(outputs if isinstance(outputs, tuple) else [outputs])]
            self.total += sum(t.numel() * t.itemsize for t in tensors if isinstance(t, torch.Tensor))
        return outputs


def drawn_on_cpu(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", CHAINS)
def test_eager_s_prediction_is_what_torch_dispatches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # On a GPU functional.dropout is this one operator; elsewhere it is several.
    monkeypatch.setattr(functional, "dropout", lambda x, p, training: torch.native_dropout(x, p, training)[0])
    inputs = traffic.make_inputs(CHAINS[name], SMALL, drawn_on_cpu)
    with DispatchedBytes() as dispatched:
        CHAINS[name].calls(EAGER)(*inputs)
    assert dispatched.total == CHAINS[name].nbytes(EAGER, SMALL)


def tensor(name: str, *shape: int) -> Input:
    return Input(name=name, shape=shape, dtype="float32")


def test_weft_s_prediction_is_the_cost_of_its_operators() -> None:
    rows, residual = (tensor(name, ROWS, COLUMNS) for name in ("x", "residual"))
    bias, weight = (tensor(name, COLUMNS) for name in ("bias", "weight"))
    gelu = registry.operator("gelu").cost(case(rows), FORWARD).nbytes
    bias_gelu = registry.operator("bias_gelu").cost(case(rows, bias), FORWARD).nbytes
    assert CHAINS["fused-gelu"].nbytes(FUSED) == bias_gelu
    norm = (
        registry.operator("dropout_add_layer_norm").cost(case(rows, residual, weight, bias), FORWARD).nbytes
    )
    assert CHAINS["fused-chain"].nbytes(FUSED) == norm + gelu


def test_predicted_ratios_are_those_of_the_bytes() -> None:
    for name, expected in (("fused-gelu", (4, 2, 2)), ("fused-chain", (9.25, 3, 6))):
        demo = demos.demo(name)
        assert demo.chain is CHAINS[name]
        accesses = {e["name"]: e["accesses"] for e in demo.chain.prediction()}
        assert accesses == pytest.approx(dict(zip((EAGER, COMPILED, FUSED), expected, strict=True)), rel=1e-3)
        assert demo.expected == pytest.approx(accesses[EAGER] / accesses[FUSED], rel=0.05)
    for module in (chain,):
        result = doctest.testmod(module)
        assert result.attempted and not result.failed


def _mutants(name: str) -> dict[str, Callable[..., torch.Tensor]]:
    right = CHAINS[name].calls(EAGER)
    if name == "fused-gelu":
        return {
            "off by": lambda x, bias: functional.gelu(x + bias),  # the form with erf
            "its shape": lambda x, bias: right(x, bias)[:1],
        }
    return {
        "off by": lambda x, residual, weight, bias: right(x, 0 * residual, weight, bias),
        "it drops": lambda x, residual, weight, bias: functional.gelu(
            functional.layer_norm(residual + functional.dropout(x, 0.2), (COLUMNS,), weight, bias)
        ),
    }


@pytest.mark.parametrize("name", CHAINS)
def test_each_output_is_verified_by_its_own_mask(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify eager and Weft's operators on a CPU, and wrong ones; torch.compile's Python is eager's."""
    monkeypatch.setattr(fused_gelu, "IMPL", "eager")
    monkeypatch.setattr(fused_chain, "IMPL", "eager")
    monkeypatch.setattr(torch, "compile", lambda function: function)
    one: Chain = CHAINS[name]
    inputs = traffic.make_inputs(one, SMALL, drawn_on_cpu)
    for implementation in one.steps:
        assert fusion.mismatch(one, one.calls(implementation), inputs) is None, implementation
    for message, wrong in _mutants(name).items():
        assert message in str(fusion.mismatch(one, wrong, inputs))


HEAD = '"ID","Kernel Name","Block Size","Grid Size","dram__bytes_read.sum","dram__bytes_write.sum"\n'
ROWS_OF_EAGER = (
    '"0","add","(128, 1, 1)","(1, 1, 1)","1,073,745,920","1,050,504,960"\n'
    '"1","gelu","(128, 1, 1)","(1, 1, 1)","1,073,741,824","1,050,504,960"\n'
)


def test_bytes_of_all_kernels_are_added_and_compared_with_the_prediction() -> None:
    counted = traffic.read_counters(f"==PROF== Profiling\n{HEAD}{ROWS_OF_EAGER}")
    assert counted == {"counted": 4248497664, "launches": 2}
    entry = CHAINS["fused-gelu"].prediction()[0]
    assert not traffic.deviations([entry]) and not traffic.deviations([entry | counted])
    for factor in (0.97, 1.03):
        (reason,) = traffic.deviations([entry | {"counted": factor * entry["bytes"]}])
        assert reason == f"eager moved {factor:.3f} times the predicted bytes"
    for text in ("", HEAD, HEAD + ROWS_OF_EAGER.replace("1,050,504,960", "n/a")):
        with pytest.raises(WeftError, match="did not count the call's kernels"):
            traffic.read_counters(text)
    with pytest.raises(WeftError, match="administrators"):
        traffic.read_counters("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission")


def test_a_run_with_counted_bytes_is_judged_by_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    demo = demos.demo("fused-gelu")
    samples = {BAD: 1000.0, GOOD: 500.0, "compile": 505.0}
    monkeypatch.setattr(machine, "has_gpu", lambda: True)
    monkeypatch.setattr(
        run, "measure", lambda demo, log: {s: Measurement(samples=(us,) * 5) for s, us in samples.items()}
    )
    assert demo.chain is not None
    for factor, status in ((0.99, "shown"), (1.5, "not shown")):
        entries = [e | {"counted": factor * e["bytes"], "launches": 1} for e in demo.chain.prediction()]
        monkeypatch.setattr(traffic, "count", lambda demo, log, entries=entries: entries)
        result = run.run(demo, no_log, arch="sm_90")
        assert result["status"] == status
        picture = report.traffic(result)
        assert "505 µs" in picture and f"{100 * factor:.1f} % of the prediction" in picture
    monkeypatch.undo()
    monkeypatch.setattr(find, "find", lambda: None)
    with pytest.raises(WeftError, match="not installed"):
        monkeypatch.setattr(traffic, "rows_here", lambda: ROWS)
        traffic.count(demo, no_log)


def test_the_picture_s_bars_are_as_long_as_the_bytes() -> None:
    entries = CHAINS["fused-chain"].prediction()
    bars = [line.count("█") for line in report.traffic({"traffic": entries}).splitlines() if "█" in line]
    assert bars == [round(report.BAR * e["bytes"] / entries[0]["bytes"]) for e in entries]
    assert report.traffic({}) == ""


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", CHAINS)
def test_counted_bytes_are_the_predicted_ones(name: str) -> None:
    try:
        find.require()
        entries = traffic.count(demos.demo(name), no_log)
    except WeftError as error:
        pytest.skip(str(error))
    print(report.traffic({"traffic": entries}))
    assert not traffic.deviations(entries)
