"""Dropout's kernels as ptxas leaves them: no element is read from a register that the comparison of
random words has written over.

`VIMNMX.U16x2` answers by two predicates, and its maximum, which nobody wants, goes to a register.
ptxas (CUDA 13.0) has given it one whose upper half still held a float16 element: what was read
after was random words, and a NaN where those are one. A GPU showed it; here it is seen without.
"""

from __future__ import annotations

import re

import pytest
import torch

from weft.backends import disassemble
from weft.backends.nvrtc import CudaSource
from weft.core import registry
from weft.ops._shared import norm_cuda
from weft.ops._shared.norm_configs import Kind, configure, configure_backward

COMPARED = re.compile(r"VIMNMX\.U16x2\S* R(\d+), P")
LINE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:(@!?U?P\w+) )?(\S+) ?(.*?)\s*;")
# As sm_90's code was: the second element of a word, after the words were compared.
FAULT = """
/*0010*/ PRMT R21, R28, 0x7632, R21 ;
/*0020*/ VIMNMX.U16x2 R21, P5, P6, R28, R26, !PT ;
/*0030*/ HADD2.F32 R10, -RZ, R2.H0_H0 ;
/*0040*/ HADD2.F32 R21, -RZ, R21.H1_H1 ;
"""


def reads_of_maxima(sass: str) -> list[str]:
    """The instructions that read what only a comparison's maximum has written, up to a branch."""
    lines = [m.groups() for m in LINE.finditer(sass)]
    found = []
    for i, (_, code, operands) in enumerate(lines):
        compared = COMPARED.match(f"{code} {operands}")
        if not compared:
            continue
        register, low = int(compared[1]), True  # whether the lower half is the maximum's still
        mine = f"R{register}"
        for guard, code, operands in lines[i + 1 :]:
            if code.startswith(("BRA", "EXIT", "RET")):
                break
            parts = [p.strip().replace(".reuse", "") for p in operands.split(",")]
            if code == "PRMT" and [parts[0], *parts[2:]] == [mine, "0x7632", mine]:
                low = False  # another's half beside the upper one
                continue
            stores = code.startswith(("ST", "RED", "BAR"))
            read = [p for p in parts[0 if stores else 1 :] if re.search(rf"\b{mine}\b", p)]
            lower = (code == "IMAD.U32" and parts[2] == "0x10000") or ".H0_H0" in "".join(read)
            if read and (low or not lower):
                found.append(f"{code} {operands}")
                break
            to = re.fullmatch(r"R(\d+)", parts[0])
            size = 4 if ".128" in code else 2 if ".64" in code or "WIDE" in code else 1
            if to and not (stores or guard) and 0 <= register - int(to[1]) < size:
                break
    return found


def _hold(source: CudaSource, arch: int) -> None:
    assert not reads_of_maxima(disassemble.sass(source.compile(f"sm_{arch}"))), source.label


def test_an_element_written_over_by_a_comparison_is_seen() -> None:
    assert reads_of_maxima(FAULT) == ["HADD2.F32 R21, -RZ, R21.H1_H1"]
    assert not reads_of_maxima(FAULT.replace("/*0030*/", "/*0028*/ LDG.E.128 R20, desc[UR4] ;\n"))


def test_float16_is_dropped_from_registers_of_its_own() -> None:
    """The rows that failed on a GPU, of 17 accesses, and their way back."""
    half, wide = torch.float16, torch.float32
    kind = Kind(x=half, w=wide, access=8, centred=True, add=True, drop=True)
    back = configure_backward(136, kind, norm_cuda.SM90, 1)
    assert back is not None
    for source in (
        norm_cuda.forward_source(kind, configure(136, kind, 0)),
        norm_cuda.backward_source(kind, back),
    ):
        _hold(source, 90)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("name", ["dropout", "dropout_add_layer_norm"])
def test_what_ships_with_dropout_reads_no_maximum(name: str, arch: int) -> None:
    for source in registry.implementation(name, "cuda").specimens:
        assert isinstance(source, CudaSource)
        _hold(source, arch)
