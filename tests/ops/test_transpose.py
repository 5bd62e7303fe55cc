"""The transpose: CUDA kernels in an emulator, faults, bank conflicts, strides, and arguments."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from helpers.cxx import compile_library
from helpers.guarded_pages import place
from helpers.scan_emulator import COMPILER, HEADER, emulate
from weft import WeftError, ops
from weft.backends.nvrtc import SHARED
from weft.ops.transpose import ladder, with_cuda
from weft.ops.transpose.spec import DTYPES, INTEGERS, WORDS

NEEDS_COMPILER = pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")
PROGRAMS = [(s, a) for s in with_cuda.WORD_TYPES for a in (1, 2, 4, 8, 16) if a >= s]


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of compiled kernels without a fault, which tests share."""
    return tmp_path_factory.mktemp("transpose")


def _numbered(size: int, *shape: int) -> torch.Tensor:
    """Return elements of ``size`` bytes with random bits."""
    generator = torch.Generator().manual_seed(sum(shape))
    count = size * int(torch.tensor(shape).prod())
    return torch.randint(0, 256, (count,), generator=generator).byte().view(WORDS[size]).view(shape)


def _shape(size: int, access: int) -> tuple[int, int]:
    """Return rows and columns of two tiles and a part each, odd multiples of an access."""
    vec, side = access // size, with_cuda.row_bytes(size, access) // size
    return side + 3 * vec, side + 5 * vec


