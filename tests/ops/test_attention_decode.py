"""Attention for decoding: CUDA kernels in the emulator, batch invariance, pages, and refused arguments."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import sampling, warp_emulator
from helpers.paths import HELPERS
from weft import WeftError, ops
from weft.core import registry
from weft.ops.attention_decode import spec, with_cuda, with_triton
from weft.ops.attention_decode.cases import decode_case
from weft.ops.attention_decode.launches import DecodeLaunches
from weft.ops.attention_decode.with_cuda import Config
from weft.workbench.check.batch_invariance import unsuitable

EMULATOR = HELPERS / "mma_emulator.hpp"
OPERATOR = registry.operator("attention_decode")
NEEDS_COMPILER = pytest.mark.skipif(warp_emulator.COMPILER is None, reason="no g++ for the kernels")
# dtype, (B, T, H, D), (Hkv, capacity), page size, configuration. The first has three splits and one row tile;
# then two row tiles of several tokens; columns that are no multiple of 32; a single split with two warps.
POINTS: dict[str, tuple[torch.dtype, tuple[int, ...], tuple[int, int], int, Config]] = {
    "paged": (torch.bfloat16, (4, 1, 4, 64), (2, 1100), 32, Config()),
    "tokens": (torch.float16, (3, 5, 8, 64), (2, 530), 0, Config(mt=1, stages=2)),
    "odd-columns": (torch.bfloat16, (3, 3, 12, 40), (1, 90), 16, Config(mt=2)),
    "wide": (torch.float16, (3, 1, 2, 256), (2, 70), 0, Config(warps=2, stages=2)),
}


def draw(
    dtype: torch.dtype, q: tuple[int, ...], kv: tuple[int, int], page_size: int = 0, seed: int = 0
) -> tuple[torch.Tensor, ...]:
    """Return the inputs of a ragged case: lengths of 0, all, more than all, and others."""
    name = str(dtype).removeprefix("torch.")
    case = decode_case(*q, kv=kv, page_size=page_size, dtype=name, ragged=True)
    return tuple(spec.draw(case, seed, "cpu"))


def exact(inputs: tuple[torch.Tensor, ...], paged: bool) -> torch.Tensor:
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    return spec.reference(*wide, paged=paged)


def close(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare with float64; rounding weights and output costs at most two units of the largest value."""
    tolerance = 2 * torch.finfo(out.dtype).eps * float(expected.abs().amax())
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=tolerance)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("decode")


