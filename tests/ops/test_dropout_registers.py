"""Machine code of the dropout kernels: no element is read from a register that a comparison overwrote.

`VIMNMX.U16x2` compares random words. It returns two predicates, and writes a maximum, which nothing uses, to
a register. ptxas (CUDA 13.0) once chose a register whose upper half still held a float16 element: the code
then read random words as that element, NaN among them. A GPU run showed it; this test needs no GPU.
"""

from __future__ import annotations

import re

import pytest
import torch

from weft.backends import disassemble
from weft.backends.nvrtc import CudaSource
from weft.core import registry
from weft.ops.norms import with_cuda
from weft.ops.norms.configs import choose_backward, choose_forward
from weft.ops.norms.kernel_variant import KernelVariant

COMPARISON = re.compile(r"VIMNMX\.U16x2\S* R(\d+), P")
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:(@!?U?P\w+) )?(\S+) ?(.*?)\s*;")
# The faulty code of sm_90: it reads the second element of a word after the words were compared.
FAULT = """
/*0010*/ PRMT R21, R28, 0x7632, R21 ;
/*0020*/ VIMNMX.U16x2 R21, P5, P6, R28, R26, !PT ;
/*0030*/ HADD2.F32 R10, -RZ, R2.H0_H0 ;
/*0040*/ HADD2.F32 R21, -RZ, R21.H1_H1 ;
"""


def reads_of_maxima(sass: str) -> list[str]:
    """Return the instructions that read a register half written only by a comparison's maximum.

    The search for each comparison ends at a branch or where the register is written again.
    """
    instructions = [m.groups() for m in INSTRUCTION.finditer(sass)]
    faults = []
    for i, (_, opcode, operands) in enumerate(instructions):
        comparison = COMPARISON.match(f"{opcode} {operands}")
        if not comparison:
            continue
        number, low_is_maximum = int(comparison[1]), True
        register = f"R{number}"
        for guard, opcode, operands in instructions[i + 1 :]:
            if opcode.startswith(("BRA", "EXIT", "RET")):
                break
            parts = [p.strip().replace(".reuse", "") for p in operands.split(",")]
            if opcode == "PRMT" and [parts[0], *parts[2:]] == [register, "0x7632", register]:
                low_is_maximum = False  # PRMT 0x7632 combines the upper half with another half
                continue
            stores = opcode.startswith(("ST", "RED", "BAR"))  # these have no destination register
            sources = [p for p in parts[0 if stores else 1 :] if re.search(rf"\b{register}\b", p)]
            reads_low = (opcode == "IMAD.U32" and parts[2] == "0x10000") or ".H0_H0" in "".join(sources)
            if sources and (low_is_maximum or not reads_low):
                faults.append(f"{opcode} {operands}")
                break
            destination = re.fullmatch(r"R(\d+)", parts[0])
            size = 4 if ".128" in opcode else 2 if ".64" in opcode or "WIDE" in opcode else 1
            # A predicated write may not happen: the search goes on.
            overwrites = destination and 0 <= number - int(destination[1]) < size
            if overwrites and not (stores or guard):
                break
    return faults


def _assert_no_faults(source: CudaSource, arch: int) -> None:
    assert not reads_of_maxima(disassemble.sass(source.compile(f"sm_{arch}"))), source.label


def test_the_faulty_code_is_recognised() -> None:
    assert reads_of_maxima(FAULT) == ["HADD2.F32 R21, -RZ, R21.H1_H1"]
    assert not reads_of_maxima(FAULT.replace("/*0030*/", "/*0028*/ LDG.E.128 R20, desc[UR4] ;\n"))


def test_float16_elements_have_registers_of_their_own() -> None:
    """Compile the forward that failed on a GPU, for rows of 17 vectors, and its backward."""
    variant = KernelVariant(
        x_dtype=torch.float16,
        weight_dtype=torch.float32,
        vec_width=8,
        centred=True,
        residual=True,
        dropout=True,
    )
    backward = choose_backward(136, variant, with_cuda.SM90_SMEM, 1)
    assert backward is not None
    _assert_no_faults(with_cuda.forward_source(variant, choose_forward(136, variant, 0)), 90)
    _assert_no_faults(with_cuda.backward_source(variant, backward), 90)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("name", ["dropout", "dropout_add_layer_norm"])
def test_shipped_dropout_kernels_have_no_faults(name: str, arch: int) -> None:
    for source in registry.implementation(name, "cuda").aot_kernels:
        assert isinstance(source, CudaSource)
        _assert_no_faults(source, arch)