@NEEDS_COMPILER
@pytest.mark.sampled(1, each=lambda program: program[1] == 16)
@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_each_size_and_access_moves_every_bit_in_the_emulator(
    program: tuple[int, int], monkeypatch: pytest.MonkeyPatch, libraries: Path
) -> None:
    """Parts of tiles, several matrices, more tiles than blocks; at a page's end no load leaves x."""
    emulate(monkeypatch, libraries)
    size, access = program
    monkeypatch.setattr(with_cuda, "MAX_BLOCKS", 3)
    rows, columns = _shape(size, access)
    for shape in ((rows, columns), (3, 2 * access // size, 3 * access // size)):
        x = place(_numbered(size, *shape), True)
        y = _by_program(x, access)
        assert torch.equal(y, x.transpose(-1, -2)), shape


def _by_program(x: torch.Tensor, access: int) -> torch.Tensor:
    """Return the transpose by accesses of exactly ``access`` bytes; the caller's sizes allow them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(with_cuda, "access_bytes", lambda x3d, y: access)
        return with_cuda.forward(x)


@NEEDS_COMPILER
def test_strided_inputs_in_the_emulator(monkeypatch: pytest.MonkeyPatch, libraries: Path) -> None:
    emulate(monkeypatch, libraries)
    wide = _numbered(2, 2, 40, 144)
    cut, apart = wide[:, :, 8:80], wide[:, ::2]
    row, swapped = wide[0, :1].expand(24, 144), wide.transpose(-1, -2)
    for x in (cut, apart, row, wide[:, :, ::2], swapped, wide.transpose(0, 1), wide[:, :1]):
        assert torch.equal(with_cuda.forward(x), x.transpose(-1, -2)), (x.shape, x.stride())
        assert with_cuda.forward(x).is_contiguous()


def test_an_access_fits_every_row_on_both_sides() -> None:
    y = torch.empty(4096, dtype=torch.int16)
    expected = {(8, 16): 16, (8, 12): 8, (4, 8): 8, (6, 16): 4, (8, 9): 2, (1, 8): 2}
    for (rows, columns), access in expected.items():
        x = torch.empty(1, rows, columns, dtype=torch.int16)
        assert with_cuda.access_bytes(x, y) == access, (rows, columns)
    flat = torch.empty(8 * 24 + 1, dtype=torch.int16)
    assert with_cuda.access_bytes(flat[1:].view(1, 8, 24), y) == 2
    assert with_cuda.access_bytes(flat[:192].view(1, 8, 24)[..., :16], y) == 16
    # Matrices 2 rows of 12 bytes apart from each other, each row at 16 bytes in itself.
    assert with_cuda.access_bytes(torch.empty(600).as_strided((2, 4, 4), (70, 8, 1)), y) == 8


# The most lanes of a phase that meet in one bank, over all stores to and loads from the tile. A phase has as
# many lanes as 128 bytes have units, and at most a warp; lanes at one word of a bank do not conflict.
CONFLICTS = """
extern "C" int conflicts(int loads) {
  constexpr int LANES = LINE_UNITS < 32 ? LINE_UNITS : 32;
  int worst = 0;
  for (int start = 0; start < THREADS; start += LANES)
    for (int pass = 0; pass < (loads ? SIDE / STEP : PASSES * VEC); ++pass) {
      std::vector<std::vector<int>> banks(32);
      for (int lane = 0; lane < LANES; ++lane) {
        const int unit = (start + lane) % UNITS, first = (start + lane) / UNITS;
        const int at = loads ? position(first + pass * STEP, unit)
                             : position(unit * VEC + pass % VEC, first + pass / VEC * STEP);
        for (int word = at * ACCESS / 4; word <= (at * ACCESS + ACCESS - 1) / 4; ++word) {
          auto& words = banks[word % 32];
          if (std::find(words.begin(), words.end(), word) == words.end()) words.push_back(word);
        }
      }
      for (auto& words : banks) worst = std::max(worst, (int)words.size());
    }
  return worst;
}
"""


def _worst_conflict(folder: Path, size: int, access: int, *, fault: tuple[str, str] | None = None) -> int:
    source = with_cuda.source(size, access)
    program = source.file.read_text().replace("__shared__", "static")
    program = program.replace(*fault) if fault else program
    for name in ("cuda_bf16.h", "cuda_fp16.h"):
        (folder / name).touch()
    defines = [f"-D{name}={value}" for name, value in source.defines]
    library = compile_library(f'#include "{HEADER}"\n{program}{CONFLICTS}', (folder, SHARED), defines)
    function = ctypes.CDLL(str(library)).conflicts
    return max(function(0), function(1))


@NEEDS_COMPILER
@pytest.mark.sampled(1)
@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_no_access_of_shared_memory_has_a_bank_conflict(program: tuple[int, int], tmp_path: Path) -> None:
    assert _worst_conflict(tmp_path, *program) == 1


@NEEDS_COMPILER
def test_without_the_exclusive_or_eight_lanes_meet_in_a_bank(tmp_path: Path) -> None:
    assert _worst_conflict(tmp_path, 2, 16, fault=("(unit ^ key)", "unit")) == 8


FAULTS = {
    "no barrier before rows are read": (
        "    __syncthreads();\n#pragma unroll 16",
        "#pragma unroll 16",
    ),
    "no barrier before the next tile": ("    __syncthreads();  // the tile has been read", "    //"),
    "rows are read in another order": ("tile[position(row, unit)]", "tile[row * UNITS + unit]"),
    "the last units are not written": (
        "row0 + column < rows)\n        *",
        "row0 + column + VEC < rows)\n        *",
    ),
    "columns of another sub-tile": ("column.at[i] = rows[i].at[j]", "column.at[i] = rows[j].at[i]"),
    "one matrix for all": ("x + batch * batch_stride", "x + 0 * batch_stride"),
    "rows without gaps": ("(row + i) * row_stride + column)", "(row + i) * columns + column)"),
}


@NEEDS_COMPILER
@pytest.mark.sampled(1)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    emulate(monkeypatch, tmp_path, FAULTS[fault])
    monkeypatch.setattr(with_cuda, "MAX_BLOCKS", 2)
    x = _numbered(2, 3, 136, 152)[..., :136]
    # A race shows in some schedules only.
    assert any(not torch.equal(with_cuda.forward(x), x.transpose(-1, -2)) for _ in range(4))


@NEEDS_COMPILER
def test_bytes_in_the_wrong_order_are_caught(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    emulate(monkeypatch, tmp_path, ("__byte_perm(low01, low23, 0x7632)", "__byte_perm(low01, low23, 0x3276)"))
    x = _numbered(1, 32, 32)
    assert not torch.equal(with_cuda.forward(x), x.T)


@NEEDS_COMPILER
@pytest.mark.sampled(1)
@pytest.mark.parametrize("step", ladder.STEPS)
def test_each_step_of_the_ladder_moves_every_bit_in_the_emulator(
    step: str, monkeypatch: pytest.MonkeyPatch, libraries: Path
) -> None:
    emulate(monkeypatch, libraries)
    monkeypatch.setattr(ladder, "MAX_BLOCKS", 3)
    size = {"01_naive": 1, "02_tiled": 2, "03_padded": 4, "04_swizzled": 8}[step]
    for x in (_numbered(size, 2, 33, 70), _numbered(size, 5, 90)[:, :67], _numbered(size, 1, 1)):
        assert torch.equal(ladder.transpose(step, x), x.transpose(-1, -2)), x.shape


STEP_FAULTS = {
    "01_naive": ("k / columns % rows", "k / rows % rows"),
    "02_tiled": ("    __syncthreads();\n    for (int j", "    for (int j"),
    "03_padded": ("[SIDE + 1]", "[SIDE - 1]"),
    "04_swizzled": ("+ t.row + i] = tile[i][j ^ i]", "+ t.row + i] = tile[i][j]"),
}


@NEEDS_COMPILER
@pytest.mark.sampled(1)
@pytest.mark.parametrize("step", STEP_FAULTS)
def test_a_fault_in_each_step_is_caught(step: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    emulate(monkeypatch, tmp_path, STEP_FAULTS[step])
    x = _numbered(4, 64, 96)
    assert any(not torch.equal(ladder.transpose(step, x), x.T) for _ in range(4))


def test_bits_of_nan_and_signs_of_zero_are_moved() -> None:
    words = torch.tensor([[0x7FC00001, -1, 0x7F800001], [-(2**31), 0, 1]], dtype=torch.int32)
    for impl in ("eager", "torch", "triton"):
        y = ops.transpose(words.view(torch.float32), impl=impl)
        assert torch.equal(y.view(torch.int32), words.T)


def test_a_transposed_input_gives_memory_of_its_own() -> None:
    x = torch.randn(5, 3).T
    for impl in ("eager", "torch", "triton"):
        y = ops.transpose(x, impl=impl)
        assert y.data_ptr() != x.data_ptr() and y.is_contiguous() and torch.equal(y, x.T)


def test_the_gradient_is_the_transpose_of_the_incoming_one() -> None:
    grad = torch.randn(2, 7, 4)
    for impl in ("eager", "torch", "triton"):
        x = torch.randn(2, 4, 7, requires_grad=True)
        (dx,) = torch.autograd.grad(ops.transpose(x, impl=impl), x, grad)
        assert torch.equal(dx, grad.transpose(-1, -2))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_public(dtype: str) -> None:
    x = torch.arange(6).view(2, 3).to(getattr(torch, dtype))
    for impl in ("eager", "torch") if dtype == "bfloat16" else ("eager", "torch", "triton"):
        assert torch.equal(ops.transpose(x, impl=impl), x.T)
    assert (dtype in INTEGERS) == (not x.is_floating_point())


def test_arguments_without_an_answer_get_one_clear_error() -> None:
    for x in (torch.ones(3), torch.tensor(1.0), torch.ones(2, 2, dtype=torch.complex64), [[1.0]]):
        with pytest.raises(WeftError, match="transpose") as caught:
            ops.transpose(x)  # type: ignore[arg-type]
        assert caught.value.expected and caught.value.got
