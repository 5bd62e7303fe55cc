"""Profile of a training step by operator: time, share of the step, launches and time limit.

Rows are Weft's operators, forward and backward; linear layers by product (forward, dx, dW and the sums of
the bias gradient); and the optimizer. Anything else is listed by its kernel.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from weft.core import Ceilings, registry
from weft.gpt2.report.step_roofline import step_limits
from weft.gpt2.train.profiler import Launch, Profile
from weft.gpt2.train.training import Trainer
from weft.workbench.timing import ceilings as measured_ceilings

Limits = dict[str, float | None]
NODE = "autograd::engine::evaluate_function: "
WEFT_OPERATOR = re.compile(r"weft::(\w+?)(_backward)?$")
GROUPS = {
    **dict.fromkeys(("layer_norm", "add_layer_norm", "dropout_add_layer_norm"), "norms"),
    **dict.fromkeys(("linear_cross_entropy", "cross_entropy"), "head and loss"),
    "adamw": "optimizer",
}
# Rows of torch's own operators and of autograd's nodes, by a substring of the name.
TORCH_OPERATORS = (
    ("cross_entropy_loss", "head and loss"),
    ("scaled_dot_product", "attention"),
    ("layer_norm", "norms"),
    ("aten::gelu", "gelu"),
    ("aten::embedding", "embedding"),
    ("aten::linear", "linear"),
    ("aten::addmm", "linear"),
)
AUTOGRAD_NODES = (
    ("LogSoftmax", "head and loss"),
    ("NllLoss", "head and loss"),
    ("MmBackward", "head and loss"),  # the only product without a bias
    ("ScaledDotProduct", "attention"),
    ("LayerNorm", "norms"),
    ("Gelu", "gelu"),
    ("Embedding", "embedding"),
    ("Addmm", "linear"),
    ("AccumulateGrad", "gradients kept"),
)
NORM_OPERATORS = ("_foreach_norm", "linalg_vector_norm")
LINEAR = ("linear", "linear_gelu")
KERNELS = (("adamw", "optimizer"), ("Memcpy", "copies"), ("Memset", "copies"))
SMALLEST_SHARE = 0.002  # of the busy time; shorter rows are combined


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the profile. ``us`` and ``launches`` are per step; ``floor_us`` is the time limit, None if
    unknown."""

    what: str
    us: float
    launches: float
    floor_us: float | None


def row_of(launch: Launch, tokens: int, vocabulary: int) -> str:
    """Return the row of a launch, in a step with ``tokens`` tokens per micro-batch."""
    for name in reversed(launch.names):  # the outermost: operators inside one of ours belong to it
        if match := WEFT_OPERATOR.match(name):
            group, is_backward = _group(match[1]), bool(match[2])
            if is_backward and group in LINEAR:
                return f"{group} {_linear_part(launch, tokens)}"
            return f"{group} {'backward' if is_backward else 'forward'}"
    # The backward of torch's operators is known by its autograd node only.
    node = next((n for n in launch.names if n.startswith(NODE)), "").removeprefix(NODE)
    if node:
        return _row_of_node(node, launch, tokens)
    names = " ".join(launch.names)
    if any(norm in names for norm in NORM_OPERATORS):
        return "gradients' norm"
    for substring, group in TORCH_OPERATORS:
        if substring in names:
            # The head is the only product with the vocabulary among its sizes.
            is_head = group == "linear" and any(vocabulary in shape for shape in launch.shapes)
            return "head and loss forward" if is_head else f"{group} forward"
    for substring, row in KERNELS:
        if substring in launch.kernel:
            return row
    return _short_name(launch.names[-1] if launch.names else launch.kernel)


def _row_of_node(node: str, launch: Launch, tokens: int) -> str:
    if "weft_" in node:
        return f"{_group(node.partition('weft_')[2])} backward"
    for substring, group in AUTOGRAD_NODES:
        if substring in node:
            if group == "linear":
                return f"linear {_linear_part(launch, tokens) if launch.shapes else 'bias'}"
            return group if group == "gradients kept" else f"{group} backward"
    return _short_name(node)


def _linear_part(launch: Launch, tokens: int) -> str:
    """Return the part of a linear layer's backward: dx = g W has a row per token, dW = g^T x sums over
    the tokens, the bias gradient sums columns; "backward" for a kernel that computes several."""
    if launch.shapes:
        return "dx" if launch.shapes[0][0] == tokens else "dW"
    return "bias" if "column" in launch.kernel or "sum" in launch.kernel else "backward"


def _group(name: str) -> str:
    """Return the row of an operator or of a variant of it: ``attention_packed`` is attention."""
    prefixes = [n for n in registry.REGISTRY if name.startswith(n)]
    # The longest: dropout_add_layer_norm also starts with the name of dropout.
    operator = max(prefixes, key=len, default=name)
    return GROUPS.get(operator, operator)


def _short_name(name: str) -> str:
    """Return a kernel's name without its types: ``void at::f<4>(int)`` is ``at::f``."""
    bare = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    return re.split(r"[<(]", bare, maxsplit=1)[0][:60] or name[:60]


