"""A profile by operator: the time of a step, its share, its launches, and what it cannot go below.

Rows are Weft's operators forward and backward, linear layers by product (forward, dx, dW and the
sums of the bias' gradient), and what the optimizer does; what is none of these goes by its kernel.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weft.core import registry
from weft.gpt2.floors import floors
from weft.gpt2.profiling import Launch, Profile
from weft.workbench import limits

if TYPE_CHECKING:
    from weft.gpt2.training import Run

Floors = dict[str, float | None]
NODE = "autograd::engine::evaluate_function: "
OURS = re.compile(r"weft::(\w+?)(_backward)?$")
GROUPS = {
    **dict.fromkeys(("layer_norm", "add_layer_norm", "dropout_add_layer_norm"), "norms"),
    **dict.fromkeys(("linear_cross_entropy", "cross_entropy"), "head and loss"),
    "adamw": "optimizer",
}
# What torch's own operators and autograd's nodes are called, by a part of the name.
CALLS = (
    ("cross_entropy_loss", "head and loss"),
    ("scaled_dot_product", "attention"),
    ("layer_norm", "norms"),
    ("aten::gelu", "gelu"),
    ("aten::embedding", "embedding"),
    ("aten::linear", "linear"),
    ("aten::addmm", "linear"),
)
NODES = (
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
UPDATES = (("_foreach_norm", "gradients' norm"), ("linalg_vector_norm", "gradients' norm"))
LINEAR = ("linear", "linear_gelu")
KERNELS = (("adamw", "optimizer"), ("Memcpy", "copies"), ("Memset", "copies"))
LEAST = 0.002  # of the busy time: rows below are told together


@dataclass(frozen=True, kw_only=True)
class Row:
    """``us`` and ``launches`` are a step's; ``floor_us`` None where none is known."""

    what: str
    us: float
    launches: float
    floor_us: float | None

    @property
    def efficiency(self) -> float | None:
        """The floor's share of the time."""
        return self.floor_us / self.us if self.floor_us is not None and self.us else None


def place(one: Launch, tokens: int, vocabulary: int) -> str:
    """The row of a launch, of a step with so many ``tokens`` at once."""
    for name in reversed(one.names):  # what an operator of ours calls within is its own
        if found := OURS.match(name):
            group, back = _group(found[1]), bool(found[2])
            if back and group in LINEAR:
                return f"{group} {_part(one, tokens)}"
            return f"{group} {'backward' if back else 'forward'}"
    node = next((n for n in one.names if n.startswith(NODE)), "").removeprefix(NODE)
    if node:
        return _of_node(node, one, tokens)
    told = " ".join(one.names)
    for part, row in UPDATES:
        if part in told:
            return row
    for part, group in CALLS:
        if part in told:
            head = group == "linear" and any(vocabulary in s for s in one.shapes)
            return "head and loss forward" if head else f"{group} forward"
    for part, row in KERNELS:
        if part in one.kernel:
            return row
    return _short(one.names[-1] if one.names else one.kernel)


def _of_node(node: str, one: Launch, tokens: int) -> str:
    if "weft_" in node:
        named = node.partition("weft_")[2]
        return f"{_group(named)} backward"
    for part, group in NODES:
        if part not in node:
            continue
        if group != "linear":
            return group if " " in group and group.startswith("grad") else f"{group} backward"
        return f"linear {_part(one, tokens) if one.shapes else 'bias'}"
    return _short(node)


def _part(one: Launch, tokens: int) -> str:
    """Which part of a linear layer's backward: dx = g W has a row a token, dW = g^T x sums over
    them, the bias' gradient sums columns; of a kernel that is another, the whole."""
    if one.shapes:
        return "dx" if one.shapes[0][0] == tokens else "dW"
    return "bias" if "column" in one.kernel or "sum" in one.kernel else "backward"


def _group(name: str) -> str:
    """The group of an operator, or of a part of one: ``attention_packed`` is attention."""
    known = [n for n in registry.REGISTRY if name.startswith(n)]
    operator = max(known, key=len, default=name)
    return GROUPS.get(operator, operator)


def _short(name: str) -> str:
    """A kernel's name without its types: ``void at::f<4>(int)`` is ``at::f``."""
    bare = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    return re.split(r"[<(]", bare, maxsplit=1)[0][:60] or name[:60]


