"""All shipped Triton and CUDA kernels, taken apart for three targets.

Slow: some hundreds of kernels a target, which a process of its own compiles. Their registers,
stacks and occupancy are read; instructions are counted of the bf16 ones, which every implementation
has. sm_90, whose figures are kept, has the most kernels; the others have a sample.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inspecting import weft
from weft.backends import cubin as elf
from weft.backends import take_apart
from weft.core import Implementation, registry
from weft.workbench.inspect import figures, gather
from weft.workbench.inspect.rehearse import identity

ARCHS = (80, 90, 100)
# Kernels that are taken of an implementation, but for the operators that `weft bench` looks at
# first. These have all for sm_90; for the others one of each family (what a label says before its
# types and sizes), and so many at least. All of all: `make compile` and `weft inspect --all`.
SAMPLE = {80: 1, 90: 2, 100: 1}
AT_LEAST = 4
TYPE = re.compile(r"^(?:b?f(?:loat|p)?|tf)\d+")


def taken(name: str, one: Implementation, arch: int) -> Implementation:
    """Those that are known to spill come first, so that each sample that can has one."""
    known = [s for s in one.specimens if take_apart.suits(s, arch)]
    if name in registry.FIRST_LOOK and arch == figures.ARCH:
        return one
    known.sort(key=lambda s: (s.label not in SPILLING[arch], "bf" not in s.label))
    few = known[: SAMPLE[arch]]
    if name in registry.FIRST_LOOK:
        families: dict[str, Any] = {}
        for specimen in known:
            families.setdefault(TYPE.sub("", specimen.label).partition("-")[0], specimen)
        few = list(families.values())
        rest, more = [s for s in known if s not in few], max(0, AT_LEAST - len(few))
        few += rest[:: max(1, len(rest) // max(1, more))][:more]
    return replace(one, specimens=tuple(few))


SCRIPT = """
import json, sys
sys.path.insert(0, sys.argv[2])
from weft.workbench.inspect.choose import Ways, compile_here
compile_here()
from weft.core import registry
from weft.workbench.inspect.gather import compiled, counted
from test_inspect_shipped import taken
arch, found = int(sys.argv[1]), []
for name in registry.operator_names():
    for one in Ways().compiling(name):
        if one.backend in ("triton", "cuda"):
            found += compiled(registry.operator(name), taken(name, one, arch), f"sm_{arch}")