@pytest.fixture
def nan_memory() -> Iterator[None]:
    """Fill allocated memory with NaN, so that what no kernel writes shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.slow
@NEEDS_COMPILER
@pytest.mark.usefixtures("nan_memory")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", POINTS)
def test_cuda_kernels_match_float64_in_the_emulator(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype, q, kv, page_size, config = POINTS[name]
    warp_emulator.emulate(monkeypatch, folder, EMULATOR)
    inputs, paged = draw(dtype, q, kv, page_size), page_size > 0
    close(with_cuda.forward_with(config, *inputs, paged=paged), exact(inputs, paged))


# fault: (right text, wrong text)
FAULTS = {
    "a weight's sum after rounding of tops": ("total[y][h] *= shrink;", ""),
    "values are not rescaled": ("acc[y][x][2 * h] *= shrink,", ""),
    "the last key is seen by all new tokens": ("keys - ((int)tokens - 1 - token) : 0;", "keys : 0;"),
    "no wait for copies": ("copies_wait<STAGES - 2>();", ""),
    "one stage too early": ("stream.load(i + STAGES - 1, next)", "stream.load(i + STAGES, next)"),
    "the page of another step": ("next = stream.page(i + STAGES, count);", ""),
    "keys past the end are read": ("r < rows && chunk", "chunk"),
    "a split without keys is merged": ("(keys + SPLIT - 1) / SPLIT;", "(int)splits;"),
    "splits are not rescaled": ("sum = fmaf(from[i * step + column], factor, sum);",
                                "sum += from[i * step + column];"),
    "one warp is left out": ("for (int w = 0; w < WARPS; ++w)\n      sum",
                             "for (int w = 1; w < WARPS; ++w)\n      sum"),
    "another head": ("kv_head * group + row % (int)group) * q_head", "kv_head * group) * q_head"),
    "the first page for all": ("page * v_page", "0 * v_page"),
}  # fmt: skip


@pytest.mark.slow
@NEEDS_COMPILER
@pytest.mark.usefixtures("nan_memory")
@pytest.mark.sampled(1)  # each is compiled for some seconds
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = draw(torch.bfloat16, (4, 3, 4, 32), (2, 1100), 16)
    warp_emulator.emulate_edited(
        monkeypatch, tmp_path, "attention_decode.cu", *FAULTS[fault], header=EMULATOR
    )
    out = with_cuda.forward_with(Config(), *inputs, paged=True)
    with pytest.raises(AssertionError):
        close(out, exact(inputs, True))


def assert_invariant(forward: Any, inputs: tuple[torch.Tensor, ...], paged: bool) -> None:
    """Compare each sequence of a batch with the same sequence alone, bit by bit.

    A contiguous cache is also compared with one that has room for more splits.
    """
    q, k, v, lengths, table = inputs
    whole = forward(*inputs, paged=paged)
    for b in range(q.shape[0]):
        one = slice(b, b + 1)
        cache = (k, v) if paged else (k[one].clone(), v[one].clone())
        alone = forward(q[one].clone(), *cache, lengths[one].clone(), table[one].clone(), paged=paged)
        assert torch.equal(alone[0], whole[b])
        if not paged:
            longer = [torch.cat([x, torch.full_like(x, torch.nan)], 2) for x in cache]
            clamped = lengths[one].clamp(max=k.shape[2])
            again = forward(q[one], *longer, clamped, table[one], paged=False)
            assert torch.equal(again[0], whole[b])


@pytest.mark.slow
@NEEDS_COMPILER
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["paged", "tokens"])
def test_cuda_bits_of_a_sequence_do_not_depend_on_the_batch(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype, q, kv, page_size, config = POINTS[name]
    warp_emulator.emulate(monkeypatch, folder, EMULATOR)
    inputs = draw(dtype, q, kv, page_size, seed=1)

    def forward(*x: torch.Tensor, paged: bool) -> torch.Tensor:
        return with_cuda.forward_with(config, *x, paged=paged)

    assert_invariant(forward, inputs, page_size > 0)


@pytest.mark.parametrize("page_size", [0, 24])
def test_triton_bits_of_a_sequence_do_not_depend_on_the_batch(page_size: int) -> None:
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here; weft check --batch-invariant compares them on the GPU")
    inputs = draw(torch.float32, (4, 2, 2, 16), (1, 600), page_size)
    assert_invariant(with_triton.forward, inputs, page_size > 0)


def test_the_configuration_depends_on_neither_batch_nor_lengths() -> None:
    """Shared memory and packed rows alone choose it; the smallest device with cp.async has 99 KiB a block."""
    for d in range(8, 257, 8):
        for rows in (1, 4, 16, 17, 64, 200):
            for kib in (99, 163, 227):
                config = with_cuda.configure(d, rows, kib << 10)
                assert config.smem_bytes(d) <= kib << 10
                assert config.mt * d <= 256 and config.mt in (1, 2)


@pytest.mark.parametrize("impl", ["eager", "torch", "triton"])
def test_a_page_that_does_not_exist_makes_its_sequence_nan(impl: str) -> None:
    q, k, v, lengths, table = draw(torch.float32, (4, 1, 2, 16), (1, 40), 8)
    right = ops.attention_decode(q, k, v, lengths, block_table=table, impl=impl)
    wrong = table.clone()
    wrong[1, 2], wrong[3, 0] = k.shape[0], -1
    out = ops.attention_decode(q, k, v, lengths, block_table=wrong, impl=impl)
    assert out[1].isnan().all() and out[3].isnan().all()
    assert torch.equal(out[::2], right[::2]) and not out[::2].isnan().any()


@pytest.mark.slow
@NEEDS_COMPILER
def test_a_page_that_does_not_exist_is_never_an_address_in_cuda(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype, q, kv, page_size, config = POINTS["paged"]
    warp_emulator.emulate(monkeypatch, folder, EMULATOR)
    inputs = draw(dtype, q, kv, page_size)
    inputs[4][1, 20], inputs[4][2, 0] = 2**31 - 1, -(2**31)
    out = with_cuda.forward_with(config, *inputs, paged=True)
    assert out[1:3].isnan().all() and not out[::3].isnan().any()


@pytest.mark.parametrize("impl", ["eager", "torch", "triton"])
def test_one_new_token_has_three_dimensions_and_equals_attention(impl: str) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 16), torch.randn(2, 2, 9, 16), torch.randn(2, 2, 9, 16)
    lengths = torch.tensor([9, 9], dtype=torch.int32)
    out = ops.attention_decode(q, k, v, lengths, impl=impl)
    expected = ops.attention(q[:, :, None], k, v, impl="eager")[:, :, 0]
    assert out.shape == q.shape and out.is_contiguous()
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("impl", ["eager", "triton"])
def test_several_tokens_equal_the_same_tokens_one_by_one(impl: str) -> None:
    q, k, v, lengths, _ = draw(torch.float32, (4, 3, 2, 16), (1, 21))
    together = ops.attention_decode(q, k, v, lengths, impl=impl)
    clamped = lengths.clamp(0, 21)
    for t in range(3):
        alone = ops.attention_decode(q[:, t], k, v, (clamped - (2 - t)).int(), impl=impl)
        torch.testing.assert_close(alone, together[:, t])


ARGUMENTS: dict[str, Any] = {
    "q": torch.ones(2, 4, 16),
    "k": torch.ones(2, 2, 9, 16),
    "v": torch.ones(2, 2, 9, 16),
    "lengths": torch.ones(2, dtype=torch.int32),
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": "text"}, r"expected a tensor \(B, H, D\)"),
        ({"q": torch.ones(2, 4)}, "2 dimensions"),
        ({"q": torch.ones(2, 4, 16).half()}, "q and k of one dtype"),
        ({"q": torch.ones(2, 3, 16)}, "3 of q, 2 of k"),
        ({"q": torch.ones(2, 17, 4, 16)}, "at most 16"),
        ({"v": torch.ones(2, 2, 8, 16)}, "the shapes"),
        ({"k": torch.ones(3, 2, 9, 16), "v": torch.ones(3, 2, 9, 16)}, "the shapes"),
        (dict.fromkeys(("k", "v"), torch.ones(2, 2, 9, 12)) | {"q": torch.ones(2, 4, 12)}, "multiple of 8"),
        ({"lengths": torch.ones(2)}, "int32"),
        ({"lengths": torch.ones(3, dtype=torch.int32)}, "2 rows"),
        ({"block_table": torch.ones(2, dtype=torch.int32)}, "2 dimensions"),
        ({"block_table": torch.ones(3, 1, dtype=torch.int32)}, "2 rows"),
        ({"scale": -1.0}, "above 0"),
        ({"q": torch.ones(2, 4, 16, requires_grad=True)}, "no gradient"),
        ({"impl": "tritn"}, "tritn"),
    ],
)  # fmt: skip
def test_invalid_arguments_get_one_clear_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(WeftError, match=message) as caught:
        ops.attention_decode(**{**ARGUMENTS, **changes})
    assert caught.value.expected and caught.value.got


def test_registered_as_pytorch_asks() -> None:
    packet = torch.ops.weft.attention_decode.default
    inputs = draw(torch.float32, (2, 1, 2, 16), (1, 40), 8)
    results = torch.library.opcheck(packet, (*inputs, None, True, "triton"))
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_traced_whole(impl: str) -> None:
    torch._dynamo.reset()
    inputs = draw(torch.float32, (2, 1, 2, 16), (1, 40), 8)

    def call(*x: torch.Tensor) -> torch.Tensor:
        return ops.attention_decode(*x[:4], block_table=x[4], impl=impl)

    traced = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(traced(*inputs), call(*inputs))


def test_supports_have_reasons_that_name_an_alternative() -> None:
    def reason(name: str) -> str:
        return with_cuda.supports(OPERATOR.case(name), "cuda").reason

    assert "triton" in reason("fp32-2x1x2x16-2x37")
    paged = next(c for c in OPERATOR.cases if "-paged-24" in c.name)
    assert with_triton.supports(paged, "cuda")
    half = next(c for c in sampling.sample(list(OPERATOR.cases), 999, "cases") if c.dtype == "bfloat16")
    assert with_cuda.supports(half, "cuda")


def test_cost_counts_each_visible_key_once() -> None:
    case = OPERATOR.case("bf16-32x1x32x128-8x8192-paged-64")
    cost = OPERATOR.cost(case, "forward")
    of_keys = 2 * 32 * 8 * 8192 * 128 * 2
    assert cost.read == of_keys + 32 * 32 * 128 * 2 + 32 * 4 + 32 * 128 * 4
    assert cost.written == 32 * 32 * 128 * 2 and cost.flops == 4 * 32 * 32 * 8192 * 128
    ragged = next(c for c in OPERATOR.cases if c.name == "fp32-4x1x4x16-2x40-ragged")
    lengths = [min(int(n), 40) for n in spec.draw(ragged, 0, "cpu")[3]]
    assert OPERATOR.cost(ragged, "forward").read == sum(lengths) * 2 * 2 * 16 * 4 + 4 * 4 * 16 * 4 + 4 * 4


def test_rows_of_pages_are_not_cut() -> None:
    assert "pages" in unsuitable(OPERATOR, OPERATOR.case("bf16-32x1x32x128-8x8192-paged-64"))
    assert not unsuitable(OPERATOR, OPERATOR.case("bf16-32x1x32x128-8x8192"))


def test_a_repeated_launch_passes_the_addresses_of_its_own_tensors() -> None:
    """Calls of a known kind launch splits and merge again; other kinds and views between elements do not."""
    launched: list[tuple[int, ...]] = []
    launches = DecodeLaunches()

    def inputs(shift: int = 0) -> tuple[torch.Tensor, ...]:
        k = torch.zeros(2 * 2 * 600 * 16 + 1)[shift : shift + 2 * 2 * 600 * 16].view(2, 2, 600, 16)
        return torch.zeros(2, 1, 4, 16), k, k.clone(), torch.zeros(2, dtype=torch.int32), torch.zeros(0)

    first, again = inputs(), inputs()
    key = launches.key(first, None, False)
    assert launches.repeat(key, first) is None
    launches.store(key, lambda *a: launched.append(a), lambda *a: launched.append(a), 8, 2)
    out = launches.repeat(launches.key(again, None, False), again)
    assert out is not None and out.shape == again[0].shape
    (split, merge), (q, k, v, lengths, table) = launched, (x.data_ptr() for x in again)
    assert split[:6] == (q, k, v, lengths, table, out.data_ptr()) and merge == (
        split[6],
        lengths,
        out.data_ptr(),
    )
    assert launches.repeat(launches.key(again, 0.5, False), again) is None
    assert launches.repeat(key, inputs(shift=1)) is None and len(launched) == 2
