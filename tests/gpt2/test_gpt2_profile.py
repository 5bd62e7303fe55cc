"""Step profile: kernels attributed to operators, rows, time limits, and a profiled run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.training_toys import train
from weft import WeftError
from weft.core import Ceilings
from weft.gpt2.model.config import PRESETS
from weft.gpt2.report import run_record, step_profile
from weft.gpt2.report.step_roofline import step_limits
from weft.gpt2.train.profiler import Profile, gpu_launches, kernel_gaps

CUDA, CPU = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU
NODE = "autograd::engine::evaluate_function: "
TOKENS, VOCABULARY = 65536, 50304
H200 = Ceilings(
    device="one", copy=4.27e12, read=4.63e12, fill=4.68e12, matrix={"bf16": 803e12}, measured="then"
)


class Recorded:
    """Events as torch.profiler returns them: operators with the kernels that they launched."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.now = 100.0

    def kernel(self, name: str, us: float, after: float = 0.0, annotation: bool = False) -> None:
        begin = self.now + after
        self.now = begin + us
        span = SimpleNamespace(start=begin, end=self.now, elapsed_us=lambda: us)
        event = SimpleNamespace(
            name=name, device_type=CUDA, time_range=span, kernels=[], is_user_annotation=annotation
        )
        self.events.append(event)

    def operator(self, *names: str, kernel: str, us: float, shapes: Any = (), after: float = 0.0) -> None:
        """``names`` from the outermost to the one that launches."""
        parent = None
        for name in names:
            parent = SimpleNamespace(
                name=name, device_type=CPU, kernels=[], cpu_parent=parent, is_user_annotation=False,
                input_shapes=[list(s) for s in shapes],
            )  # fmt: skip
            self.events.append(parent)
        assert parent is not None
        parent.kernels = [SimpleNamespace(name=kernel, duration=us)]
        self.kernel(kernel, us, after)


def test_kernels_are_attributed_to_operators() -> None:
    seen, product = Recorded(), "nvjet_sm90"
    backward = (NODE + "AddmmBackward0", "AddmmBackward0", "aten::mm")
    seen.operator("aten::linear", "aten::addmm", kernel=product, us=40.0,
                  shapes=[[2304], [TOKENS, 768], [768, 2304]])  # fmt: skip
    seen.operator(*backward, kernel=product, us=41.0, shapes=[[TOKENS, 2304], [2304, 768]])
    seen.operator(*backward, kernel=product, us=42.0, shapes=[[2304, TOKENS], [TOKENS, 768]])
    seen.operator(*backward[:1], "aten::sum", kernel="reduce", us=5.0)
    seen.operator("weft::linear_gelu", kernel="linear_tile", us=60.0)
    ours = (NODE + "GeneratedBackwardFor_weft_linear_gelu_defaultBackward",)
    inside = (*ours, "weft::linear_gelu_backward", "aten::mm")
    seen.operator(*inside, kernel=product, us=61.0, shapes=[[TOKENS, 3072], [3072, 768]])
    seen.operator(*inside, kernel=product, us=62.0, shapes=[[3072, TOKENS], [TOKENS, 768]])
    seen.operator(*inside[:2], kernel="linear_columns", us=8.0)
    seen.operator("weft::linear_backward", kernel="of its own", us=4.0)
    seen.operator("weft::attention_packed", kernel="attention_forward", us=30.0)
    ours = (NODE + "GeneratedBackwardFor_weft_attention_packed_defaultBackward",)
    seen.operator(*ours, "weft::attention_packed_backward", kernel="keys", us=50.0)
    seen.operator(*ours, "aten::cat", kernel="void at::native::Cat<4>(int)", us=9.0)
    seen.operator("weft::linear_cross_entropy", "aten::mm", kernel=product, us=90.0,
                  shapes=[[4096, 768], [768, 50257]])  # fmt: skip
    seen.operator("aten::linear", "aten::mm", kernel=product, us=3.0,
                  shapes=[[TOKENS, 768], [768, VOCABULARY]])  # fmt: skip
    seen.operator("weft::add_layer_norm_backward", kernel="norm_backward_persistent", us=7.0)
    seen.operator("aten::_foreach_norm", kernel="multi", us=2.0)
    seen.kernel("adamw_many", 20.0, after=60.0)
    seen.kernel("void at::native::fill<4>(int)", 3.0)
    overhead = "Activity Buffer Request"  # reported as the launcher of a kernel that AddmmBackward0 launched
    seen.events.append(
        SimpleNamespace(
            name=overhead, device_type=CPU, cpu_parent=None, input_shapes=[],
            kernels=[SimpleNamespace(name=product, duration=41.0)],
        )
    )  # fmt: skip
    seen.kernel("a range of a name", 999.0, annotation=True)
    launches = gpu_launches(seen.events)
    profile = Profile(steps=2, step_us=300.0, gaps_us=kernel_gaps(seen.events) / 2, launches=launches)
    table_rows = step_profile.rows(profile, TOKENS, VOCABULARY, {"attention forward": 10.0})
    assert {row.what: 2 * row.us for row in table_rows} == {
        "linear forward": 40.0, "linear dx": 41.0, "linear dW": 42.0, "linear bias": 5.0,
        "attention forward": 30.0, "attention backward": 59.0, "head and loss forward": 93.0,
        "linear_gelu forward": 60.0, "linear_gelu dx": 61.0, "linear_gelu dW": 62.0,
        "linear_gelu bias": 8.0, "linear backward": 4.0,
        "norms backward": 7.0, "gradients' norm": 2.0, "optimizer": 20.0,
        "at::native::fill": 3.0,
    }  # fmt: skip
    record = step_profile.to_json(profile, table_rows, H200)
    assert (record["busy_us"], record["beyond_us"], record["gaps_us"]) == (268.5, 31.5, 30.0)
    lines = step_profile.text_lines(record)
    row = next(line for line in lines if line.startswith("attention forward"))
    assert row.split()[2:] == ["0.015", "ms", "5.0", "%", "0.5", "0.010", "ms", "67", "%"]
    assert any(line.startswith("outside kernels") and "10.5 %" in line for line in lines)


