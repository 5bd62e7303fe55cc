"""2:4 sparsity: the format, the CUDA kernels that prune and expand in an emulator, faults, arguments."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import sampling, warp_emulator
from helpers.warp_emulator import COMPILER, EmulatorError, emulate, emulate_edited
from weft import WeftError, ops
from weft.ops.sparse24 import pattern, spec, with_cuda

EMULATOR = Path(warp_emulator.__file__).with_name("sparse24_emulator.hpp")
NEEDS_COMPILER = pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _weights() -> dict[str, torch.Tensor]:
    """Return matrices of every kind of rest: of a word, of a block of columns, and of rows."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    special = normal(20, 80)
    special[0, ::7], special[1, ::5], special[1, 3::5] = torch.nan, torch.inf, -torch.inf
    special[2, ::3], special[3] = -torch.nan, torch.tensor([0.0, -0.0]).repeat(40)
    special[4] = torch.tensor([torch.inf, torch.nan, 1.0, torch.nan]).repeat(20)
    # NaN with three different bits, of which the first two stay.
    special[5].view(torch.int16).copy_(torch.tensor([0x7FC0, 0x7F81, 0x7FFF, 0x3F80]).repeat(20))
    wide = normal(36, 160)
    return {
        "whole blocks": normal(128, 128),
        "odd": normal(20, 76, dtype=torch.float16),
        "float32": normal(36, 64, dtype=torch.float32),
        "few values": torch.randint(-2, 3, (32, 64), generator=generator).half(),
        "all equal": torch.full((16, 32), 1.5, dtype=torch.bfloat16),
        "special": special,
        "sliced": wide[:, :80],
        "shifted": wide[:, 4:84],
        "transposed": normal(64, 48).t(),
        "expanded": normal(1, 64).expand(20, -1),
        "one": normal(4, 4),
    }


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True for equal bits, whatever NaN's are."""
    both = a.isnan() & b.isnan() if a.is_floating_point() else a != a
    signs = torch.signbit(a) == torch.signbit(b) if a.is_floating_point() else True
    return a.shape == b.shape and bool((((a == b) & signs) | both).all())


def _is_pruned_right(w: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor]) -> bool:
    values, metadata = spec.prune_reference(w.double())
    return _same(pair[0], values.to(w.dtype)) and torch.equal(pair[1], metadata)


def _is_transposable_right(w: torch.Tensor, output: tuple[torch.Tensor, ...]) -> bool:
    expected = spec.transposable_reference(w.double())
    return all(_same(a, b.to(a.dtype)) for a, b in zip(output, expected, strict=True))


# ---- The format


def test_a_word_has_the_codes_of_two_rows_and_sixteen_columns() -> None:
    """Compare one matrix with the table of the PTX ISA, written out: lane, bits, row, column."""
    w = torch.zeros(128, 128)
    # Row 9 keeps places 1 and 3 of columns 20 to 23, where all other groups keep 0 and 1.
    w[9, 21] = w[9, 23] = 1.0
    metadata = ops.prune_2_4(w, impl="eager")[1]
    words = metadata.long() & 0xFFFFFFFF
    assert metadata.shape == (2, 8, 32)
    # Row 9 is row 1 of the upper half of block 0: lanes 4 to 7. Columns 16 to 31 are those of lane 5.
    code = 1 | 3 << 2
    assert int(words[0, 0, 5]) == 0x44444444 & ~(15 << 20) | code << 20
    words[0, 0, 5] = 0x44444444
    assert bool((words == 0x44444444).all())


def test_values_and_metadata_have_nine_sixteenths_of_the_bytes() -> None:
    w = torch.randn(256, 192).bfloat16()
    values, metadata = ops.prune_2_4(w, impl="eager")
    assert 16 * (values.nbytes + metadata.nbytes) == 9 * w.nbytes


@pytest.mark.parametrize("dtype", DTYPES)
def test_expansion_restores_what_stays(dtype: torch.dtype) -> None:
    w = torch.randn(37, 92).to(dtype)
    expanded = ops.expand_2_4(*ops.prune_2_4(w, impl="eager"), impl="eager")
    fours = pattern.groups(expanded != 0)
    assert bool((fours.sum(-1) == 2).all()) and torch.equal(expanded[expanded != 0], w[expanded != 0])
    dropped = torch.where(expanded == 0, w.abs(), 0).view(37, 23, 4).amax(-1)
    smallest = torch.where(expanded != 0, w.abs(), torch.inf).view(37, 23, 4).amin(-1)
    assert bool((dropped <= smallest).all())


