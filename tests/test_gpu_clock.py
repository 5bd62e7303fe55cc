"""The clock on a GPU: agreement with another clock, A/A, and what it does not let pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from sample_records import record
from weft import machine
from weft.core import Implementation, registry
from weft.workbench.check import check
from weft.workbench.clock import measure
from weft.workbench.compare import AMBIGUOUS, SAME, compare
from weft.workbench.plan import Budget, Candidate, Outcome, Plan
from weft.workbench.slots import Slot

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

Tensor = torch.Tensor
Work = Callable[..., Tensor]
BUDGET = Budget(seconds=8.0, warmup=0.5)


def maker(*shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Callable[[int], Slot]:
    def make(seed: int) -> Slot:
        generator = torch.Generator("cuda").manual_seed(seed)
        return Slot(
            [torch.randn(s, generator=generator, device="cuda", dtype=dtype) for s in shapes]
        )

    return make


def judge_by(work: Work) -> Callable[[Slot], Callable[[object], str | None]]:
    def make_judge(slot: Slot) -> Callable[[object], str | None]:
        wanted = work(*slot.inputs).float()

        def judge(output: object) -> str | None:
            assert isinstance(output, Tensor)
            close = torch.allclose(output.float(), wanted, rtol=1e-2, atol=1e-2)
            return None if close else "off"

        return judge

    return make_judge


def bound(work: Work) -> Callable[[Slot], Callable[[], Tensor]]:
    return lambda slot: lambda: work(*slot.inputs)


def one(
    bind: Callable[[Slot], Callable[[], object]],
    make_slot: Callable[[int], Slot],
    judged_by: Work | None = None,
    budget: Budget = BUDGET,
) -> Outcome:
    found = measure(
        [Candidate(name="it", bind=bind)],  # type: ignore[arg-type]
        make_slot,
        device="cuda",
        budget=budget,
        make_judge=judge_by(judged_by) if judged_by else None,
    )
    return found["it"]


gelu = lambda x: F.gelu(x, approximate="tanh")  # noqa: E731
softmax = lambda x: torch.softmax(x, -1)  # noqa: E731

LONG = {
    "gelu bf16": (gelu, maker((16384, 16384))),
    "gelu fp32": (gelu, maker((16384, 16384), dtype=torch.float32)),
    "softmax bf16": (softmax, maker((8192, 16384))),
    "sum fp32": (torch.sum, maker((1 << 28,), dtype=torch.float32)),
    "matmul bf16": (torch.mm, maker((4096, 4096), (4096, 4096))),
}


def bench(work: Any, inputs: list[torch.Tensor]) -> float:
    """do_bench's median in us."""
    from triton.testing import do_bench

    return float(do_bench(lambda: work(*inputs), rep=300, return_mode="median")) * 1000


WRITE_LITTLE = ["sum fp32", "matmul bf16"]


@pytest.mark.parametrize("name", [n for n in LONG if n not in WRITE_LITTLE])
def test_cold_agrees_with_do_bench_on_kernels_over_100_us(name: str) -> None:
    work, make_slot = LONG[name]
    found = one(bound(work), make_slot)
    assert found.timing is not None, found
    other = bench(work, make_slot(99).inputs)
    ratio = found.timing.cold / other
    print(f"{name}: cold {found.timing.cold:.1f} us, do_bench {other:.1f} us, ratio {ratio:.4f}")
    assert other > 100 and abs(ratio - 1) <= 0.03