def test_limits_of_the_124m_equal_hand_computed_ones() -> None:
    """Limits of 64 x 1024 tokens in bfloat16, computed by hand from the sizes."""
    config, sizes = PRESETS["124M"], {"batch": 64, "length": 1024, "accumulate": 1, "dtype": "bfloat16"}
    split = step_limits(config, **sizes, mlp="gelu", ceilings=H200)  # type: ignore[arg-type]
    fused = step_limits(config, **sizes, mlp="linear_gelu", ceilings=H200)  # type: ignore[arg-type]
    each = 12 * 2 * TOKENS * 12 * 768**2 / 803e12 * 1e6  # of all the products of all blocks
    assert split["linear dx"] == split["linear dW"] == pytest.approx(each, rel=1e-6)
    for part in ("forward", "dx", "dW"):
        both = (fused[f"linear {part}"] or 0) + (fused[f"linear_gelu {part}"] or 0)
        assert both == pytest.approx(each, rel=1e-6)
    whole = step_limits(config, **sizes, mlp="mlp_gelu", ceilings=H200)  # type: ignore[arg-type]
    # Two thirds of the FLOPs of a block's products are the MLP's.
    assert whole["linear dx"] == pytest.approx(each / 3, rel=1e-6)
    assert whole["mlp_gelu forward"] == pytest.approx(2 / 3 * each, rel=1e-6)
    assert whole["mlp_gelu backward"] == pytest.approx(4 / 3 * each, rel=1e-6)
    assert "linear_gelu dx" not in whole and "gelu forward" not in whole
    head = 3 * 2 * TOKENS * 768 * 50257 / 803e12 * 1e6
    assert split["head and loss forward"] == pytest.approx(head, rel=1e-6)
    assert split["optimizer"] == pytest.approx(28 * config.parameters / 4.27e12 * 1e6, rel=0.01)
    # A norm alone reads and writes a tensor; added to a residual, two.
    norms = (2 + 24 * 4) * TOKENS * 768 * 2 / 4.27e12 * 1e6
    assert split["norms forward"] == pytest.approx(norms, rel=0.01)
    assert step_limits(config, **{**sizes, "accumulate": 2, "batch": 32}, mlp="gelu", ceilings=H200)[  # type: ignore[arg-type]
        "linear dx"
    ] == pytest.approx(each, rel=1e-6)


@pytest.mark.slow
def test_profile_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.workbench.timing.ceilings.ceilings", lambda *a, **more: H200)
    done = train(tmp_path / "run", steps=32, profile=4, checkpoint_every=13)
    profile = run_record.to_json(done)["profile"]
    rows = {row["what"]: row for row in profile["rows"]}
    assert profile["steps"] == 4 and profile["step_us"] > 0 and profile["busy_us"] > 0
    assert profile["busy_us"] == pytest.approx(sum(row["us"] for row in profile["rows"]), abs=1.0)
    for what in ("linear forward", "linear dx", "linear dW", "attention backward",
                 "head and loss forward", "norms forward", "embedding backward"):  # fmt: skip
        assert rows[what]["us"] > 0 and rows[what]["launches"] >= 1, what
    assert rows["linear dx"]["floor_us"] is None  # float32's rate was not measured there
    assert rows["norms forward"]["floor_us"] > 0
    with pytest.raises(WeftError, match=r"--profile: expected 1 or more.* at most 12 here, got 13"):
        train(tmp_path / "other", steps=32, profile=13)
    assert not (tmp_path / "other").exists()
