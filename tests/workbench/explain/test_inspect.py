"""Inspection of kernels: SASS parser, counts, occupancy, cubin contents, dry runs."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.paths import DATA
from weft.backends import aot, disassemble
from weft.backends import cubin as elf
from weft.backends.nvrtc import CudaSource
from weft.core import WeftError, registry
from weft.machine.capability import sm_limits
from weft.workbench.explain.inspect import compile as compiling
from weft.workbench.explain.inspect import facts, generated, sass, subjects
from weft.workbench.explain.inspect.counts import Counts, count
from weft.workbench.explain.inspect.dry_run import dry_run
from weft.workbench.explain.inspect.kernel import Kernel
from weft.workbench.explain.inspect.occupancy import occupancy

ARCHS = (80, 90, 100)


def snippet(name: str) -> tuple[sass.Instruction, ...]:
    (code,) = sass.parse((DATA / f"sass_{name}.txt").read_text()).values()
    return code


def test_a_whole_kernel_is_parsed() -> None:
    code = snippet("gelu_sm90")
    counts = count(code)
    assert counts.memory == {
        "global loads": {"32": 1, "128": 1},
        "global stores": {"32": 1, "128": 1},
    }
    assert counts.fast_math == {"MUFU.EX2": 5, "MUFU.RCP": 5}
    assert counts.instructions == len(code) == 94  # without padding and the branch to itself
    assert (counts.branches, counts.local_stores, counts.tensor) == (2, 0, {})
    guarded = next(i for i in code if i.opcode == "EXIT")
    assert guarded.predicate == "@P1"
    wide = next(i for i in code if i.opcode.startswith("LDG.E.128"))
    assert [p.file for p in wide.locations] == ["gelu.cu"] and wide.ptx
    # An inlined call: the innermost location first, its callers after it.
    deep = next(i for i in code if len(i.locations) == 3)
    assert [p.line for p in deep.locations] == sorted(p.line for p in deep.locations)


def test_tensor_cores_copies_and_barriers_are_counted_separately() -> None:
    wgmma, tcgen, mma = (count(snippet(n)) for n in ("wgmma_sm90", "tcgen_sm100", "mma_sm80"))
    assert wgmma.tensor == {"HGMMA.64x256x16.F32.BF16": 4}
    assert set(wgmma.bulk) == {"TMA loads", "TMA stores"}
    assert wgmma.memory["shared matrix stores"].keys() == {"128"}
    assert {"SYNCS.EXCH", "SYNCS.ARRIVE", "SYNCS.PHASECHK"} <= wgmma.barriers.keys()
    assert tcgen.tensor == {"UTCHMMA": 4} and {"LDTM", "STTM"} == tcgen.tensor_memory.keys()
    assert set(mma.tensor) == {"HMMA.16816.F32.BF16"}
    assert mma.memory["shared matrix loads"].keys() == {"128"}
    # LTC128B is a hint to the cache; the width comes after it.
    assert mma.memory["async copies"].keys() == {"128"}
    assert (mma.local_stores, mma.local_loads) == (4, 4)


TOKENS = ("/*0010*/", "@P0", "LDG.E.128", "BRA", "`(.L_x_1)", "0x10", ";", "\n", " ", ".L_x_1:")
LOCATIONS = ("//## ", 'File "a"', ", line 1", ".text.k:", ".nv_debug_ptx_txt", "99999999999")


@given(st.text() | st.lists(st.sampled_from((*TOKENS, *LOCATIONS))).map("".join))
def test_the_parser_accepts_any_text(text: str) -> None:
    for code in sass.parse(text).values():
        assert count(code).instructions == len(code)


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "shared", "blocks", "limits"),
    [  # worked by hand from the guide's table
        (80, 256, 32, 0, 8, {"threads", "registers"}),
        (80, 256, 128, 0, 2, {"registers"}),
        (90, 128, 33, 0, 12, {"registers"}),  # 33 count as 40: a warp's registers come in steps of 256
        (80, 32, 16, 0, 32, {"blocks"}),
        (80, 128, 32, 48 << 10, 3, {"shared memory"}),  # 49 KiB each with the system's reserve
        (90, 128, 32, 227 << 10, 1, {"shared memory"}),
        (80, 128, 32, 164 << 10, 0, {"shared memory"}),
        (89, 1024, 32, 0, 1, {"threads"}),
    ],
)
def test_occupancy(
    arch: int, threads: int, registers: int, shared: int, blocks: int, limits: set[str]
) -> None:
    sm = sm_limits(arch)
    occupied = occupancy(sm, threads=threads, registers=registers, shared=shared)
    assert (occupied.blocks, set(occupied.limits)) == (blocks, limits)
    assert occupied.share == pytest.approx(blocks * threads / sm.threads)


TOY = r"""
extern "C" __global__ void __launch_bounds__(256) shared_sum(float* x) {
  __shared__ float values[300];
  values[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = values[255 - threadIdx.x];
}
extern "C" __global__ void __launch_bounds__(1024, 2) spilling(float* x) {
  float values[64];
  for (int i = 0; i < 64; ++i) values[i] = x[threadIdx.x + i * 1024];
  __syncthreads();
  for (int i = 0; i < 64; ++i) for (int j = 0; j < i; ++j) values[i] += values[j] * values[i];
  for (int i = 0; i < 64; ++i) x[threadIdx.x + i * 1024] = values[i];
}
extern "C" __global__ void local_array(float* x, int n) {
  float values[64];
  for (int i = 0; i < 64; ++i) values[i] = x[i];
  for (int i = 0; i < n; ++i) values[i & 63] += values[i * 7 & 63];
  x[0] = values[n & 63];
}
"""


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> CudaSource:
    file = tmp_path_factory.mktemp("toy") / "toy.cu"
    file.write_text(TOY)
    return CudaSource(file=file, kernels=("shared_sum", "spilling", "local_array"))


def kernels_of(program: aot.Program, arch: int, counts: dict[str, Counts]) -> list[Kernel]:
    return [
        Kernel(operator="-", implementation="-", arch=arch, program=program, code=c, counts=n)
        for c in program.kernels
        if (n := counts[c.name])
    ]


def test_resources_of_a_cubin_are_those_that_cuobjdump_prints(toy: CudaSource, tmp_path: Path) -> None:
    for arch in ARCHS:
        program = aot.compile_for("cuda", toy, arch)
        file = tmp_path / "toy.cubin"
        file.write_bytes(program.cubin)
        output = disassemble.run([disassemble.tools("cuobjdump")[0], "-res-usage", str(file)], "it")
        printed = re.findall(r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)", output)
        reserved = elf.RESERVED if arch >= elf.RESERVED_FROM else 0
        assert {k.name: (k.registers, k.stack, k.shared) for k in program.kernels} == {
            name: (int(regs), int(stack), max(0, int(shared) - reserved))
            for name, regs, stack, shared in printed
        }
        kernels = {k.name: k for k in program.kernels}
        assert kernels["shared_sum"].shared == 1200 and kernels["shared_sum"].threads == 256


def test_spills_are_distinguished_from_local_arrays(toy: CudaSource) -> None:
    program = aot.compile_for("cuda", toy, 90)
    whole = {name: count(c) for name, c in sass.parse(disassemble.sass(program.cubin)).items()}
    raw = disassemble.sass_of_all([k.text for k in program.kernels], 90)
    assert [count(sass.parse(text)[""]) for text in raw] == [whole[k.name] for k in program.kernels]
    kernels = {k.name: k for k in kernels_of(program, 90, whole)}
    assert kernels["shared_sum"].spills == (0, 0) and facts.facts(kernels["shared_sum"])
    # All kernels of a program share its PTX, so a local array in one makes the others' spills unknown.
    assert kernels["local_array"].spills is None and kernels["local_array"].code.stack == 256
    counts = kernels["spilling"].counts
    assert counts.local_stores > 0 and kernels["spilling"].code.stack > 0


def test_junk_is_refused_as_a_cubin() -> None:
    for junk in (b"", b"\x7fELF", b"\x7fELF" + bytes(60), b"not a cubin at all" * 9):
        with pytest.raises(WeftError, match="a cubin"):
            elf.kernels(junk, 90)


PTX = ".version {}\n.target sm_80\n.address_size 64\n.visible .entry k()\n{{\nret;\n}}\n"


def test_ptx_newer_than_every_assembler_is_lowered_with_a_note() -> None:
    cubin, by, note = aot.assemble(PTX.format("9.9"), 80)
    assert [k.name for k in elf.kernels(cubin, 80)] == ["k"]
    assert "9.9" in note and by in note
    assert aot.assemble(PTX.format("8.0"), 80)[2] == ""
    with pytest.raises(WeftError, match="does not assemble"):
        aot.assemble("nonsense", 80)


def test_implementations_without_kernels_are_refused_with_a_hint() -> None:
    with pytest.raises(WeftError, match=r"sm_80, .*sm_100, got sm_70"):
        compiling.target_number(registry.implementation("gelu", "cuda"), "sm_70")
    for name in ("eager", "torch", "numba/parallel"):
        with pytest.raises(WeftError, match="weft profile gelu --impl"):
            compiling.target_number(registry.implementation("gelu", name), "sm_90")
    with pytest.raises(WeftError, match="compute capability"):
        sm_limits(12)
    if os.environ.get("TRITON_INTERPRET") == "1":
        with pytest.raises(WeftError, match="imported to interpret"):
            subjects.disable_interpreters()


def test_a_dry_run_records_the_launches_of_a_case() -> None:
    """Compare grid, block and shared memory with the host code's, without memory and without a GPU."""
    matmul, cuda = registry.operator("matmul"), registry.implementation("matmul", "cuda")
    (launch,) = dry_run(matmul, cuda, matmul.case("bf16-8192x8192x8192"), "forward", 80)
    defines = dict(launch.aot_kernel.defines)
    assert launch.block == 32 * int(defines["WARPS_M"]) * int(defines["WARPS_N"])
    rows, columns = (int(defines[f"WARPS_{d}"]) * int(defines[f"W{d}"]) for d in "MN")
    assert launch.grid == (8192 // rows * (8192 // columns),)
    assert launch.shared == int(defines["STAGES"]) * 128 * (rows + columns)
    assert len(dry_run(matmul, cuda, matmul.case("bf16-8192x8192x8192"), "backward", 90)) == 2
    (launch,) = dry_run(matmul, cuda, matmul.case("bf16-8192x8192x8192"), "forward", 90)  # persistent
    assert (launch.kernel, launch.block) == ("matmul_wgmma", 384)
    assert launch.grid[0] < 8192 // 128 * (8192 // 256) and launch.shared > 190 << 10
    # An input that is not 16-byte aligned uses the kernel for any alignment.
    gelu, cuda = registry.operator("gelu"), registry.implementation("gelu", "cuda")
    (launch,) = dry_run(gelu, cuda, gelu.case("fp32-33x65-shifted"), "forward", 90)
    assert launch.kernel == "gelu_forward_any"


def test_two_implementations_are_compared_fact_by_fact(toy: CudaSource) -> None:
    program = aot.compile_for("cuda", toy, 90)
    raw = disassemble.sass_of_all([k.text for k in program.kernels], 90)
    counts = {k.name: count(sass.parse(t)[""]) for k, t in zip(program.kernels, raw, strict=True)}
    kernels = {k.name: k for k in kernels_of(program, 90, counts)}
    plain, spilling = kernels["shared_sum"], kernels["spilling"]
    rows = {row.fact: row for row in facts.compare([plain], [spilling])}
    assert {"kernel", "registers", "spills", "stack", "instructions"} <= {
        name for name, row in rows.items() if row.differs
    }
    assert not rows["tensor cores"].differs and rows["spills"].left == ("none",)
    assert not any(row.differs for row in facts.compare([plain], [plain, plain]))
    assert facts.facts(kernels["local_array"])["occupancy"] == "unknown"
    assert any("no case launches it" in note for note in kernels["local_array"].notes)


def test_kernels_of_inductor_are_extracted_from_its_code() -> None:
    cpp = "a = async_compile.cpp_pybinding(['float*'], r'''\nvoid kernel() {}\n''')\n"
    triton = "b = async_compile.triton('triton_poi_0', '''\n@triton.jit\n''', device_str='cuda')\n"
    assert generated._CPP.findall(cpp + triton) == ["\nvoid kernel() {}\n"]
    assert generated._TRITON.findall(cpp + triton) == ["\n@triton.jit\n"]
    assert generated._LIBRARY.findall("extern_kernels.mm(x, out=y)") == ["mm"]
    assembly = "<kernel>:\n  10:\tvaddps %zmm1,%zmm2,%zmm3\n  20:\tmovss %xmm0,%xmm1\n  30:\tret\n"
    expected = {"zmm": 1, "ymm": 0, "xmm": 1, "none of these": 1}
    assert generated._by_register(assembly) == expected


@pytest.mark.exhaustive
def test_inductor_code_for_a_cpu_is_shown_with_its_assembly() -> None:
    """Takes twenty seconds: g++ compiles PyTorch's headers again."""
    gelu, implementation = registry.operator("gelu"), registry.implementation("gelu", "compile")
    code = generated.generated(gelu, implementation, None, "cpu")
    (source,) = code.sources
    assert code.language == "C++" and "void  kernel(" in source
    assert "<kernel" in code.assembly and sum(code.registers.values()) > 20
    vectors = "at::vec::Vectorized" in source
    assert vectors == bool(code.vector_bits)
    assert any("no GPU" in note or "as for a CPU" in note for note in code.notes)