def test_both_orientations_share_a_mask() -> None:
    w = torch.randn(68, 132).half()
    values, metadata, values_t, metadata_t = ops.prune_2_4_transposable(w, impl="eager")
    pruned = ops.expand_2_4(values, metadata, impl="eager")
    assert torch.equal(pruned, ops.expand_2_4(values_t, metadata_t, impl="eager").t())
    # Greedy keeps at least half of what the best mask keeps; any mask of two of four keeps at most this.
    best = pattern.groups(w.abs().double()).sort(-1).values[..., 2:].sum()
    assert 0.5 * best < pruned.abs().double().sum() <= best


# ---- The CUDA kernels


@NEEDS_COMPILER
def test_the_kernels_prune_and_expand_exactly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Run five of the matrices: a program for each of their dtypes is compiled for two seconds."""
    emulate(monkeypatch, tmp_path, EMULATOR)
    for name, w in sampling.sample(list(_weights().items()), 5, "matrices of 2:4 sparsity"):
        pair = with_cuda.prune(w)
        assert _is_pruned_right(w, pair), name
        assert _same(with_cuda.expand(*pair), pattern.expand(*pair)), name
        other = w.flip(0)
        assert _same(with_cuda.compress(other, pair[1]), pattern.compress(other, pair[1])), name
    values, metadata = ops.prune_2_4(torch.randn(40, 96).half(), impl="eager")
    for odd in (values[:, :24], values[:, 4:28], values[:1].expand(40, -1), values[:24].t()[:40]):
        fitting = pattern.pack(pattern.unpack(metadata, 40, 96)[: odd.shape[0], : odd.shape[1] // 2])
        assert _same(with_cuda.expand(odd, fitting), pattern.expand(odd, fitting))


@NEEDS_COMPILER
def test_the_kernel_prunes_both_orientations_exactly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    emulate(monkeypatch, tmp_path, EMULATOR)
    for name, w in sampling.sample(list(_weights().items()), 6, "matrices of both orientations"):
        assert _is_transposable_right(w, with_cuda.prune_transposable(w)), name


# name: file, the text that is replaced, and by what
FAULTS = {
    "the third largest stays": (
        "sparse24.cu",
        "stays[i] = ahead < 2;",
        "stays[i] = ahead != 1 && ahead < 3;",
    ),
    "of equal ones the higher place stays": (
        "sparse24.cu",
        "j < i ? key[j] >= key[i] : j > i && key[j] > key[i]",
        "j > i ? key[j] >= key[i] : j < i && key[j] > key[i]",
    ),
    "the lower place of equal ones is behind": (
        "sparse24.cu",
        "(GROUP - 1 - place) * sizeof",
        "place * sizeof",
    ),
    "the second largest of a pair": (
        "sparse24.cu",
        "max(max(smaller, last), min(larger, other))",
        "max(smaller, last)",
    ),
    "the table is read before it is written": ("sparse24.cu", "  if constexpr (HALF) __syncthreads();", "  "),
    "NaN by its bits": ("codes.cuh", "bits > INFINITY_BITS ? INFINITY_BITS + 1 : bits", "bits"),
    "the sign counts": ("codes.cuh", ">> (33 - 8 * sizeof(Element))", ">> (32 - 8 * sizeof(Element))"),
    "halves of a word change places": (
        "sparse24.cu",
        "<< (half * 16 + n * 4);",
        "<< (16 - half * 16 + n * 4);",
    ),
    "the codes of the group beside": ("sparse24.cu", "+ n * GROUP_WORDS", "+ (n ^ 1) * GROUP_WORDS"),
    "elements beyond the end count": (
        "codes.cuh",
        "to[i] = i < count ? from[i] : (Element)0",
        "to[i] = from[i]",
    ),
    "taken from the group beside": ("sparse24.cu", "e + i / 2 * GROUP", "e + (i / 2 ^ 1) * GROUP"),
    "taken at the first place twice": ("sparse24.cu", "half * 16 + i * 2", "half * 16 + i / 2 * 4"),
    "the codes of the group beside are read": (
        "sparse24.cu",
        "i / GROUP * 4) & 15",
        "i / GROUP * 4 ^ 4) & 15",
    ),
}
TRANSPOSABLE_FAULTS = {
    "an exchange too few": ("transposable.cu", "i < EXCHANGES;", "i < EXCHANGES - 1;"),
    "a wrong exchange": ("transposable.cu", "{5, 10}, {6, 9}", "{5, 9}, {6, 10}"),
    "a third of a row": ("transposable.cu", "full |= kept & stays;", "full |= kept & stays & 0xf0;"),
    "a third of a column": ("transposable.cu", "full |= kept & stays;", "full |= kept & stays & 0x0f;"),
    "a step too few": ("transposable.cu", "i < PLACES; ++i) {", "i < PLACES - 1; ++i) {"),
    "the last of equal ones": ("transposable.cu", "(PLACES - 1 - place) * 4;", "place * 4;"),
    "NaN by its bits": ("transposable.cu", "NAN_BITS * 0x10001", "0x7fff7fff"),
    "the sign counts": ("transposable.cu", "row[i][j] & 0x7fff7fff", "row[i][j]"),
    "a filler with its element": (
        "transposable.cu",
        "low = four >> first & 1 ? 0xffff : 0",
        "low = 0xffff",
    ),
    "rows for columns": ("transposable.cu", "mask_t = transposed(mask);", "mask_t = mask;"),
    "columns of the transpose": ("transposable.cu", "i % 2 ? 0x7632", "i % 2 ? 0x5410"),
    "the second place is 1": ("transposable.cu", "(right1 | ~masks) & 0x44444444", "0x44444444"),
    "a tile beyond the end has codes": ("transposable.cu", ", gridDim.y) : 0;", ", 1) : 0x3333;"),
    "chunks are stored elsewhere": ("transposable.cu", "chunk_at(down, chunk)", "chunk"),
    "no barrier": ("transposable.cu", "  __syncthreads();  // masks", "  // masks"),
    "padding is not written": (
        "transposable.cu",
        "row_block >= row_blocks",
        "row_block * 16 >= (side ? columns : rows)",
    ),
}


@NEEDS_COMPILER
@pytest.mark.sampled(2)
@pytest.mark.parametrize("fault", [*FAULTS, *TRANSPOSABLE_FAULTS])
def test_a_planted_fault_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    emulate_edited(monkeypatch, tmp_path, *(FAULTS | TRANSPOSABLE_FAULTS)[fault], EMULATOR)

    def is_right(w: torch.Tensor) -> bool:
        # Memory of earlier tests could hold the right answer: it is overwritten where nothing is stored.
        if fault in TRANSPOSABLE_FAULTS:
            return _is_transposable_right(w, _poisoned(with_cuda.prune_transposable, w))
        pair = _poisoned(with_cuda.prune, w)
        taken = _poisoned(partial(with_cuda.compress, metadata=pair[1]), w)
        is_expanded = _same(with_cuda.expand(*pair), pattern.expand(*pair))
        return _is_pruned_right(w, pair) and is_expanded and _same(taken, pattern.compress(w, pair[1]))

    def _poisoned(function: Any, w: torch.Tensor) -> Any:
        with monkeypatch.context() as patch:
            empty = torch.empty
            patch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(7))
            return function(w)

    try:
        ok = all(is_right(w) for w in _weights().values())
    except (EmulatorError, RuntimeError):
        return
    assert not ok


# ---- Gradients and arguments


def test_gradients_go_to_the_elements_that_stay() -> None:
    w = torch.randn(20, 72, requires_grad=True)
    values, metadata = ops.prune_2_4(w, impl="eager")
    grad = torch.randn_like(values)
    (dw,) = torch.autograd.grad(values, w, grad)
    assert torch.equal(dw, pattern.expand(grad, metadata))
    leaf = values.detach().requires_grad_()
    dense_grad = torch.randn(20, 72)
    (dvalues,) = torch.autograd.grad(ops.expand_2_4(leaf, metadata, impl="triton"), leaf, dense_grad)
    assert torch.equal(dvalues, pattern.compress(dense_grad, metadata))


def test_arguments_without_an_answer_get_one_clear_error() -> None:
    w, x = torch.randn(8, 16).half(), torch.randn(3, 16).half()
    values, metadata = ops.prune_2_4(w, impl="eager")
    calls: tuple[tuple[Any, tuple[Any, ...]], ...] = (
        (ops.prune_2_4, (w[:, :6],)),
        (ops.prune_2_4, (w.double(),)),
        (ops.prune_2_4_transposable, (w[:6],)),
        (ops.prune_2_4_transposable, (w.clone().requires_grad_(),)),
        (ops.expand_2_4, (values[:, :5], metadata)),
        (ops.expand_2_4, (values, metadata[:, :4])),
        (ops.expand_2_4, (values, metadata.long())),
        (ops.sparse_linear, (x[:, :12], values, metadata)),
        (ops.sparse_linear, (x.float(), values, metadata)),
        (ops.sparse_linear, (x, values, metadata, x[0])),
    )
    for function, arguments in calls:
        with pytest.raises(WeftError) as caught:
            function(*arguments)
        assert caught.value.expected and caught.value.got


def test_the_hint_of_a_shape_that_is_not_in_fours_pads_it_to_one_that_is() -> None:
    for function, shape in ((ops.prune_2_4, (3, 6)), (ops.prune_2_4_transposable, (3, 6))):
        w = torch.randn(shape)
        with pytest.raises(WeftError) as caught:
            function(w)
        padded = eval(str(caught.value.hint), {"torch": torch, "w": w})
        assert function(padded)[0].shape[1] == 4
