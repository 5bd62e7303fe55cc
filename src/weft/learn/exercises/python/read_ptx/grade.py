"""Grade the answers against what the listing says; the grader has a listing of its own."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from weft.learn.candidate import Candidate
from weft.learn.grading import require

WRONG = "st is a store"
LUCKY = "in all loads together"


LISTING = """
 1  ld.param.u64   %rd1, [x];
 2  ld.param.u64   %rd2, [y];
 3  ld.param.f32   %f1, [a];
 4  ld.param.u32   %r3, [n4];
 5  mov.u32        %r4, %ntid.x;
 6  shl.b32        %r5, %r4, 1;
 7  mov.u32        %r6, %ctaid.x;
 8  mov.u32        %r7, %tid.x;
 9  mad.lo.s32     %r1, %r5, %r6, %r7;
10  add.s32        %r2, %r1, %r4;
11  setp.ge.s32    %p1, %r2, %r3;
12  @%p1 bra       $L__BB0_2;
13  cvta.to.global.u64     %rd3, %rd2;
14  cvta.to.global.u64     %rd4, %rd1;
15  mul.wide.s32   %rd5, %r1, 16;
16  add.s64        %rd6, %rd4, %rd5;
17  ld.global.nc.v4.f32    {%f2, %f3, %f4, %f5}, [%rd6];
18  mul.wide.s32   %rd7, %r2, 16;
19  add.s64        %rd8, %rd4, %rd7;
20  ld.global.nc.v4.f32    {%f10, %f11, %f12, %f13}, [%rd8];
21  add.s64        %rd9, %rd3, %rd5;
22  mul.f32        %f18, %f5, %f1;
23  mul.f32        %f19, %f4, %f1;
24  mul.f32        %f20, %f3, %f1;
25  mul.f32        %f21, %f2, %f1;
26  st.global.v4.f32       [%rd9], {%f21, %f20, %f19, %f18};
27  add.s64        %rd10, %rd3, %rd7;
28  mul.f32        %f22, %f13, %f1;
29  mul.f32        %f23, %f12, %f1;
30  mul.f32        %f24, %f11, %f1;
31  mul.f32        %f25, %f10, %f1;
32  st.global.v4.f32       [%rd10], {%f25, %f24, %f23, %f22};
   $L__BB0_2:
33  ret;
"""


def grade(candidate: Candidate, generator: np.random.Generator) -> Iterator[str]:
    module = candidate.module
    lines = {int(n): code for n, code in re.findall(r"^ *(\d+)  (.*)", LISTING, re.M)}
    same = getattr(module, "LISTING", "").split() == LISTING.split()
    yield require(same, "listing", "the listing was changed: take it from the starting file again")
    loads = [n for n, code in lines.items() if code.startswith("ld.global")]
    answers = getattr(module, "LOADS", None)
    reason = f"expected the lines that load from global memory, got {answers}"
    if isinstance(answers, list) and any(lines.get(n, "").startswith("st.") for n in answers):
        reason += ". One of them is an st, and st is a store"
    elif isinstance(answers, list) and any("param" in lines.get(n, "") for n in answers):
        reason += ". ld.param reads an argument of the kernel"
    yield require(answers == loads, "LOADS", reason)
    guard = next(n for n, code in lines.items() if code.startswith("@%p"))
    got = getattr(module, "GUARD", None)
    reason = f"expected the line of the jump under a predicate, got {got}"
    yield require(got == guard, "GUARD", reason + ". That line only compares" * (got == guard - 1))
    elements = sum(lines[n].partition("{")[2].partition("}")[0].count("%f") for n in loads)
    got = getattr(module, "ELEMENTS", None)
    reason = f"got {got}: count the numbers in all loads together"
    yield require(got == elements, "ELEMENTS", reason)
    scale = next(code for code in lines.values() if code.startswith("mul.wide"))
    distance, got = int(scale.rstrip(";").split()[-1]), getattr(module, "DISTANCE", None)
    reason = f"got {got}: by which number of bytes is the index of a thread multiplied?"
    yield require(got == distance, "DISTANCE", reason)
