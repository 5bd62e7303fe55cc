"""Timing on a GPU: its own checks on honest kernels, A/A comparisons, and refused cheats.

Times are printed beside those of another instrument for a reader; the assertions are about flags,
verdicts and counts, since no ratio of two measured times is certain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import isfinite
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from helpers.sample_records import record
from weft.core import Implementation, registry
from weft.workbench import bench
from weft.workbench.calls.buffers import InputBuffers
from weft.workbench.check.check import check
from weft.workbench.compare.verdict import AMBIGUOUS, SAME, compare
from weft.workbench.records import BEATS_FLOOR
from weft.workbench.timing.measure import measure
from weft.workbench.timing.plan import Budget, Candidate, Outcome, Plan

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

Tensor = torch.Tensor
Work = Callable[..., Tensor]
BUDGET = Budget(seconds=8.0, warmup=0.5)


def maker(*shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Callable[[int], InputBuffers]:
    def make(seed: int) -> InputBuffers:
        generator = torch.Generator("cuda").manual_seed(seed)
        return InputBuffers([torch.randn(s, generator=generator, device="cuda", dtype=dtype) for s in shapes])

    return make


def judge_by(work: Work) -> Callable[[InputBuffers], Callable[[object], str | None]]:
    def make_judge(buffers: InputBuffers) -> Callable[[object], str | None]:
        expected = work(*buffers.inputs).float()

        def judge(output: object) -> str | None:
            assert isinstance(output, Tensor)
            close = torch.allclose(output.float(), expected, rtol=1e-2, atol=1e-2)
            return None if close else "off"

        return judge

    return make_judge


def bound(work: Work) -> Callable[[InputBuffers], Callable[[], Tensor]]:
    return lambda buffers: lambda: work(*buffers.inputs)


def one(
    bind: Callable[[InputBuffers], Callable[[], object]],
    make_buffers: Callable[[int], InputBuffers],
    judged_by: Work | None = None,
    budget: Budget = BUDGET,
) -> Outcome:
    outcome = measure(
        [Candidate(name="it", bind=bind)],  # type: ignore[arg-type]
        make_buffers,
        device="cuda",
        budget=budget,
        make_judge=judge_by(judged_by) if judged_by else None,
    )
    return outcome["it"]


gelu = lambda x: F.gelu(x, approximate="tanh")  # noqa: E731
softmax = lambda x: torch.softmax(x, -1)  # noqa: E731

LONG = {
    "gelu bf16": (gelu, maker((16384, 16384))),
    "gelu fp32": (gelu, maker((16384, 16384), dtype=torch.float32)),
    "softmax bf16": (softmax, maker((8192, 16384))),
    "sum fp32": (torch.sum, maker((1 << 28,), dtype=torch.float32)),
    "matmul bf16": (torch.mm, maker((4096, 4096), (4096, 4096))),
}


def do_bench_us(work: Any, inputs: list[torch.Tensor]) -> float:
    """do_bench's median in us."""
    from triton.testing import do_bench

    return float(do_bench(lambda: work(*inputs), rep=300, return_mode="median")) * 1000


WRITE_LITTLE = ["sum fp32", "matmul bf16"]


@pytest.mark.parametrize("name", [n for n in LONG if n not in WRITE_LITTLE])
def test_the_clocks_agree_on_long_kernels(name: str) -> None:
    """CUDA events, the wall clock and a graph agree; the test also prints do_bench's time."""
    work, make_buffers = LONG[name]
    outcome = one(bound(work), make_buffers)
    assert outcome.timing is not None, outcome
    other = do_bench_us(work, make_buffers(99).inputs)
    ratio = outcome.timing.cold / other
    print(f"{name}: cold {outcome.timing.cold:.1f} us, do_bench {other:.1f} us, ratio {ratio:.4f}")
    assert not unsteady(outcome), outcome.timing.flags


