"""Attention's Triton kernels as a GPU user gets them compiled: the bench cases' and a few more."""

from __future__ import annotations

from typing import Any

from weft.backends.triton_jit import TritonSpecimen
from weft.ops.attention.backward import attention_backward_queries
from weft.ops.attention.backward_keys import attention_backward_keys
from weft.ops.attention.configs import NARROW, SINGLE, WIDE, Config
from weft.ops.attention.forward import attention_forward

KERNELS = {
    "forward": attention_forward,
    "queries": attention_backward_queries,
    "keys": attention_backward_keys,
}
FLOATS = ("scale", "factor", "rescale")
WHOLE = ("low", "high", "threshold", "heads", "group")  # 16 does not divide these


def specimen(
    kind: str, config: Config, dtype: str, d: int, *, causal: bool = True, tma: bool = False
) -> TritonSpecimen:
    """One kernel for contiguous tensors whose lengths 16 divides."""
    kernel = KERNELS[kind]
    flags = {"CAUSAL": causal, "PADDED": False, "DROPOUT": False, "TMA": tma}
    sizes = {"D": d, "DP": 1 << (d - 1).bit_length(), "BM": config.bm, "BN": config.bn}
    signature: dict[str, Any] = {}
    for name in kernel.arg_names:
        if name in flags or name in sizes:
            signature[name] = (flags | sizes)[name]
        elif name == "rows_source":
            signature[name] = f"tensordesc<fp32[1, {config.bm}]>" if tma else "*fp32"
        elif name.endswith("_source"):
            rows = config.bm if name in ("q_source", "grad_source") else config.bn
            described = f"tensordesc<{dtype}[1, 1, {rows}, {sizes['DP']}]>"
            signature[name] = described if tma else f"*{dtype}"
        elif name.endswith("_ptr"):
            signature[name] = "*fp32" if name in ("lse_ptr", "rows_ptr") else f"*{dtype}"
        elif name == "lengths":
            signature[name] = "*i32"
        else:
            signature[name] = "fp32" if name in FLOATS else "i32" if name in WHOLE else "i32:16"
    parts = [kind, dtype, str(d), f"{config.bm}x{config.bn}x{config.stages}"]
    return TritonSpecimen(
        label="-".join([*parts, "descriptors" if tma else "pointers"]),
        kernel=kernel,
        signature=signature,
        num_warps=config.warps,
        num_stages=config.stages,
        min_arch=90 if tma else 80,
    )


SPECIMENS = (
    *(specimen(kind, WIDE[kind][d], "bf16", d, tma=True) for kind in KERNELS for d in (64, 128)),
    *(specimen(kind, NARROW[kind][128], "bf16", 128) for kind in KERNELS),
    *(specimen(kind, SINGLE[kind][64], "fp32", 64) for kind in KERNELS),
)
