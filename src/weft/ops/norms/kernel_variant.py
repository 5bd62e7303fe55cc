"""The properties of a norm that one CUDA program is compiled for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.ops._common.layout import CUDA_TYPES, dtype_name


@dataclass(frozen=True, kw_only=True)
class KernelVariant:
    """The properties that one program is compiled for; ``vec_width`` is in elements.

    ``peel`` is ``PEEL`` of row_view.cuh: how 16-byte vectors move rows that are not whole aligned vectors.
    """

    x_dtype: torch.dtype
    weight_dtype: torch.dtype
    vec_width: int
    centred: bool
    residual: bool
    dropout: bool = False
    peel: int = 0

    @property
    def has_aligned_rows(self) -> bool:
        """True if rows are whole vectors of 16 bytes, which the bulk copy engine requires."""
        return self.vec_width * self.x_dtype.itemsize == 16 and not self.peel

    @property
    def macros(self) -> dict[str, object]:
        return {
            "WEFT_T": CUDA_TYPES[self.x_dtype],
            "WEFT_W": CUDA_TYPES[self.weight_dtype],
            "CENTRED": int(self.centred),
            "RESIDUAL": int(self.residual),
            **({"WITH_DROPOUT": 1} if self.dropout else {}),
            **({"PEEL": self.peel} if self.peel else {}),
        }

    @property
    def label(self) -> str:
        flags = f"{int(self.centred)}{int(self.residual)}" + "1" * self.dropout
        peel = f"-peel{self.peel}" if self.peel else ""
        return f"{dtype_name(self.x_dtype)}-{dtype_name(self.weight_dtype)}-{flags}{peel}"