def rows(found: Profile, tokens: int, vocabulary: int, least: Floors) -> list[Row]:
    """The rows of a profile, the longest first; those too short to matter as one, last."""
    times: dict[str, list[float]] = {}
    for one in found.launches:
        held = times.setdefault(place(one, tokens, vocabulary), [0.0, 0.0])
        held[0] += one.us / found.steps
        held[1] += one.count / found.steps
    busy = sum(us for us, _ in times.values())
    told, rest = [], [0.0, 0.0]
    for what, (us, count) in sorted(times.items(), key=lambda item: -item[1][0]):
        if us < LEAST * busy and what not in least:
            rest = [rest[0] + us, rest[1] + count]
        else:
            told.append(Row(what=what, us=us, launches=count, floor_us=least.get(what)))
    if rest[1]:
        told.append(Row(what="the rest", us=rest[0], launches=rest[1], floor_us=None))
    return told


def to_json(found: Profile, told: list[Row], ceilings: Any) -> dict[str, Any]:
    """A profile as plain data; microseconds a step."""
    busy = sum(row.us for row in told)
    return {
        "steps": found.steps,
        "step_us": round(found.step_us, 1),
        "busy_us": round(busy, 1),
        "beyond_us": round(max(0.0, found.step_us - busy), 1),
        "gaps_us": round(found.gaps_us, 1),
        "ceilings": None if ceilings is None else {"copy": ceilings.copy, **ceilings.matrix},
        "rows": [
            {
                "what": row.what,
                "us": round(row.us, 1),
                "launches": round(row.launches, 2),
                "floor_us": None if row.floor_us is None else round(row.floor_us, 1),
            }
            for row in told
        ],
    }


def of(run: Run, say: Callable[[str], None]) -> dict[str, Any] | None:
    """A run's profile as plain data; None where it has none, which ``say`` is told of if there
    should be one. The device's ceilings are measured here where that was never done."""
    found, config, model = run.profiler.found, run.config, run.plan.model
    if found is None:
        if run.profiler.steps is not None:
            say("no profile: the run ended before, or something was due too often for it")
        return None
    ceilings = limits.ceilings(run.ranks.device.type, progress=say)
    batch = config.micro(run.ranks.world)
    tokens = batch * config.length
    placed = {place(one, tokens, model.padded_vocab) for one in found.launches}
    least: Floors = {}
    if ceilings is not None:
        least = floors(
            model,
            batch=batch,
            length=config.length,
            parts=config.accumulate,
            dtype=config.dtype,
            fused="linear_gelu forward" in placed,
            ceilings=ceilings,
        )
    return to_json(found, rows(found, tokens, model.padded_vocab, least), ceilings)


HEAD = ("operator", "time a step", "of the step", "launches", "floor", "of the floor")


def cells(told: dict[str, Any]) -> list[tuple[str, ...]]:
    """The rows of a table with ``HEAD``, from a record's profile. The last is what a step takes
    beyond its kernels: waiting, and the lower clocks of a device that no profiler slows down."""
    whole = max(told["step_us"], told["busy_us"])
    found: list[tuple[str, ...]] = []
    for row in told["rows"]:
        floor = row["floor_us"]
        reached = "–" if not floor or not row["us"] else f"{100 * floor / row['us']:.0f} %"
        found.append(
            (
                row["what"],
                _ms(row["us"]),
                f"{100 * row['us'] / whole:.1f} %",
                f"{row['launches']:g}",
                "–" if floor is None else _ms(floor),
                reached,
            )
        )
    beyond = told["beyond_us"]
    found.append(("beyond these", _ms(beyond), f"{100 * beyond / whole:.1f} %", "", "", ""))
    return found


def lines(told: dict[str, Any]) -> list[str]:
    """The table in words, for a terminal."""
    table = [HEAD, *cells(told)]
    widths = [max(len(line[i]) for line in table) for i in range(len(HEAD))]
    found = []
    for line in table:
        first, *others = (
            c.ljust(w) if i == 0 else c.rjust(w)
            for i, (c, w) in enumerate(zip(line, widths, strict=True))
        )
        found.append("  ".join([first, *others]).rstrip())
    step, busy, gaps = (_ms(told[k]) for k in ("step_us", "busy_us", "gaps_us"))
    return [*found, f"a step {step}, operators {busy}; between kernels, profiled, {gaps}"]


def _ms(us: float) -> str:
    return f"{us / 1000:.3f} ms" if us < 1000 else f"{us / 1000:.2f} ms"