def rows(profile: Profile, tokens: int, vocabulary: int, limits: Limits) -> list[Row]:
    """Return the rows of a profile, the longest first; the last one combines the very short ones."""
    totals: dict[str, list[float]] = {}  # microseconds and launches per step
    for launch in profile.launches:
        total = totals.setdefault(row_of(launch, tokens, vocabulary), [0.0, 0.0])
        total[0] += launch.us / profile.steps
        total[1] += launch.count / profile.steps
    busy = sum(us for us, _ in totals.values())
    result, rest_us, rest_launches = [], 0.0, 0.0
    for what, (us, launches) in sorted(totals.items(), key=lambda item: -item[1][0]):
        # A row with a limit is never hidden, however short.
        if us < SMALLEST_SHARE * busy and what not in limits:
            rest_us, rest_launches = rest_us + us, rest_launches + launches
        else:
            result.append(Row(what=what, us=us, launches=launches, floor_us=limits.get(what)))
    if rest_launches:
        result.append(Row(what="the rest", us=rest_us, launches=rest_launches, floor_us=None))
    return result


def to_json(profile: Profile, profile_rows: list[Row], ceilings: Ceilings | None) -> dict[str, Any]:
    """Return a profile as plain data, in microseconds per step.

    ``beyond_us`` is the time of a step outside its kernels: waiting, and lower clocks without profiler.
    """
    busy = sum(row.us for row in profile_rows)
    return {
        "steps": profile.steps,
        "step_us": round(profile.step_us, 1),
        "busy_us": round(busy, 1),
        "beyond_us": round(max(0.0, profile.step_us - busy), 1),
        "gaps_us": round(profile.gaps_us, 1),
        "ceilings": None if ceilings is None else {"copy": ceilings.copy, **ceilings.matrix},
        "rows": [
            {
                "what": row.what,
                "us": round(row.us, 1),
                "launches": round(row.launches, 2),
                "floor_us": None if row.floor_us is None else round(row.floor_us, 1),
            }
            for row in profile_rows
        ],
    }


def of_run(trainer: Trainer, log: Callable[[str], None]) -> dict[str, Any] | None:
    """Return a run's profile as plain data; None if it has none, with the reason in ``log`` if one was
    requested. The device's ceilings are measured now if they never were."""
    profile, config, model = trainer.profiler.profile, trainer.config, trainer.plan.model
    if profile is None:
        if trainer.profiler.steps is not None:
            log("no profile: the run was too short, or something was due too often between its steps")
        return None
    ceilings = measured_ceilings.ceilings(trainer.strategy.device.type, progress=log)
    batch = config.micro_batch_size(trainer.strategy.world)
    tokens = batch * config.length
    names = {row_of(launch, tokens, model.padded_vocab) for launch in profile.launches}
    limits: Limits = {}
    if ceilings is not None:
        limits = step_limits(
            model,
            batch=batch,
            length=config.length,
            accumulate=config.accumulate,
            dtype=config.dtype,
            mlp=next((n for n in ("mlp_gelu", "linear_gelu") if f"{n} forward" in names), "gelu"),
            ceilings=ceilings,
        )
    return to_json(profile, rows(profile, tokens, model.padded_vocab, limits), ceilings)


HEAD = ("operator", "time per step", "of the step", "launches", "limit", "of limit")


def table_rows(profile: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the rows of a table with ``HEAD``, from a record's profile. The last one is the time of a
    step outside its kernels."""
    # Under the profiler kernels can take longer than a step without it.
    step_us = max(profile["step_us"], profile["busy_us"])
    result: list[tuple[str, ...]] = []
    for row in profile["rows"]:
        limit = row["floor_us"]
        share = "–" if not limit or not row["us"] else f"{100 * limit / row['us']:.0f} %"
        result.append(
            (
                row["what"],
                _ms(row["us"]),
                f"{100 * row['us'] / step_us:.1f} %",
                f"{row['launches']:g}",
                "–" if limit is None else _ms(limit),
                share,
            )
        )
    beyond = profile["beyond_us"]
    result.append(("outside kernels", _ms(beyond), f"{100 * beyond / step_us:.1f} %", "", "", ""))
    return result


def text_lines(profile: dict[str, Any]) -> list[str]:
    """Return the table as lines for a terminal."""
    table = [HEAD, *table_rows(profile)]
    widths = [max(len(line[i]) for line in table) for i in range(len(HEAD))]
    lines = []
    for cells in table:
        name, *numbers = zip(cells, widths, strict=True)
        columns = [name[0].ljust(name[1]), *(text.rjust(width) for text, width in numbers)]
        lines.append("  ".join(columns).rstrip())
    step, busy, gaps = (_ms(profile[key]) for key in ("step_us", "busy_us", "gaps_us"))
    return [*lines, f"step {step}, operators {busy}; gaps between kernels under the profiler {gaps}"]


def _ms(us: float) -> str:
    return f"{us / 1000:.3f} ms" if us < 1000 else f"{us / 1000:.2f} ms"