@pytest.mark.parametrize("name", WRITE_LITTLE)
def test_what_do_bench_adds_to_a_kernel_that_writes_little(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """do_bench zeroes a buffer before each call, and a kernel that hardly writes then pays for
    writing those lines back: about the L2 over the bandwidth. Where the zeroed lines are pushed
    out by a read before the call is timed, the two clocks agree within 3 %."""
    from triton import runtime

    from weft import machine

    work, make_slot = LONG[name]
    found = one(bound(work), make_slot)
    assert found.timing is not None, found
    inputs = make_slot(99).inputs
    plain = bench(work, inputs)
    other = torch.zeros(1 << 27, device="cuda")
    driver = runtime.driver.active
    zero = driver.clear_cache
    monkeypatch.setattr(driver, "clear_cache", lambda cache: (zero(cache), other.sum()))
    clean = bench(work, inputs)
    cold = found.timing.cold
    print(f"{name}: cold {cold:.1f} us, do_bench {plain:.1f} us, after a read {clean:.1f} us")
    assert abs(cold / clean - 1) <= 0.03
    ceilings = machine.ceilings("cuda")
    assert ceilings is not None
    written_back = 1e6 * machine.l2_bytes("cuda") / ceilings.copy
    assert 0 <= plain - clean <= 1.5 * written_back


def test_what_goes_before_a_call_is_reported() -> None:
    """Not a claim but a reading: the same kernels after a call of their own and after a flush."""
    from weft.workbench.clock_cuda import CudaStand

    stand = CudaStand()
    for name, (work, make_slot) in LONG.items():
        with stand.context():
            slots = [make_slot(i) for i in range(2)]
            candidate = Candidate(name=name, bind=bound(work))
            told = []
            for plan in (Plan(calls=2, flush=False), Plan(calls=1, flush=True)):
                rig = stand.rig(candidate, slots[: plan.calls], plan)
                samples = sorted(rig.sample() for _ in range(31))
                told.append(samples[15])
                assert not rig.flags and samples[0] > 0
                del rig
        print(f"{name}: steady {told[0]:.1f} us, after a flush {told[1]:.1f} us")
        del slots
        torch.cuda.empty_cache()


def test_the_overhead_is_measured_and_small() -> None:
    from weft.workbench.clock_cuda import CudaStand

    stand = CudaStand()
    print(f"overhead: graph {stand.overhead:.2f} us, events {stand.plain_overhead:.2f} us")
    assert 0 <= stand.overhead < 15 and 0 <= stand.plain_overhead < 15


def test_a_tiny_kernel_is_sampled_for_long_enough_without_launch_gaps() -> None:
    found = one(bound(gelu), maker((64, 64)), gelu)
    assert found.timing is not None, found
    t = found.timing
    print(f"tiny gelu: cold {t.cold:.2f}, warm {t.warm:.2f}, host {t.host:.2f} us; {t.flags}")
    assert t.cold * t.calls_per_sample >= 40 and t.clocks["flushed"]
    assert t.host is not None and t.cold < t.host, "no host launch inside"
    assert "no-graph" not in t.flags and not [f for f in t.flags if f.startswith("suspect")]


def test_warm_is_not_slower_than_cold_where_inputs_fit_the_cache() -> None:
    found = one(bound(gelu), maker((1024, 3072)), gelu)
    assert found.timing is not None and found.timing.warm is not None
    assert found.timing.warm < found.timing.cold * 1.05


def test_no_long_kernel_beats_the_copy_ceiling() -> None:
    ceilings = machine.ceilings("cuda")
    assert ceilings is not None
    found = one(bound(gelu), maker((16384, 16384)))
    assert found.timing is not None
    rate = 2 * 2 * 16384**2 / (found.timing.cold * 1e-6)
    assert rate <= 1.02 * ceilings.copy


def test_twenty_a_a_comparisons_call_nothing_faster_or_slower() -> None:
    make_slot = maker((4096, 8192))
    verdicts = []
    for _ in range(20):
        pair = []
        for _ in range(2):
            found = one(bound(gelu), make_slot, budget=Budget(seconds=2.0, warmup=0.2))
            assert found.timing is not None
            pair.append(record(timing=found.timing))
            torch.cuda.empty_cache()
        verdicts.append(compare(pair[:1], pair[1:])[0].verdict)
    print(f"A/A: {verdicts.count(SAME)} same, {verdicts.count(AMBIGUOUS)} ambiguous")
    assert set(verdicts) <= {SAME, AMBIGUOUS}


def test_backward_through_autograd_is_captured() -> None:
    def make_slot(seed: int) -> Slot:
        inputs = maker((2048, 2048), dtype=torch.float32)(seed).inputs
        return Slot(inputs, torch.randn_like(inputs[0]))

    def bind(slot: Slot) -> Callable[[], object]:
        x = slot.inputs[0].detach().requires_grad_()
        y = gelu(x)
        return lambda: torch.autograd.grad(y, x, slot.grad, retain_graph=True)

    found = one(bind, make_slot)
    assert found.timing is not None, found
    assert "no-graph" not in found.timing.flags


def refused(found: Outcome) -> bool:
    suspect = found.timing and any(f.startswith("suspect") for f in found.timing.flags)
    return bool(found.refusal or suspect)


@pytest.mark.parametrize("forked", [True, False])
def test_work_on_a_side_stream_is_refused(forked: bool) -> None:
    side = torch.cuda.Stream()

    def bind(slot: Slot) -> Callable[[], object]:
        def call() -> Tensor:
            out = torch.empty_like(slot.inputs[0])
            if forked:
                side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                out.copy_(gelu(slot.inputs[0]))
            return out

        return call

    found = one(bind, maker((8192, 8192)), gelu)
    print(found.refusal or found.trouble or (found.timing and found.timing.flags))
    assert refused(found)


def test_a_side_stream_that_is_joined_is_timed() -> None:
    side = torch.cuda.Stream()

    def bind(slot: Slot) -> Callable[[], object]:
        def call() -> Tensor:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                out = gelu(slot.inputs[0])
            torch.cuda.current_stream().wait_stream(side)
            return out

        return call

    found = one(bind, maker((4096, 4096)), gelu)
    assert found.timing is not None and not refused(found), found


def test_skipping_the_tenth_call_is_refused() -> None:
    count = [0]

    def bind(slot: Slot) -> Callable[[], object]:
        def call() -> Tensor:
            count[0] += 1
            x = slot.inputs[0]
            return torch.empty_like(x) if count[0] % 10 == 0 else gelu(x)

        return call

    assert one(bind, maker((1024, 1024)), gelu).refusal


def test_a_call_that_cannot_be_captured_is_timed_and_says_so() -> None:
    def bind(slot: Slot) -> Callable[[], object]:
        def call() -> Tensor:
            x = slot.inputs[0]
            return gelu(x) if float(x.flatten()[0]) < 1e9 else x

        return call

    found = one(bind, maker((4096, 4096)), gelu)
    assert found.timing is not None, found
    assert "no-graph" in found.timing.flags
    after = one(bound(gelu), maker((1024, 1024)), gelu)
    assert after.timing is not None and "no-graph" not in after.timing.flags


def test_wrong_only_at_odd_sizes_is_refused() -> None:
    operator = registry.operator("gelu")

    def forward(x: Tensor) -> Tensor:
        y = gelu(x)
        if x.numel() % 2:
            y.view(-1)[-1] = 0.5
        return y

    wrong = Implementation(operator="gelu", name="torch", backend="torch", forward=forward)
    even, odd = operator.case("fp32-64x64-outliers"), operator.case("fp32-7x129")
    assert check(operator, wrong, even, "forward", "cuda").status == "pass"
    assert check(operator, wrong, odd, "forward", "cuda").status == "fail"


def test_no_interval_is_wider_than_it_says() -> None:
    found = one(bound(gelu), maker((16384, 4096)))
    assert found.timing is not None
    low, high = found.timing.interval
    assert "noisy" in found.timing.flags or (high - low) / found.timing.cold < 0.005
    assert len(found.timing.samples) >= 20 and found.timing.clocks["sm_mhz"][1] > 0
