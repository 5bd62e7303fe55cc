"""Guided reading of PTX, and elements a thread: known lines, and real kernels compiled by NVRTC."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.inspecting import weft
from helpers.sampling import sample
from weft.backends import aot
from weft.cli import inspect, output
from weft.core import registry
from weft.workbench.explain.inspect import facts, ptx, text
from weft.workbench.explain.inspect.compile import compile_kernels
from weft.workbench.explain.inspect.dry_run import dry_run
from weft.workbench.explain.inspect.kernel import ElementsPerThread, Kernel


@pytest.mark.parametrize(
    ("opcode", "kind", "bits"),
    [
        ("ld.global.nc.L1::no_allocate.v4.f32", "global load", 128),
        ("ld.relaxed.gpu.global.u64", "global load", 64),
        ("st.global.cs.v2.u16", "global store", 32),
        ("ld.volatile.shared.f32", "shared load", 32),
        ("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16", "shared load", 128),
        ("stmatrix.sync.aligned.m8n8.shared.b16", "shared store", 32),
        ("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32", "shared store", 32),
        ("ld.local.v2.f32", "local access", 64),
        ("st.u8", "generic access", 8),
        ("ld.const.f32", "constant load", 0),
        ("ld.param.v4.u32", "parameter", 0),
        ("cp.async.cg.shared.global", "async copy", 0),
        ("cp.async.wait_group", "copy group", 0),
        ("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group", "TMA copy", 0),
        ("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32", "TMA copy", 0),
        ("cp.async.bulk.wait_group.read", "copy group", 0),
        ("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16", "tensor core", 0),
        ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", "tensor core", 0),
        ("wgmma.fence.sync.aligned", "tensor core order", 0),
        ("mbarrier.try_wait.parity.shared::cta.b64", "mbarrier", 0),
        ("barrier.cluster.arrive.release.aligned", "cluster barrier", 0),
        ("bar.sync", "block barrier", 0),
        ("bar.warp.sync", "warp barrier", 0),
        ("fence.proxy.async.shared::cta", "fence", 0),
        ("shfl.sync.bfly.b32", "shuffle or vote", 0),
        ("cvta.to.global.u64", "address space", 0),
        ("cvt.rn.bf16x2.f32", "conversion", 0),
        ("cvt.f64.f32", "conversion to f64", 0),
        ("cvt.rn.f32.f64", "conversion to f64", 0),
        ("fma.rn.f64", "float64", 0),
        ("fma.rn.bf16x2", "fma", 0),
        ("mad.lo.s32", "integer multiply", 0),
        ("mul.wide.u16", "integer multiply", 0),
        ("max.NaN.f32", "float arithmetic", 0),
        ("max.s64", "integer", 0),
        ("div.full.f32", "fast function", 0),
        ("div.rn.f32", "exact division", 0),
        ("rem.u32", "integer division", 0),
        ("setp.lt.s32", "comparison", 0),
        ("selp.f32", "selection", 0),
        ("bra.uni", "branch", 0),
        (".local", "local array", 0),
        (".extern .shared", "shared array", 0),
        (".maxntid", "launch bound", 0),
        ("frobnicate.b32", "other", 0),
    ],
)
def test_an_opcode_has_its_kind_and_width(opcode: str, kind: str, bits: int) -> None:
    known = ptx.kind_of(opcode)
    assert (known.name, ptx.width(opcode) if known.has_width else 0) == (kind, bits)


LINES = """
.visible .entry toy(
.param .u64 toy_param_0
)
.maxntid 128, 1, 1
{
.local .align 16 .b8 \t__local_depot0[256];
.reg .f32 \t%f<9>;
.loc 1 7 3
$L__BB0_1: // a loop
@!%p1 st.local.f32 [%rd1], %f1;
{ cvt.f32.bf16 %f1, %rs36;}
{ .reg .pred P; wait: mbarrier.try_wait.parity.shared::cta.b64 P, [%r1], %r2; @P bra done; bra wait; done: }
wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1, %f2,
%f3, %f4}, %rd1, %rd2,
1, 1, 1, 0, 0;
call.uni (retval0),
cos_slow,
(
param0
);
add.f64 %fd1, %fd2, 0d3FF0000000000000;
ret;
}
"""


def test_statements_are_found_in_lines_that_hold_several_and_in_those_that_go_on() -> None:
    by_line = [[s.opcode for s in line] for line in ptx.statements(LINES.splitlines())]
    assert [x for x in by_line if x] == [
        [".visible"],
        [".param"],
        [".maxntid"],
        [".local"],
        [".reg"],
        ["st.local.f32"],
        ["cvt.f32.bf16"],
        [".reg", "mbarrier.try_wait.parity.shared::cta.b64", "bra", "bra"],
        ["wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16"],
        ["call.uni"],
        ["add.f64"],
        ["ret"],
    ]
    rows = {row.kind.name: row for row in ptx.count_kinds(LINES.splitlines())}
    assert (rows["branch"].count, rows["branch"].predicated) == (2, 1)
    assert (rows["local access"].predicated, rows["local access"].widths) == (1, Counter({32: 1}))
    assert [*rows][:: len(rows) - 1] == ["local array", "declaration"]
    assert ptx.remarks(list(rows.values())) == [
        "1 line of float64 arithmetic: intended? A constant without f makes it",
        "1 line of arrays in local memory, which has the latency of global memory",
        "1 line of calls: functions that were not inlined",
    ]


@given(
    st.text()
    | st.lists(st.sampled_from(("ld.global.f32", "@%p1", ";", "{", "$L:", "\n", ".reg"))).map(" ".join)
)
def test_the_reading_accepts_any_text(source: str) -> None:
    lines = source.splitlines()
    assert len(list(ptx.statements(lines))) == len(lines)
    ptx.remarks(ptx.count_kinds(lines))


@pytest.fixture(scope="module")
def gelu() -> Kernel:
    operator, implementation = registry.operator("gelu"), registry.implementation("gelu", "cuda")
    case = "bf16-16384x16384"
    (kernel,) = compile_kernels(operator, implementation, "sm_90", case=case, direction="forward")
    return kernel


def test_a_real_kernel_is_read_as_its_instructions_are(gelu: Kernel) -> None:
    """Compare the counts with a plain search of the compiled text."""
    source = "\n".join(gelu.ptx_lines)
    rows = {row.kind.name: row for row in ptx.count_kinds(gelu.ptx_lines)}
    assert rows["global load"].widths == Counter({128: 1, 16: 1})
    assert rows["global store"].widths == Counter({128: 1, 16: 1})
    assert rows["fma"].count == len(re.findall(r"\bfma\.", source)) == 9
    assert rows["fast function"].count == len(re.findall(r"\b(?:ex2|rcp)\.approx", source)) == 18
    assert rows["branch"].predicated == len(re.findall(r"@!?%p\d+\s+bra", source))
    assert not {"other", "float64", "local array", "generic access"} & rows.keys()
    assert sum(row.count for row in rows.values()) == len(re.findall(r"^[^/\n]*;", source, re.M)) + 5


def test_the_kinds_are_behind_the_lines_and_the_table_fits_80_columns(gelu: Kernel) -> None:
    from weft.workbench.explain.inspect.listing import make_listing

    lines = list(text.ptx_explained(make_listing(gelu)))
    load = next(line for line in lines if "ld.global.nc.v4.u32" in line)
    assert load.endswith("// global load, 128 bits")
    shown = [str(x) for x in output.table_lines(text.ptx_kinds(ptx.count_kinds(gelu.ptx_lines)), 80)]
    assert max(map(len, shown)) <= 80 and any("global load" in line for line in shown)


def test_no_shipped_kernel_has_a_line_of_an_unknown_kind() -> None:
    """Compile one kernel each of some operators, those with wgmma, TMA and clusters among them."""
    names = ["matmul", *sample(["softmax", "attention", "layer_norm", "sum", "cumsum", "adamw"], 2, "ptx")]
    for name in names:
        implementation = registry.implementation(name, "cuda")
        source = next(k for k in reversed(implementation.aot_kernels) if aot.suits(k, 90))
        program = aot.compile_for("cuda", source, 90)
        rows = {row.kind.name: row for row in ptx.count_kinds(program.ptx.splitlines())}
        assert rows["parameter"].count and "other" not in rows, (name, source.label)


def test_the_command_gives_the_kinds_as_data_and_leaves_the_listing_as_it_is(
    gelu: Kernel, capsys: pytest.CaptureFixture[str]
) -> None:
    data = json.loads(json.dumps(inspect._to_json(gelu, ["ptx", "explain"])))
    kinds = {row["kind"]: row for row in data["ptx_kinds"]}
    assert kinds["global load"]["widths"] == {"16": 1, "128": 1} and kinds["fma"]["does"]
    assert "// global load" not in data["ptx"] and "1 of 2 global loads" in data["ptx_remarks"][0]
    elements = data["elements_a_thread"]
    assert (elements["mean"], elements["exact"], elements["elements"]) == (8.0, True, 1 << 28)
    assert "ptx_kinds" not in inspect._to_json(gelu, [])
    inspect._show([gelu], ["ptx", "explain"], "sm_90", as_json=False)
    shown = capsys.readouterr().out
    assert "// global load, 128 bits" in shown and "look at: 1 of 2 global loads" in shown
    assert "elements a thread         8 (exact)" in shown


@pytest.mark.parametrize(
    ("elements", "threads", "launches", "line"),
    [
        (1024, 128, 1, "8 (exact)"),
        (1000, 128, 1, "about 7.81 (estimated: a tail, or threads that work together)"),
        (1024, 128, 3, "about 8.00 (estimated: 3 launches share the call)"),
        (1, 4096, 1, "1 for about 4,096 threads (estimated: a tail, or threads that work together)"),
    ],
)
def test_elements_a_thread_say_whether_they_are_exact(
    elements: int, threads: int, launches: int, line: str, gelu: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = ElementsPerThread(elements=elements, threads=threads, launches=launches)
    monkeypatch.setattr(Kernel, "elements_a_thread", share)
    assert facts.elements(gelu) == line and share.exact == line.endswith("(exact)")


def test_a_kernel_without_a_launch_has_no_elements_a_thread(gelu: Kernel) -> None:
    from dataclasses import replace

    assert replace(gelu, launch=None).elements_a_thread is None
    assert facts.elements(replace(gelu, launch=None)) == "unknown"
    share = gelu.elements_a_thread
    assert share is not None and (share.threads, share.launches) == (262144 * 128, 1)


def test_an_optimizer_that_returns_nothing_has_launches_without_elements() -> None:
    operator, implementation = registry.operator("adamw"), registry.implementation("adamw", "cuda")
    launches = dry_run(operator, implementation, operator.case("fp32-124m"), "forward", 90)
    assert launches and {launch.elements for launch in launches} == {0}


NUMBA = """
from weft.workbench.explain.inspect.subjects import disable_interpreters
disable_interpreters()
from weft.core import registry
from weft.workbench.explain.inspect.dry_run import dry_run
operator = registry.operator("gelu")
case, numba = operator.case("fp32-16384x16384"), registry.implementation("gelu", "numba")
(launch,) = dry_run(operator, numba, case, "forward", 90)
assert launch.elements == 1 << 28 and launch.grid and launch.block, launch
"""


@pytest.mark.slow
def test_the_launch_of_a_numba_kernel_is_recorded() -> None:
    """In another process, since this one simulates numba's kernels."""
    done = weft("-c", NUMBA)
    assert done.returncode == 0, done.stderr