chosen = [k for k in found if "bf" in k.program.label]
rest = [k for k in found if "bf" not in k.program.label]
print(json.dumps([k.to_json() for k in (*counted(chosen), *rest)]))
"""
# Shipped kernels that spill, by target: facts, told in docs/inspect.md. softmax's holds 8 vectors a
# thread in 64 registers, and is launched where there are no clusters; matmul's keep 256 registers.
HELD = {"softmax_block-float16-1024x8-32-1-1-8", "softmax_block-bfloat16-1024x8-32-1-1-8"}
HALF = ("float16", "bfloat16")
TIGHT = {f"mma-{t}-{tile}-01" for t in HALF for tile in ("256x128x4", "128x128x3")}
NORMS = {"norm_backward-bfloat16-bfloat16-111-512-32x3-2-1-1-11"}
SPILLING = {
    80: HELD | TIGHT,
    90: HELD,
    100: HELD | TIGHT | NORMS | {f"mma-{t}-256x128x4-00" for t in HALF},
}
# matmul's widest tile takes 192 KiB of shared memory, and an sm_80 gives a block 163.
TOO_LARGE = {80: "256x128x4"}
# An implementation whose idea says so moves 16 bytes at a time; so does what Triton compiles for
# aligned rows. Not so, by what they are for: `_any` takes any alignment, ACCESS is 1 in -1-1-1,
# modes 2 and 3 any strides, and partial sums are added one double a thread.
WIDE = re.compile(r"16.byte|16 bytes|vectors in flight|asynchronous copies")
NARROW = re.compile(
    r"_any$|adamw_factors$|sum_partials|-1-1-1$|-23$|^fma-.*-(?:00|11)$|mma-float32-.*-23"
)


@pytest.fixture(scope="module", params=ARCHS)
def shipped(request: pytest.FixtureRequest) -> tuple[int, list[dict[str, Any]]]:
    done = weft("-c", SCRIPT, str(request.param), str(Path(__file__).parent))
    assert done.returncode == 0, done.stderr[-2000:]
    return request.param, json.loads(done.stdout)


def bits(kernel: dict[str, Any]) -> int:
    """The widest way in from global memory; a bulk engine moves more than 128 bits."""
    counts = kernel["counts"]
    if counts["bulk"]:
        return 128
    kinds = ("global loads", "generic loads", "async copies")
    return max((int(w) for k in kinds for w in counts["memory"].get(k, {})), default=0)


@pytest.mark.slow
def test_every_shipped_triton_and_cuda_kernel(shipped: tuple[int, list[dict[str, Any]]]) -> None:
    arch, kernels = shipped
    wanted = {
        (i.operator, i.name, s.label)
        for name in registry.operator_names()
        for i in registry.implementations(name)
        for s in {identity(s): s for s in taken(name, i, arch).specimens}.values()  # once each
        if i.backend in ("triton", "cuda") and take_apart.suits(s, arch)
    }
    assert {(k["operator"], k["implementation"], k["label"]) for k in kernels} == wanted
    counted = [k for k in kernels if k["counts"]["instructions"]]
    ways = {(k["operator"], k["implementation"]) for k in kernels}
    assert {(k["operator"], k["implementation"]) for k in counted} == ways

    expected = SPILLING[arch]
    if arch != figures.ARCH:  # of a sample some alone
        expected = expected & {k["label"] for k in kernels}
    assert expected, "none that spills is among those taken"
    assert {k["label"] for k in kernels if k["stack"]} == expected
    for kernel in counted:
        assert (kernel["spill_stores"] > 0) == (kernel["stack"] > 0), kernel["label"]

    for kernel in counted:
        declared = registry.implementation(kernel["operator"], kernel["implementation"])
        named = (kernel["kernel"], kernel["label"])
        narrow = any(NARROW.search(name) for name in named)
        if (declared.backend == "triton" or WIDE.search(declared.idea)) and not narrow:
            assert bits(kernel) >= 128, named
        if declared.is_step and declared.backend == "cuda" and not WIDE.search(declared.idea):
            assert bits(kernel) <= 64, named  # the ladder's vectors come with their step

    tensor = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}[arch]
    for kernel in counted:
        if kernel["operator"] != "matmul" or kernel["label"].startswith(("fma", "ieee")):
            continue
        kind = tensor if kernel["implementation"] == "triton" else "HMMA"
        found = {name.partition(".")[0] for name in kernel["counts"]["tensor"]}
        assert found == {kind}, kernel["label"]

    for kernel in kernels:
        full = kernel["occupancy"]
        if full is None:
            assert kernel["notes"] and not kernel["cases"], kernel["label"]
        else:
            too_large = arch in TOO_LARGE and TOO_LARGE[arch] in kernel["label"]
            assert full["share"] == 0 if too_large else 0 < full["share"] <= 1, kernel["label"]

    if arch == figures.ARCH:
        left = [n for n in registry.operator_names() if n not in registry.FIRST_LOOK]
        stale = [
            one
            for one in figures.differences(kernels)
            if not (one.endswith(" is gone") and one.split()[0] in left)  # a sample is taken
        ]
        assert stale == [], f"{stale[:3]}; write it anew: {figures.COMMAND}"


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gelu", "softmax", "sum", "matmul"])
def test_the_driver_tells_the_same_registers_memory_and_occupancy(name: str) -> None:
    """The oracle of what is read of a cubin and worked out: the driver, at every CUDA kernel."""
    import torch

    from weft.backends.nvrtc import current_arch

    torch.zeros(1, device="cuda")  # a context, which what is loaded belongs to
    one, operator = registry.implementation(name, "cuda"), registry.operator(name)
    arch = int(re.sub(r"\D", "", current_arch()))
    found = gather.compiled(operator, one, f"sm_{arch}")
    known = {(k.program.label, k.code.name): k for k in found}
    compared = 0
    for source in one.specimens:
        for code in elf.kernels(source.compile(current_arch()), arch):
            loaded = source[code.name]
            attributes = loaded.handle.attributes
            assert attributes.num_regs == code.registers, (source.label, code.name)
            assert (attributes.local_size_bytes > 0) == (code.stack > 0), (source.label, code.name)
            kernel = known.get((source.label, code.name))  # None: the same program by another name
            full = kernel.occupancy if kernel else None
            if kernel is None or full is None or kernel.code.registers != code.registers:
                continue  # what no case launches; what the `a` target compiles otherwise
            dynamic = kernel.dynamic or 0
            if dynamic > 48 << 10:
                loaded._allow(dynamic)
            fits = loaded.handle.occupancy.max_active_blocks_per_multiprocessor
            assert fits(full.threads, dynamic) == full.blocks, kernel.title
            compared += 1
    assert compared