@pytest.mark.parametrize("name", WRITE_LITTLE)
def test_the_clocks_agree_on_a_kernel_that_writes_little(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """do_bench's time is printed with and without the write-back that its flush leaves.

    do_bench zeroes a buffer before each call. A kernel that writes little then pays for writing those
    lines back, about the size of the L2 over the bandwidth. A read after the zeroing evicts them.
    """
    from triton import runtime

    work, make_buffers = LONG[name]
    outcome = one(bound(work), make_buffers)
    assert outcome.timing is not None, outcome
    inputs = make_buffers(99).inputs
    plain = do_bench_us(work, inputs)
    other = torch.zeros(1 << 27, device="cuda")
    driver = runtime.driver.active
    zero = driver.clear_cache
    monkeypatch.setattr(driver, "clear_cache", lambda cache: (zero(cache), other.sum()))
    clean = do_bench_us(work, inputs)
    cold = outcome.timing.cold
    print(f"{name}: cold {cold:.1f} us, do_bench {plain:.1f} us, after a read {clean:.1f} us")
    assert not unsteady(outcome), outcome.timing.flags


def test_samples_after_a_call_and_after_a_flush() -> None:
    """Print the times of the same kernels after a call of the same kernel and after a flush."""
    from weft.workbench.timing.cuda import CudaTimingBackend

    backend = CudaTimingBackend()
    for name, (work, make_buffers) in LONG.items():
        with backend.context():
            buffer_sets = [make_buffers(i) for i in range(2)]
            candidate = Candidate(name=name, bind=bound(work))
            medians = []
            for plan in (Plan(calls=2, flush=False), Plan(calls=1, flush=True)):
                runner = backend.prepare(candidate, buffer_sets[: plan.calls], make_buffers, plan)
                samples = sorted(runner.sample() for _ in range(31))
                medians.append(samples[15])
                assert not runner.flags and samples[0] > 0
                del runner
        print(f"{name}: steady {medians[0]:.1f} us, after a flush {medians[1]:.1f} us")
        del buffer_sets
        torch.cuda.empty_cache()


def test_a_runner_that_rests_has_its_inputs_alone_and_the_same_outputs_later() -> None:
    from weft.workbench.timing.cuda import CudaTimingBackend

    backend, nbytes = CudaTimingBackend(), 1 << 28
    with backend.context():
        buffers = [maker((nbytes // 4,), dtype=torch.float32)(0)]
        candidate = Candidate(name="it", bind=bound(lambda x: torch.sigmoid(x + 1.0)))
        runner = backend.make_runner(candidate, buffers, Plan(calls=1, flush=True))
        torch.cuda.empty_cache()
        times, reserved = [], []
        for _ in range(3):
            samples = [runner.run([0]).us for _ in range(9)]
            times.append(sorted(us for us in samples if us is not None)[0])
            (output,) = runner.outputs()
            assert torch.equal(output, torch.sigmoid(buffers[0].inputs[0] + 1.0))
            del output
            torch.cuda.empty_cache()
            before = torch.cuda.memory_reserved()
            runner.rest()
            torch.cuda.empty_cache()
            reserved.append((before, torch.cuda.memory_reserved()))
    print("us before and after two rests", times, "bytes before and while it rests", reserved)
    # The result of the addition and the output.
    assert all(before - rested >= 2 * nbytes for before, rested in reserved)


def test_the_overhead_is_measured() -> None:
    from weft.workbench.timing.cuda import CudaTimingBackend

    backend = CudaTimingBackend()
    print(f"overhead: graph {backend.overhead_us:.2f} us, events {backend.plain_overhead:.2f} us")
    assert isfinite(backend.overhead_us) and backend.overhead_us >= 0
    assert isfinite(backend.plain_overhead) and backend.plain_overhead >= 0


def test_a_tiny_kernel_is_sampled_for_long_enough_without_launch_gaps() -> None:
    outcome = one(bound(gelu), maker((64, 64)), gelu)
    assert outcome.timing is not None, outcome
    t = outcome.timing
    print(f"tiny gelu: cold {t.cold:.2f}, warm {t.warm:.2f}, host {t.host:.2f} us; {t.flags}")
    assert t.calls_per_sample > 1 and t.clocks["flushed"] and t.host is not None
    assert not unsteady(outcome), t.flags  # neither no-graph nor host-bound: no launch gap is inside


def test_a_warm_sample_calls_on_one_buffer_only() -> None:
    from weft.workbench.timing.cuda import CudaTimingBackend

    counts: Counter[int] = Counter()

    def bind(buffers: InputBuffers) -> Callable[[], Tensor]:
        def call() -> Tensor:
            counts[buffers.inputs[0].data_ptr()] += 1
            return gelu(buffers.inputs[0])

        return call

    backend = CudaTimingBackend()
    with backend.context():
        buffer_sets = [maker((1024, 3072))(i) for i in range(3)]
        plan = Plan(calls=3, flush=False)
        runner = backend.prepare(Candidate(name="it", bind=bind), buffer_sets, maker((1, 1)), plan)
        assert len(counts) == 3, "a cold sample rotates over all buffers"
        counts.clear()
        runner.sample_warm()
    assert set(counts) == {buffer_sets[0].inputs[0].data_ptr()}


def test_no_long_kernel_beats_the_copy_ceiling() -> None:
    (records,) = bench.run_points(
        ["gelu"],
        ["torch"],
        cases=["bf16-16384x16384"],
        directions=["forward"],
        device="cuda",
        budget=BUDGET,
    )
    for r in records:
        print(r.implementation, r.efficiency, r.flags)
        assert r.efficiency is not None and BEATS_FLOOR["cuda"] not in r.flags


def test_twenty_a_a_comparisons_report_no_change() -> None:
    make_buffers = maker((4096, 8192))
    verdicts = []
    for _ in range(20):
        pair = []
        for _ in range(2):
            outcome = one(bound(gelu), make_buffers, budget=Budget(seconds=2.0, warmup=0.2))
            assert outcome.timing is not None
            pair.append(record(timing=outcome.timing))
            torch.cuda.empty_cache()
        verdicts.append(compare(pair[:1], pair[1:])[0].verdict)
    print(f"A/A: {verdicts.count(SAME)} same, {verdicts.count(AMBIGUOUS)} ambiguous")
    assert set(verdicts) <= {SAME, AMBIGUOUS}


def test_backward_through_autograd_is_captured() -> None:
    def make_buffers(seed: int) -> InputBuffers:
        inputs = maker((2048, 2048), dtype=torch.float32)(seed).inputs
        return InputBuffers(inputs, torch.randn_like(inputs[0]))

    def bind(buffers: InputBuffers) -> Callable[[], object]:
        x = buffers.inputs[0].detach().requires_grad_()
        y = gelu(x)
        return lambda: torch.autograd.grad(y, x, buffers.grad, retain_graph=True)

    outcome = one(bind, make_buffers)
    assert outcome.timing is not None, outcome
    assert "no-graph" not in outcome.timing.flags


def unsteady(outcome: Outcome) -> list[str]:
    """Return the flags of a time that includes launches of the host or that clocks dispute."""
    flags = outcome.timing.flags if outcome.timing else ()
    return [f for f in flags if f.startswith(("suspect", "no-graph", "host-bound"))]


def refused(outcome: Outcome) -> bool:
    suspect = outcome.timing and any(f.startswith("suspect") for f in outcome.timing.flags)
    return bool(outcome.refusal or suspect)


@pytest.mark.parametrize("forked", [True, False])
def test_work_on_a_side_stream_is_refused(forked: bool) -> None:
    side = torch.cuda.Stream()

    def bind(buffers: InputBuffers) -> Callable[[], object]:
        def call() -> Tensor:
            out = torch.empty_like(buffers.inputs[0])
            if forked:
                side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                out.copy_(gelu(buffers.inputs[0]))
            return out

        return call

    outcome = one(bind, maker((8192, 8192)), gelu)
    print(outcome.refusal or outcome.trouble or (outcome.timing and outcome.timing.flags))
    assert refused(outcome)


def test_a_side_stream_that_is_joined_is_timed() -> None:
    side = torch.cuda.Stream()

    def bind(buffers: InputBuffers) -> Callable[[], object]:
        def call() -> Tensor:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                out = gelu(buffers.inputs[0])
            torch.cuda.current_stream().wait_stream(side)
            return out

        return call

    outcome = one(bind, maker((4096, 4096)), gelu)
    assert outcome.timing is not None and not refused(outcome), outcome


def test_skipping_the_tenth_call_is_refused() -> None:
    count = [0]

    def bind(buffers: InputBuffers) -> Callable[[], object]:
        def call() -> Tensor:
            count[0] += 1
            x = buffers.inputs[0]
            return torch.empty_like(x) if count[0] % 10 == 0 else gelu(x)

        return call

    assert one(bind, maker((1024, 1024)), gelu).refusal


def test_a_call_that_cannot_be_captured_is_timed_and_flagged() -> None:
    def bind(buffers: InputBuffers) -> Callable[[], object]:
        def call() -> Tensor:
            x = buffers.inputs[0]
            return gelu(x) if float(x.flatten()[0]) < 1e9 else x

        return call

    outcome = one(bind, maker((4096, 4096)), gelu)
    assert outcome.timing is not None, outcome
    assert "no-graph" in outcome.timing.flags
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


def test_an_interval_wider_than_the_target_is_flagged() -> None:
    outcome = one(bound(gelu), maker((16384, 4096)))
    assert outcome.timing is not None
    low, high = outcome.timing.interval
    assert "noisy" in outcome.timing.flags or (high - low) / outcome.timing.cold < 0.005
    assert len(outcome.timing.samples) >= 20 and outcome.timing.clocks["sm_mhz"][1] > 0
