"""Grade the answers against what the listing says; the grader has a listing of its own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from weft.learn.candidate import Candidate
from weft.learn.grading import require

WRONG = "global memory"
LUCKY = "before the label"


LISTING = """
00d0             IMAD.MOV.U32 R2, RZ, RZ, 0x10 ;
00e0             IADD3 R4, R0.reuse, 0x200, RZ ;
00f0             IMAD.MOV.U32 R25, RZ, RZ, RZ ;
0100             CS2R R6, SRZ ;
0110             IMAD.WIDE R2, R0, R2, c[0x0][0x160] ;
0120             CS2R R10, SRZ ;
0130             STL [R1], R4 ;
0140             CS2R R8, SRZ ;
0150             IMAD.MOV.U32 R24, RZ, RZ, R3 ;
0160             MOV R0, R2 ;
0170             CS2R R18, SRZ ;
0180             CS2R R16, SRZ ;
0190             CS2R R4, SRZ ;
         .L_x_2:
01a0             LDL R2, [R1] ;
01b0             MOV R23, 0x8 ;
01c0             MOV R3, R24 ;
01d0             IADD3 R22, R2, -0x200, RZ ;
01e0             IMAD.MOV.U32 R2, RZ, RZ, R0 ;
01f0             IMAD.WIDE R22, R22, R23, c[0x0][0x168] ;
0200             LDG.E.128.CONSTANT R12, [R2.64] ;
0210             LDG.E.64.CONSTANT R20, [R22.64+0x800] ;
0220             LDG.E.64.CONSTANT R2, [R22.64] ;
0230             LDG.E.64.CONSTANT R22, [R22.64+0x1000] ;
0240             HMMA.16816.F32 R16, R12, R2, R16 ;
0250             LDL.LU R3, [R1] ;
0260             IADD3 R25, R25, 0x1, RZ ;
0270             ISETP.GE.AND P0, PT, R25, c[0x0][0x178], PT ;
0280             IADD3 R0, P1, R0, 0x1000, RZ ;
0290             HMMA.16816.F32 R8, R12, R20, R8 ;
02a0             IMAD.X R24, RZ, RZ, R24, P1 ;
02b0             HMMA.16816.F32 R4, R12, R22, R4 ;
02c0             IADD3 R3, R3, 0x300, RZ ;
02d0             STL [R1], R3 ;
02e0        @!P0 BRA `(.L_x_2) ;
02f0             S2R R3, SR_TID.X ;
0300             MOV R2, 0x10 ;
0310             IMAD.WIDE R2, R3, R2, c[0x0][0x170] ;
0320             STG.E.128 [R2.64], R16 ;
0330             STG.E.128 [R2.64+0x1000], R8 ;
0340             STG.E.128 [R2.64+0x2000], R4 ;
0350             EXIT ;
"""


def grade(candidate: Candidate, generator: np.random.Generator) -> Iterator[str]:
    module = candidate.module
    same = getattr(module, "LISTING", "").split() == LISTING.split()
    yield require(same, "listing", "the listing was changed: take it from the starting file again")
    code = {int(at, 16): text.strip() for at, text in re.findall(r"^([0-9a-f]{4}) (.*)", LISTING, re.M)}

    def addresses(pattern: str) -> list[int]:
        return [at for at, text in code.items() if re.match(pattern, text)]

    (wide,) = addresses(r"LDG\.E\.128")
    got = getattr(module, "WIDE_LOAD", None)
    reason = f"{_line(code, got)} is no load of 128 bits from global memory"
    yield require(got == wide, "WIDE_LOAD", reason)
    yield _same(code, "TENSOR_CORE", getattr(module, "TENSOR_CORE", None), addresses("HMMA"))
    spills = addresses("LDL|STL")
    yield _same(code, "SPILLS", getattr(module, "SPILLS", None), spills)
    label = re.search(r"\.L_x_2:\n([0-9a-f]{4})", LISTING)
    assert label is not None
    (jump,) = addresses("@!P0 BRA")
    in_loop = [at for at in spills if int(label[1], 16) <= at <= jump]
    got = getattr(module, "SPILLS_A_PASS", None)
    reason = f"got {got}" + ": what stands before the label runs once only" * (got == len(spills))
    yield require(got == len(in_loop), "SPILLS_A_PASS", reason)


def _line(code: dict[int, str], address: Any) -> str:
    if not isinstance(address, int):
        return str(address)
    return f"{address:#06x} ({code.get(address, 'no instruction')})"


def _same(code: dict[int, str], name: str, answers: Any, expected: list[int]) -> str:
    listed = isinstance(answers, list) and all(isinstance(a, int) for a in answers)
    require(listed, name, f"expected a list of addresses, got {answers!r}")
    extra = [a for a in answers if a not in expected]
    reason = f"{len(expected) - len(set(answers) & set(expected))} addresses are missing"
    if extra:
        reason = f"{_line(code, extra[0])} does not belong there"
        if code.get(extra[0], "").startswith(("STG", "LDG")):
            reason += ": that is global memory"
    return require(sorted(answers) == expected, name, reason)
