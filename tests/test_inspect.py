"""Kernels taken apart: the parser, the counts, occupancy, the rehearsal, the page; and all shipped
Triton and CUDA kernels for three targets.

The last are slow: some two hundred kernels a target, which a process of its own compiles (this one
interprets Triton's) from the caches that `make compile` left. All are compiled and their stacks
read for each target; instructions are counted of all for sm_90 and of the bf16 ones for the others,
since nvdisasm takes most of the time.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.backends import cubin as elf
from weft.backends import disassemble, take_apart
from weft.backends.nvrtc import CudaSource
from weft.core import WeftError, registry
from weft.machine.capability import multiprocessor
from weft.workbench.inspect import choose, facts, figures, gather, sass
from weft.workbench.inspect.counts import Counts, count
from weft.workbench.inspect.kernel import Kernel
from weft.workbench.inspect.occupancy import occupancy
from weft.workbench.inspect.rehearse import rehearse

if importlib.util.find_spec("selenium"):
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

DATA = Path(__file__).parent / "data"
ARCHS = (80, 90, 100)
# Where `make compile` left its cubins: read as this file is, before a test has a cache of its own.
KEPT = os.environ.get("WEFT_CACHE_DIR")


def snippet(name: str) -> tuple[sass.Instruction, ...]:
    (code,) = sass.parse((DATA / f"sass_{name}.txt").read_text()).values()
    return code


def test_a_whole_kernel_is_read() -> None:
    code = snippet("gelu_sm90")
    counts = count(code)
    assert counts.memory == {
        "global loads": {"32": 1, "128": 1},
        "global stores": {"32": 1, "128": 1},
    }
    assert counts.fast_math == {"MUFU.EX2": 5, "MUFU.RCP": 5}
    assert counts.instructions == len(code) == 94  # neither idle ones nor the branch to itself
    assert (counts.branches, counts.local_stores, counts.tensor) == (2, 0, {})
    guarded = next(i for i in code if i.opcode == "EXIT")
    assert guarded.predicate == "@P1"
    wide = next(i for i in code if i.opcode.startswith("LDG.E.128"))
    assert [p.file for p in wide.places] == ["gelu.cu"] and wide.ptx
    # An inlined call: the innermost place first, its callers after it.
    deep = next(i for i in code if len(i.places) == 3)
    assert [p.line for p in deep.places] == sorted(p.line for p in deep.places)


def test_tensor_cores_copies_and_barriers_are_told_apart() -> None:
    wgmma, tcgen, mma = (count(snippet(n)) for n in ("wgmma_sm90", "tcgen_sm100", "mma_sm80"))
    assert wgmma.tensor == {"HGMMA.64x256x16.F32.BF16": 4}
    assert set(wgmma.bulk) == {"TMA loads", "TMA stores"}
    assert wgmma.memory["shared matrix stores"].keys() == {"128"}
    assert {"SYNCS.EXCH", "SYNCS.ARRIVE", "SYNCS.PHASECHK"} <= wgmma.barriers.keys()
    assert tcgen.tensor == {"UTCHMMA": 4} and {"LDTM", "STTM"} == tcgen.tensor_memory.keys()
    assert set(mma.tensor) == {"HMMA.16816.F32.BF16"}
    assert mma.memory["shared matrix loads"].keys() == {"128"}
    # LTC128B is a hint to the cache; the width stands after it.
    assert mma.memory["async copies"].keys() == {"128"}
    assert (mma.local_stores, mma.local_loads) == (4, 4)


WORDS = ("/*0010*/", "@P0", "LDG.E.128", "BRA", "`(.L_x_1)", "0x10", ";", "\n", " ", ".L_x_1:")
PLACES = ("//## ", 'File "a"', ", line 1", ".text.k:", ".nv_debug_ptx_txt", "99999999999")


@given(st.text() | st.lists(st.sampled_from((*WORDS, *PLACES))).map("".join))
def test_no_text_breaks_the_parser(text: str) -> None:
    for code in sass.parse(text).values():
        assert count(code).instructions == len(code)


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "shared", "blocks", "limits"),
    [  # worked by hand from the guide's table
        (80, 256, 32, 0, 8, {"threads", "registers"}),
        (80, 256, 128, 0, 2, {"registers"}),
        (90, 128, 33, 0, 12, {"registers"}),  # 33 are 40: steps of 256 for a warp
        (80, 32, 16, 0, 32, {"blocks"}),
        (80, 128, 32, 48 << 10, 3, {"shared memory"}),  # 49 KiB each with what the system keeps
        (90, 128, 32, 227 << 10, 1, {"shared memory"}),
        (80, 128, 32, 164 << 10, 0, {"shared memory"}),
        (89, 1024, 32, 0, 1, {"threads"}),
    ],
)
def test_occupancy(
    arch: int, threads: int, registers: int, shared: int, blocks: int, limits: set[str]
) -> None:
    sm = multiprocessor(arch)
    found = occupancy(sm, threads=threads, registers=registers, shared=shared)
    assert (found.blocks, set(found.limits)) == (blocks, limits)
    assert found.share == pytest.approx(blocks * threads / sm.threads)


TOY = r"""
extern "C" __global__ void __launch_bounds__(256) shared_sum(float* x) {
  __shared__ float held[300];
  held[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = held[255 - threadIdx.x];
}
extern "C" __global__ void __launch_bounds__(1024, 2) spilling(float* x) {
  float held[64];
  for (int i = 0; i < 64; ++i) held[i] = x[threadIdx.x + i * 1024];
  __syncthreads();
  for (int i = 0; i < 64; ++i) for (int j = 0; j < i; ++j) held[i] += held[j] * held[i];
  for (int i = 0; i < 64; ++i) x[threadIdx.x + i * 1024] = held[i];
}
extern "C" __global__ void local_array(float* x, int n) {
  float held[64];
  for (int i = 0; i < 64; ++i) held[i] = x[i];
  for (int i = 0; i < n; ++i) held[i & 63] += held[i * 7 & 63];
  x[0] = held[n & 63];
}
"""


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> CudaSource:
    file = tmp_path_factory.mktemp("toy") / "toy.cu"
    file.write_text(TOY)
    return CudaSource(file=file, kernels=("shared_sum", "spilling", "local_array"))


def taken(program: take_apart.Program, arch: int, counts: dict[str, Counts]) -> list[Kernel]:
    return [
        Kernel(operator="-", implementation="-", arch=arch, program=program, code=c, counts=n)
        for c in program.kernels
        if (n := counts[c.name])
    ]


def test_what_is_read_of_a_cubin_is_what_cuobjdump_prints(toy: CudaSource, tmp_path: Path) -> None:
    for arch in ARCHS:
        program = take_apart.compile_for("cuda", toy, arch)
        file = tmp_path / "toy.cubin"
        file.write_bytes(program.cubin)
        said = disassemble.run([disassemble.tools("cuobjdump")[0], "-res-usage", str(file)], "it")
        printed = re.findall(r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)", said)
        kept = elf.KEPT if arch >= elf.KEPT_FROM else 0
        assert {k.name: (k.registers, k.stack, k.shared) for k in program.kernels} == {
            name: (int(regs), int(stack), max(0, int(shared) - kept))
            for name, regs, stack, shared in printed
        }
        found = {k.name: k for k in program.kernels}
        assert found["shared_sum"].shared == 1200 and found["shared_sum"].threads == 256


def test_spills_are_seen_and_arrays_not_taken_for_them(toy: CudaSource) -> None:
    program = take_apart.compile_for("cuda", toy, 90)
    whole = {name: count(c) for name, c in sass.parse(disassemble.sass(program.cubin)).items()}
    raw = disassemble.sass_of_all([k.text for k in program.kernels], 90)
    assert [count(sass.parse(text)[""]) for text in raw] == [whole[k.name] for k in program.kernels]
    found = {k.name: k for k in taken(program, 90, whole)}
    assert found["shared_sum"].spills == (0, 0) and facts.facts(found["shared_sum"])
    # The PTX of a program is one: an array in one kernel leaves the others' local memory untold.
    assert found["local_array"].spills is None and found["local_array"].code.stack == 256
    moved = found["spilling"].counts
    assert moved.local_stores > 0 and found["spilling"].code.stack > 0


def test_a_cubin_that_is_none_is_refused() -> None:
    for junk in (b"", b"\x7fELF", b"\x7fELF" + bytes(60), b"not a cubin at all" * 9):
        with pytest.raises(WeftError, match="a cubin"):
            elf.kernels(junk, 90)


PTX = ".version {}\n.target sm_80\n.address_size 64\n.visible .entry k()\n{{\nret;\n}}\n"


def test_ptx_newer_than_every_assembler_is_lowered_and_said_to_be() -> None:
    cubin, by, note = take_apart.assemble(PTX.format("9.9"), 80)
    assert [k.name for k in elf.kernels(cubin, 80)] == ["k"]
    assert "9.9" in note and by in note
    assert take_apart.assemble(PTX.format("8.0"), 80)[2] == ""
    with pytest.raises(WeftError, match="does not assemble"):
        take_apart.assemble("nonsense", 80)


def test_what_cannot_be_taken_apart_is_refused_with_what_can() -> None:
    with pytest.raises(WeftError, match=r"sm_80, .*sm_100, got sm_70"):
        gather.able(registry.implementation("gelu", "cuda"), "sm_70")
    for name in ("eager", "torch", "numba/parallel"):
        with pytest.raises(WeftError, match="weft profile gelu --impl"):
            gather.able(registry.implementation("gelu", name), "sm_90")
    with pytest.raises(WeftError, match="compute capability"):
        multiprocessor(12)
    if os.environ.get("TRITON_INTERPRET") == "1":
        with pytest.raises(WeftError, match="imported to interpret"):
            choose.compile_here()


def test_a_rehearsal_tells_what_a_case_launches() -> None:
    """Grid, block and shared memory as the host code gives them, with no memory and no GPU."""
    matmul, cuda = registry.operator("matmul"), registry.implementation("matmul", "cuda")
    (launch,) = rehearse(matmul, cuda, matmul.case("bf16-8192x8192x8192"), "forward", 90)
    defines = dict(launch.specimen.defines)
    assert launch.block == 32 * int(defines["WARPS_M"]) * int(defines["WARPS_N"])
    rows, columns = (int(defines[f"WARPS_{d}"]) * int(defines[f"W{d}"]) for d in "MN")
    assert launch.grid == (8192 // rows * (8192 // columns),)
    assert launch.shared == int(defines["STAGES"]) * 128 * (rows + columns)
    assert len(rehearse(matmul, cuda, matmul.case("bf16-8192x8192x8192"), "backward", 90)) == 2
    # An input past a 16-byte boundary takes the kernel for any alignment.
    gelu, cuda = registry.operator("gelu"), registry.implementation("gelu", "cuda")
    (launch,) = rehearse(gelu, cuda, gelu.case("fp32-33x65-shifted"), "forward", 90)
    assert launch.kernel == "gelu_forward_any"


def weft(*arguments: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).resolve().parent.parent
    environment = {k: v for k, v in os.environ.items() if k not in choose.SWITCHES.values()}
    environment["PYTHONPATH"] = str(root / "src")
    environment.pop("WEFT_CACHE_DIR", None)
    if KEPT:
        environment["WEFT_CACHE_DIR"] = KEPT
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """One Triton kernel by the command: its JSON with all texts, and its page."""
    file = tmp_path_factory.mktemp("page") / "kernel.html"
    case = ["--case", "bf16-8192x8192x8192", "--direction", "forward"]
    what = ["inspect", "matmul", "--impl", "triton", *case, "--html", str(file)]
    done = weft("-m", "weft", *what, "--json", "--source", "--ptx", "--sass")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), file


def test_the_command_shows_one_kernel_in_three_texts(shown: tuple[dict[str, Any], Path]) -> None:
    (kernel,) = shown[0]["kernels"]
    assert kernel["kernel"] == "matmul_descriptors" and kernel["target"] == "sm_90a"
    assert kernel["threads"] == 256 and kernel["shared_dynamic"] > 100 << 10
    assert kernel["occupancy"]["blocks"] == 1
    assert any(name.startswith("HGMMA") for name in kernel["counts"]["tensor"])
    lines = kernel["sass"].splitlines()
    under = [i for i, line in enumerate(lines) if "HGMMA" in line]
    above = [next(x for x in lines[i::-1] if not x.startswith(" ")) for i in under]
    # The scheduler mixes neighbours: some stand under the load before it.
    assert any("with_triton.py" in line and "tl.dot(" in line for line in above)
    assert "wgmma.mma_async" in kernel["ptx"] and "tl.dot(" in kernel["source"]


SCRIPT = """
import json, sys
from weft.workbench.inspect.choose import Ways, compile_here
compile_here()
from weft.core import registry
from weft.workbench.inspect.gather import kernels
arch, found = int(sys.argv[1]), []
for name in registry.operator_names():
    for one in Ways().compiling(name):
        if one.backend in ("triton", "cuda"):
            found += kernels(registry.operator(name), one, f"sm_{arch}",
                             counting=lambda k: arch == 90 or "bf" in k.program.label)
print(json.dumps([k.to_json() for k in found]))
"""
# Shipped kernels that spill, by target: facts, told in docs/inspect.md. softmax's holds 8 vectors a
# thread in 64 registers, and is launched where there are no clusters; matmul's keep 256 registers.
HELD = {"softmax_block-float16-1024x8-32-1-1-8", "softmax_block-bfloat16-1024x8-32-1-1-8"}
HALF = ("float16", "bfloat16")
TIGHT = {f"mma-{t}-{tile}-01" for t in HALF for tile in ("256x128x4", "128x128x3")}
SPILLING = {
    80: HELD | TIGHT,
    90: HELD,
    100: HELD | TIGHT | {f"mma-{t}-256x128x4-00" for t in HALF},
}
# matmul's widest tile takes 192 KiB of shared memory, and an sm_80 gives a block 163.
TOO_LARGE = {80: "256x128x4"}
# An implementation whose idea says so moves 16 bytes at a time; so does what Triton compiles for
# aligned rows. Not so, by what they are for: `_any` takes any alignment, ACCESS is 1 in -1-1-1,
# modes 2 and 3 any strides, and partial sums are added one double a thread.
WIDE = re.compile(r"16.byte|16 bytes|vectors in flight|asynchronous copies")
NARROW = re.compile(r"_any$|sum_partials|-1-1-1$|-23$|^fma-.*-(?:00|11)$|mma-float32-.*-23")


@pytest.fixture(scope="module", params=ARCHS)
def shipped(request: pytest.FixtureRequest) -> tuple[int, list[dict[str, Any]]]:
    done = weft("-c", SCRIPT, str(request.param))
    assert done.returncode == 0, done.stderr[-2000:]
    return request.param, json.loads(done.stdout)


def bits(kernel: dict[str, Any], way: str) -> int:
    """The widest way to move data to or from global memory; a bulk engine moves more than 128."""
    counts = kernel["counts"]
    if counts["bulk"]:
        return 128
    kinds = {"loads": ("global loads", "generic loads", "async copies"), "stores": ()}[way]
    return max((int(w) for k in kinds for w in counts["memory"].get(k, {})), default=0)


@pytest.mark.slow
def test_every_shipped_triton_and_cuda_kernel(shipped: tuple[int, list[dict[str, Any]]]) -> None:
    arch, kernels = shipped
    wanted = {
        (i.operator, i.name, s.label)
        for name in registry.operator_names()
        for i in registry.implementations(name)
        for s in i.specimens
        if i.backend in ("triton", "cuda") and s.min_arch <= arch
    }
    assert {(k["operator"], k["implementation"], k["label"]) for k in kernels} == wanted
    counted = [k for k in kernels if k["counts"]["instructions"]]
    assert len(counted) >= len(kernels) / 5

    assert {k["label"] for k in kernels if k["stack"]} == SPILLING[arch]
    for kernel in counted:
        assert (kernel["spill_stores"] > 0) == (kernel["stack"] > 0), kernel["label"]

    for kernel in counted:
        declared = registry.implementation(kernel["operator"], kernel["implementation"])
        named = (kernel["kernel"], kernel["label"])
        narrow = any(NARROW.search(name) for name in named)
        if (declared.backend == "triton" or WIDE.search(declared.idea)) and not narrow:
            assert bits(kernel, "loads") >= 128, named
        if declared.is_step and not WIDE.search(declared.idea):
            assert bits(kernel, "loads") <= 64, named  # the ladder's vectors come with their step

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
            fits = TOO_LARGE.get(arch, "-") not in kernel["label"]
            assert (0 < full["share"] <= 1) == fits, kernel["label"]

    if arch == figures.ARCH:
        stale = figures.differences(kernels)
        assert stale == [], f"{stale[:3]}; write it anew: {figures.COMMAND}"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    flags = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --disable-sync"
    for flag in f"{flags} --no-first-run --disable-background-networking".split():
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('profile')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service("/usr/bin/chromedriver"))
    yield driver
    driver.quit()


def marked(browser: Any, column: str) -> list[str]:
    script = "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)"
    found = browser.execute_script(script, f'[data-column="{column}"] .on code')
    assert isinstance(found, list)
    return found


@pytest.mark.browser
@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (1280, "dark"), (375, "light")])
def test_the_page_is_quiet_offline_and_no_wider_than_the_screen(
    browser: Any, shown: tuple[dict[str, Any], Path], width: int, theme: str
) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    wanted = [{"name": "prefers-color-scheme", "value": theme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": wanted})
    browser.get_log("performance")
    address = shown[1].as_uri()
    browser.get(address)
    assert browser.get_log("browser") == []
    events = [json.loads(e["message"])["message"] for e in browser.get_log("performance")]
    sent = [e["params"] for e in events if e["method"] == "Network.requestWillBeSent"]
    urls = [p["request"]["url"] for p in sent]
    assert [u for u in urls if not u.startswith("data:")] == [address]
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    paper = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", paper)[:3])) < 200) == (theme == "dark")


@pytest.mark.browser
def test_pointing_at_a_line_marks_what_came_of_it(
    browser: Any, shown: tuple[dict[str, Any], Path]
) -> None:
    browser.get(shown[1].as_uri())
    # The product's line of the source: its wgmma in the PTX, its HGMMA in the SASS.
    line = browser.execute_script(
        "return [...document.querySelectorAll('[data-column=source] [data-key]')]"
        ".find(e => e.textContent.includes('tl.dot('))"
    )
    browser.execute_script("arguments[0].click()", line)
    assert any("HGMMA" in text for text in marked(browser, "sass"))
    assert any("wgmma.mma_async" in text for text in marked(browser, "ptx"))
    assert len(marked(browser, "source")) == 1
    seen = "const a = arguments[0].getBoundingClientRect(), b = arguments[0].parentElement"
    inside = f"{seen}.getBoundingClientRect(); return a.top >= b.top - 1 && a.bottom <= b.bottom"
    first = browser.find_element(By.CSS_SELECTOR, '[data-column="sass"] .on')
    assert browser.execute_script(inside, first)
    # Back from the SASS, by keyboard: an instruction marks its one PTX line and its source.
    sass_column = browser.find_element(By.CSS_SELECTOR, '[data-column="sass"]')
    sass_column.send_keys(Keys.ESCAPE)
    assert marked(browser, "sass") == []
    sass_column.send_keys(Keys.ARROW_DOWN, Keys.ARROW_DOWN)
    assert len(marked(browser, "sass")) == 1 == len(marked(browser, "ptx"))
    assert marked(browser, "source")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gelu", "softmax", "sum", "matmul"])
def test_the_driver_tells_the_same_registers_memory_and_occupancy(name: str) -> None:
    """The oracle of what is read of a cubin and worked out: the driver, at every CUDA kernel."""
    from weft.backends.nvrtc import current_arch

    one, operator = registry.implementation(name, "cuda"), registry.operator(name)
    arch = int(re.sub(r"\D", "", current_arch()))
    found = gather.kernels(operator, one, f"sm_{arch}", counting=lambda kernel: False)
    known = {(k.program.label, k.code.name): k for k in found}
    compared = 0
    for source in one.specimens:
        for code in elf.kernels(source.compile(current_arch()), arch):
            loaded = source[code.name]
            attributes = loaded.handle.attributes
            assert attributes.num_regs == code.registers, (source.label, code.name)
            assert attributes.local_size_bytes == code.stack, (source.label, code.name)
            kernel = known[source.label, code.name]
            full, dynamic = kernel.occupancy, kernel.dynamic or 0
            if full is None or kernel.code.registers != code.registers:
                continue  # what no case launches; a kernel that the `a` target compiles otherwise
            if dynamic > 48 << 10:
                loaded._allow(dynamic)
            fits = loaded.handle.occupancy.max_active_blocks_per_multiprocessor
            assert fits(full.threads, dynamic) == full.blocks, kernel.title
            compared += 1
    assert compared
