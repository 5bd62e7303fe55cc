"""Cases of attention: q (B, H, Tq, D), k and v (B, Hkv, Tk, D), key_lengths (B,); then sinks (H,), slopes of
ALiBi (H,) or (B, H), and a bias, in cases that have them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from weft.core import Case, Input
from weft.core.cases import SHORT
from weft.ops.attention.mask import BOTTOM_RIGHT

DTYPES = ("float32", "float16", "bfloat16")
GPU = ("cuda",)


def _generate(case: Case, seed: int, device: str) -> Sequence[torch.Tensor]:
    """Generate normal values, and key lengths from 0 to Tk: 0 for the first batch, Tk for the second.

    Slopes of ALiBi are 2^-1, 2^-2, ..., another power for each head. With ``values="neginf"`` a bias has
    columns of -inf, and its last query sees no key; sinks stay normal but for the first, which is -inf.
    """
    generator = torch.Generator(device)
    generator.manual_seed(seed)
    lengths = case.inputs[3]

    def normal(i: Input) -> torch.Tensor:
        return torch.randn(i.shape, generator=generator, device=device, dtype=getattr(torch, i.dtype))

    tensors = [normal(i) for i in case.inputs[:3]]
    extras = [_term(i, normal(i)) for i in case.inputs[4:]]
    tk = case.inputs[1].shape[2]
    key_lengths = torch.randint(0, tk + 1, lengths.shape, generator=generator, device=device)
    key_lengths[:1] = 0
    key_lengths[1:2] = tk
    return (*tensors, key_lengths.int(), *extras)


def _term(spec: Input, x: torch.Tensor) -> torch.Tensor:
    """Return a term of the scores; ``x`` are normal values of its shape."""
    if spec.name == "alibi_slopes":
        power = torch.arange(x.numel(), device=x.device, dtype=x.dtype).view(x.shape)
        return torch.exp2(-1.0 - power)
    if spec.values == "large":  # extreme, and still within the range of float16
        return x * 40
    if spec.values == "neginf" and spec.name == "bias":
        x[..., ::3] = float("-inf")
        x[:, :, -1] = float("-inf")
    elif spec.values == "neginf":
        x[:1] = float("-inf")
    return x


def _case(
    *q: int,
    kv: tuple[int, int] | None = None,
    dtype: str = "float32",
    layouts: tuple[str, str, str] = ("contiguous",) * 3,
    tags: str = "check",
    devices: tuple[str, ...] = ("cpu", "cuda"),
    sinks: str | None = None,
    alibi: int | None = None,
    bias: tuple[int, int, int, int] | None = None,
    bias_dtype: str | None = None,
    values: str = "normal",
    **params: Any,
) -> Case:
    """Return a case of queries ``q`` (B, H, Tq, D) and ``kv`` (Hkv, Tk), by default (H, Tq).

    Its name tells these sizes, e.g. ``bf16-4x16x4096x128-causal`` or ``fp32-1x4x33x32-2x50``. ``sinks`` and
    ``bias_dtype`` are dtypes, ``alibi`` the number of dimensions of the slopes, and ``values`` those of
    sinks and bias, or of the queries where there are neither.
    """
    b, h, t, d = q
    parts = [SHORT[dtype], f"{b}x{h}x{t}x{d}"]
    if kv is not None:
        parts.append(f"{kv[0]}x{kv[1]}")
    parts += ["bottom-right"] if params.get("alignment") else ["causal"] if params.get("causal") else []
    parts += [f"{name}{params[name]:g}" for name in ("window", "softcap") if params.get(name)]
    parts += ["padded"] if params.get("padded") else []
    parts += ["dropout"] if params.get("dropout_p") else []
    parts += ["-".join(layouts)] if layouts != ("contiguous",) * 3 else []
    heads, keys = kv or (h, t)
    extras: dict[str, tuple[tuple[int, ...], str]] = {}
    if sinks:
        extras["sinks"] = ((h,), sinks)
        parts += ["sinks"]
    if alibi:
        extras["alibi_slopes"] = ((b, h)[2 - alibi :], "float32")
        parts += ["alibi" if alibi == 1 else "alibi2d"]
    if bias:
        extras["bias"] = (bias, bias_dtype or dtype)
        # A bias of every score needs no sizes, and names of cases fit a line of 80 columns.
        is_full = bias == (b, h, t, keys)
        parts += ["bias" if is_full else "bias" + "x".join(map(str, bias))]
    parts += [values] if values != "normal" else []
    shapes = {"q": (b, h, t, d), "k": (b, heads, keys, d), "v": (b, heads, keys, d)}
    inputs = [
        Input(name=name, shape=shape, dtype=dtype, layout=layout)
        for (name, shape), layout in zip(shapes.items(), layouts, strict=True)
    ]
    if not extras:
        inputs[0] = replace(inputs[0], values=values)
    inputs += [Input(name="key_lengths", shape=(b,), dtype="int32")]
    inputs += [
        Input(name=name, shape=shape, dtype=d, values="normal" if name == "alibi_slopes" else values)
        for name, (shape, d) in extras.items()
    ]
    case = Case(
        name="-".join(parts),
        inputs=tuple(inputs),
        params={"padded": False, **params} | ({"terms": "+".join(extras)} if extras else {}),
        tags=frozenset({tags}),
        devices=devices,
    )
    return replace(case, draw=partial(_generate, case)) if params.get("padded") or extras else case


DROP: dict[str, Any] = {"dropout_p": 0.3, "seed": 2**40 + 12345}
LATE: dict[str, Any] = {"causal": True, "alignment": BOTTOM_RIGHT}
CHECKS = [
    _case(1, 2, 40, 32),
    _case(1, 1, 49, 32, causal=True),
    _case(1, 1, 20, 32, dtype="float16", causal=True),
    _case(1, 2, 49, 64, dtype="bfloat16", causal=True),
    _case(1, 2, 20, 32, kv=(1, 37)),
    _case(1, 1, 20, 80, causal=True, scale=0.2),
    _case(1, 1, 40, 32, kv=(1, 19), causal=True),
    _case(3, 1, 20, 32, kv=(1, 37), padded=True),
    _case(2, 2, 20, 32, kv=(1, 20), causal=True, padded=True, **DROP),
    _case(1, 2, 70, 32, kv=(1, 75), causal=True, window=20),
    _case(1, 1, 20, 32, dtype="float16", kv=(1, 61), window=17, **LATE),
    _case(1, 2, 37, 32, kv=(1, 50), causal=True, softcap=2.0),
    _case(3, 1, 35, 32, kv=(1, 45), padded=True, window=9, softcap=5.0, **LATE),
]
EDGES = [
    _case(1, 2, 1, 32, kv=(2, 5), tags="edge"),
    _case(1, 2, 20, 32, layouts=("expanded", "sliced", "shifted"), tags="edge"),
    _case(1, 1, 40, 32, kv=(1, 19), tags="edge", **LATE),  # the first queries see no key
    _case(1, 1, 60, 32, kv=(1, 19), causal=True, window=7, tags="edge"),  # the last queries see none
    _case(1, 1, 5, 32, kv=(1, 33), window=1, tags="edge", **LATE),
    *(_case(1, 2, 35, 32, kv=(1, 21), dtype=d, values="nan", tags="edge") for d in DTYPES),
]
ON_GPU = [
    _case(1, 2, 3, 32, kv=(1, 0), tags="edge", devices=GPU),
    _case(2, 1, 0, 32, kv=(1, 5), tags="edge", devices=GPU),
    _case(1, 2, 70, 32, layouts=("transposed", "sliced", "shifted"), tags="edge", devices=GPU),
    _case(2, 4, 513, 64, dtype="bfloat16", causal=True, devices=GPU),
    _case(1, 8, 300, 128, kv=(2, 777), dtype="bfloat16", devices=GPU),
    _case(1, 2, 700, 128, dtype="bfloat16", causal=True, devices=GPU),
    _case(1, 2, 257, 192, dtype="float16", devices=GPU),
    _case(1, 2, 330, 256, dtype="bfloat16", causal=True, devices=GPU),
    _case(2, 2, 333, 96, dtype="bfloat16", causal=True, devices=GPU),
    _case(1, 2, 200, 64, causal=True, devices=GPU),
    _case(1, 1, 150, 128, devices=GPU),
    _case(1, 1, 70, 256, causal=True, devices=GPU),
    _case(4, 2, 500, 80, dtype="bfloat16", padded=True, devices=GPU),
    _case(2, 2, 300, 64, dtype="bfloat16", causal=True, devices=GPU, **DROP),
    _case(2, 3, 1000, 32, dtype="float16", devices=GPU),
    _case(1, 2, 200, 64, dtype="bfloat16", layouts=("shifted",) * 3, devices=GPU, tags="edge"),
    _case(2, 4, 1000, 64, kv=(2, 1000), dtype="bfloat16", causal=True, window=200, devices=GPU),
    _case(1, 4, 777, 128, dtype="bfloat16", causal=True, window=129, devices=GPU),
    _case(1, 2, 300, 128, kv=(2, 1111), dtype="bfloat16", devices=GPU, **LATE),
    _case(1, 2, 700, 64, kv=(1, 333), dtype="float16", window=65, devices=GPU, **LATE),
    _case(2, 2, 513, 128, dtype="bfloat16", causal=True, softcap=3.0, devices=GPU),
    _case(
        3, 2, 257, 80, kv=(1, 500), dtype="float16", padded=True, softcap=2.0, window=90, devices=GPU, **LATE
    ),
    _case(1, 2, 300, 256, dtype="bfloat16", causal=True, window=100, softcap=50.0, devices=GPU),
    _case(2, 2, 300, 64, dtype="bfloat16", causal=True, window=70, devices=GPU, **DROP),
]
BENCH: dict[str, Any] = {"dtype": "bfloat16", "tags": "bench", "devices": GPU}
BENCHES = [
    _case(32, 12, 1024, 64, causal=True, **BENCH),
    _case(4, 16, 4096, 128, causal=True, **BENCH),
    _case(4, 16, 4096, 128, **BENCH),
    _case(2, 16, 8192, 64, causal=True, **BENCH),
    _case(1, 16, 16384, 128, causal=True, **BENCH),
    _case(4, 32, 2048, 128, kv=(8, 2048), causal=True, **BENCH),
    _case(4, 32, 2048, 64, kv=(8, 2048), causal=True, **BENCH),
    _case(4, 16, 4096, 80, causal=True, **BENCH),
    _case(4, 16, 4096, 96, causal=True, **BENCH),
    _case(16, 8, 512, 64, **BENCH),
    _case(1, 16, 16384, 128, causal=True, window=1024, **BENCH),
    _case(4, 16, 4096, 128, causal=True, softcap=50.0, **BENCH),
    _case(1, 4, 256, 64, causal=True, tags="bench", devices=("cpu",)),
]
ALL: dict[str, Any] = {"sinks": "float32", "alibi": 1}
TERMS = [
    _case(1, 2, 49, 32, causal=True, sinks="float32"),
    _case(2, 2, 20, 32, kv=(1, 37), dtype="bfloat16", sinks="bfloat16"),
    _case(1, 2, 35, 32, kv=(1, 45), dtype="float16", sinks="float32", window=9, values="large", **LATE),
    _case(3, 2, 20, 32, kv=(1, 37), padded=True, sinks="float32", dropout_p=0.3, seed=2**40 + 12345),
    _case(1, 2, 49, 32, causal=True, alibi=1),
    _case(2, 2, 20, 32, kv=(1, 37), dtype="bfloat16", alibi=2),
    _case(3, 2, 20, 32, kv=(1, 37), padded=True, alibi=2, **LATE),
    _case(1, 2, 37, 32, kv=(1, 50), bias=(1, 2, 37, 50)),
    _case(2, 4, 20, 32, kv=(2, 37), dtype="bfloat16", causal=True, bias=(1, 4, 20, 37)),
    _case(2, 2, 35, 32, kv=(1, 45), bias=(2, 1, 1, 45), softcap=2.0),
    _case(2, 2, 35, 32, kv=(1, 21), bias=(1, 1, 35, 21), window=9, causal=True),
    # Such a bias changes no weight: its gradient is 0, and what is computed is the rounding of the outputs.
    _case(2, 2, 20, 32, bias=(1, 2, 20, 1), causal=True),
    _case(1, 2, 35, 32, kv=(2, 19), bias=(1, 2, 35, 19), values="neginf"),
    _case(1, 2, 20, 80, kv=(1, 33), dtype="float16", bias=(1, 1, 1, 1), values="large"),
    _case(2, 2, 37, 32, kv=(1, 50), bias=(2, 2, 37, 50), padded=True, softcap=3.0, window=20, **ALL, **LATE),
    _case(2, 2, 37, 32, kv=(1, 37), dtype="bfloat16", bias=(1, 2, 37, 37), causal=True, **ALL),
]
TERMS_EDGES = [
    _case(1, 2, 40, 32, kv=(1, 19), tags="edge", sinks="float32", alibi=1, **LATE),  # queries without keys
    _case(1, 2, 5, 32, kv=(1, 33), tags="edge", sinks="float32", values="neginf", **LATE),
    _case(1, 2, 3, 32, kv=(1, 0), tags="edge", devices=GPU, bias=(1, 2, 3, 0), **ALL),
]
TERMS_ON_GPU = [
    _case(
        2, 8, 513, 64, kv=(1, 513), dtype="bfloat16", causal=True, window=128, sinks="float32", devices=GPU
    ),
    _case(2, 4, 777, 128, dtype="bfloat16", causal=True, alibi=1, devices=GPU),
    _case(2, 4, 300, 128, kv=(2, 777), dtype="bfloat16", bias=(1, 4, 300, 777), devices=GPU, **ALL, **LATE),
    _case(2, 2, 257, 256, dtype="float16", bias=(2, 2, 257, 257), devices=GPU),
    _case(3, 2, 333, 80, dtype="bfloat16", bias=(3, 1, 1, 333), padded=True, devices=GPU, **ALL),
    _case(1, 2, 200, 64, bias=(1, 1, 200, 200), causal=True, devices=GPU, **ALL),
]
TERMS_BENCHES = [
    _case(4, 64, 4096, 64, kv=(8, 4096), causal=True, sinks="float32", **BENCH),
    _case(4, 64, 4096, 64, kv=(8, 4096), causal=True, window=128, sinks="float32", **BENCH),
    _case(4, 16, 4096, 128, causal=True, alibi=1, **BENCH),
    _case(4, 16, 4096, 128, causal=True, bias=(1, 16, 4096, 4096), **BENCH),
]
CASES = (*CHECKS, *EDGES, *ON_GPU, *BENCHES, *TERMS, *TERMS_EDGES, *TERMS_ON_GPU, *TERMS_BENCHES)
