"""Attention's wgmma forward in the emulator: sizes, masks, lengths and schedules; planted faults are seen."""

from __future__ import annotations

import ctypes
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import warp_emulator
from helpers.attention_wgmma_faults import (
    AHEAD,
    BF16,
    CAPPED,
    FAR_AHEAD,
    FAULTS,
    FEW_KEYS,
    FREE,
    IN_Q,
    INVARIANT,
    LARGE,
    LATE,
    LATE_MASK,
    MANY,
    MEDIUM,
    NARROW_CAUSAL,
    NARROW_END,
    NARROW_OFTEN,
    NO_KEYS,
    POINTS,
    RIGHT,
    SEVERAL,
    SLOTS,
    SMALL,
    THREE,
    TWO,
    WINDOW,
    Point,
)
from helpers.paths import SRC, TESTS
from helpers.warp_emulator import EmulatorError
from weft.backends import disassemble
from weft.backends.nvrtc import CudaSource
from weft.core import registry
from weft.ops._common.hopper import tensor_map, wgmma_shapes
from weft.ops.attention import attention_wgmma, with_cuda
from weft.ops.attention.attention_wgmma import PLAIN, VARIANTS, Config
from weft.ops.attention.mask import BOTTOM_RIGHT
from weft.ops.attention.spec import AttentionOptions, reference

EMULATOR = TESTS / "helpers" / "hopper_emulator.hpp"
LIBRARY = SRC / "weft/ops/_common/hopper"
KERNEL = SRC / "weft/ops/attention/attention_wgmma.cu"
SOFTMAX = KERNEL.with_name("attention_wgmma_softmax.cuh")
# Bounds relative to an output's largest value and to its root mean square, in eps of the dtype: those of
# test_attention_cuda.py.
LARGEST, MEAN = 1.0, 0.6


def toy_map(
    pointer: int, dtype: torch.dtype, sizes: tuple[int, ...], strides: tuple[int, ...], box_rows: int
) -> tensor_map.TensorMap:
    """Return a tensor map as the emulator reads it."""
    box = (tensor_map.SWIZZLE_BYTES // dtype.itemsize, box_rows)
    words = (pointer, *sizes[:2], strides[0], *box, dtype.itemsize, *sizes[2:], *strides[1:])
    return tensor_map.TensorMap((ctypes.c_uint64 * 16)(*words))


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    warp_emulator.emulate(monkeypatch, tmp_path_factory.getbasetemp(), EMULATOR)
    monkeypatch.setattr(tensor_map, "_encode_heads", toy_map)
    monkeypatch.setattr(attention_wgmma, "num_sms", lambda device: 2)


def rows_of_a_model(
    b: int, h: int, t: int, d: int, dtype: torch.dtype, generator: torch.Generator, device: str
) -> torch.Tensor:
    """Return (B, H, T, D) with all heads of a token in one row, and NaN behind the tensor's last rows."""
    packed = torch.full((b, t + 1, h, d), torch.nan, dtype=dtype, device=device)
    packed[:, :t] = torch.randn((b, t, h, d), generator=generator).to(device, dtype)
    return packed[:, :t].transpose(1, 2)


def errors(point: Point, seed: int, device: str = "cpu") -> tuple[float, float, float]:
    """Return the errors of a call as shares of their bounds: largest, mean square, log-sum-exp."""
    dtype, (b, h, tq, d), (kv_heads, tk), key_lengths, options, config = point
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        rows_of_a_model(b, heads, t, d, dtype, generator, device)
        for heads, t in ((h, tq), (kv_heads, tk), (kv_heads, tk))
    )
    if not options.get("causal"):  # scores rise by 2^11 in each tile: the earlier sums must vanish
        q[..., 0], k[..., 0] = 8, torch.linspace(-16, 0, tk, device=device)
    lengths = torch.tensor(key_lengths or [0] * b, dtype=torch.int32, device=device)
    params = {**options, "padded": key_lengths is not None}
    expected, expected_lse = reference(q.double(), k.double(), v.double(), lengths, **params)
    for batch, length in enumerate(key_lengths or []):  # keys past a length may hold any values
        k[batch, :, length:], v[batch, :, length:] = torch.nan, torch.inf
    arguments = AttentionOptions(**params)
    assert attention_wgmma.supports(q, k, v, arguments)
    visible = lengths if params["padded"] else None
    out, lse = attention_wgmma.forward_with(config, q, k, v, visible, arguments)
    assert out.transpose(1, 2).is_contiguous()
    error = (out.double() - expected).abs().nan_to_num(1e9) / torch.finfo(dtype).eps
    largest = float(error.amax() / (LARGEST * expected.abs().amax()))
    mean = float(error.square().mean() / (MEAN * expected.square().mean().sqrt()) ** 2)
    # On a GPU the tensor cores cut the last bits of the scores' sums off, which reach 128 here.
    absolute = 3e-6 if device == "cpu" else 1e-4
    difference = torch.where(lse == expected_lse, 0.0, (lse.double() - expected_lse).abs().nan_to_num(1e9))
    finite = expected_lse.nan_to_num(neginf=0.0)
    return largest, mean, float((difference / (absolute + 1e-6 * finite.abs())).amax())


needs_compiler = pytest.mark.skipif(
    warp_emulator.COMPILER is None, reason="no g++ to compile the kernel with"
)


@needs_compiler
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "point", POINTS, ids=lambda p: f"{'x'.join(map(str, p[1]))}-{p[2][1]}-{p[5].label}-{'-'.join(p[4])}"
)
def test_the_forward_matches_the_reference_in_any_schedule(point: Point, emulated: None) -> None:
    for seed in range(2):  # each launch switches threads in another order
        assert max(errors(point, seed)) <= 1.0


@needs_compiler
@pytest.mark.sampled(1)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(
    fault: str, emulated: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of the kernel with one fault gives a wrong result or breaks the emulator's rules."""
    point, *replacements = FAULTS[fault]
    texts = {file.name: file.read_text() for file in (KERNEL, SOFTMAX)}
    for old, new in zip(replacements[::2], replacements[1::2], strict=True):
        assert sum(text.count(old) for text in texts.values()) == 1, "not in the files once"
        texts = {name: text.replace(old, new) for name, text in texts.items()}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    real = attention_wgmma.source
    monkeypatch.setattr(attention_wgmma, "source", lambda *a: replace(real(*a), file=tmp_path / KERNEL.name))
    shares = []
    for seed in range(8):
        try:
            shares += errors(point, seed)
        except EmulatorError:
            return
        if max(shares) > 2:
            return
    raise AssertionError("the fault does not show")


@needs_compiler
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "point",
    [
        SEVERAL,
        LATE,
        FEW_KEYS,
        IN_Q,
        WINDOW,
        MANY,
        RIGHT,
        NO_KEYS,
        CAPPED,
        SLOTS,
        NARROW_END,
        NARROW_CAUSAL,
        NARROW_OFTEN,
    ],
    ids=[
        "several",
        "late",
        "few",
        "in-q",
        "window",
        "many",
        "right",
        "no-keys",
        "capped",
        "slots",
        "narrow",
        "narrow-causal",
        "narrow-often",
    ],
)
def test_the_calls_of_the_planted_faults_are_right(point: Point, emulated: None) -> None:
    for seed in range(6):
        assert max(errors(point, seed)) <= 1.0


@needs_compiler
@pytest.mark.sampled(1)
@pytest.mark.parametrize("config", [SMALL, THREE], ids=["two-groups", "three-groups"])
def test_a_head_has_the_same_bits_whatever_is_beside_it(config: Config, emulated: None) -> None:
    """Neither the batch nor the schedule of blocks and threads changes a bit."""
    q, k, v = (torch.randn(2, 2, 150, 8).to(BF16) for _ in range(3))
    options = AttentionOptions(causal=True)
    out, lse = attention_wgmma.forward_with(config, q, k, v, None, options)
    for b, h in ((0, 1), (1, 0)):
        one = [x[b : b + 1, h : h + 1] for x in (q, k, v)]
        out_alone, lse_alone = attention_wgmma.forward_with(config, one[0], one[1], one[2], None, options)
        assert torch.equal(out_alone[0, 0], out[b, h]) and torch.equal(lse_alone[0, 0], lse[b, h])


@needs_compiler
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("first", "config"),
    [(SMALL, AHEAD), (SMALL, FAR_AHEAD), (SMALL, FREE)]
    + [(INVARIANT, config) for config in (THREE, TWO, MEDIUM, LARGE)],
    ids=lambda c: c.label,
)
def test_the_tile_of_keys_alone_decides_the_bits(first: Config, config: Config, emulated: None) -> None:
    q, k, v = (torch.randn(2, 2, 450, 8).to(BF16) * 3 for _ in range(3))
    for options in (AttentionOptions(causal=True), AttentionOptions(causal=True, window=130)):
        results = [attention_wgmma.forward_with(c, q, k, v, None, options) for c in (first, config)]
        assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


# ---- Batch invariance: each call computes queries of the whole one again, beside others or alone.

# (B, H, D), Hkv, tokens, options; scores are large, so that sums are rescaled in some tiles.
INVARIANT_CALLS: list[tuple[tuple[int, int, int], int, int, dict[str, Any]]] = [
    ((2, 2, 8), 2, 300, {}),
    ((1, 2, 72), 1, 290, {}),
    ((2, 2, 8), 1, 330, {"window": 140, "softcap": 3.0}),
]
# First and last query of a piece: one query at several places of a tile, and pieces that tiles do not divide.
PIECES = [(0, 1), (0, 129), (64, 65), (127, 128), (129, 130), (70, 200), (256, 257), (190, 290)]


def assert_queries_keep_their_bits(
    shape: tuple[int, int, int],
    kv_heads: int,
    tokens: int,
    dtype: torch.dtype,
    options: dict[str, Any],
    pieces: list[tuple[int, int]],
    device: str,
) -> None:
    """Compare the variant's queries and log-sum-exps, of causal attention, with no tolerance."""
    b, h, d = shape
    generator = torch.Generator().manual_seed(tokens)
    q, k, v = (
        rows_of_a_model(b, heads, tokens, d, dtype, generator, device) for heads in (h, kv_heads, kv_heads)
    )
    q = q * 4
    group = h // kv_heads
    none = torch.zeros(b, dtype=torch.int32, device=device)
    whole = with_cuda.forward_invariant(q, k, v, none, causal=True, **options)

    def compare(got: Any, batches: slice, heads: slice, queries: slice) -> None:
        for x, expected in zip(got, whole, strict=True):
            assert torch.equal(x, expected[batches, heads, queries]), (batches, heads, queries)

    run = partial(with_cuda.forward_invariant, causal=True, **options)
    every = slice(None)
    for head in (0, h - 1):  # one head of one batch, in memory of its own
        keys = slice(head // group, head // group + 1)
        one = slice(b - 1, b), slice(head, head + 1)
        copies = [x[one[0], y].clone() for x, y in ((q, one[1]), (k, keys), (v, keys))]
        compare(run(*copies, none[:1]), *one, every)
    for first, last in pieces:
        part = slice(first, last)
        late = {"alignment": BOTTOM_RIGHT}
        # The keys up to the piece's last query, as views of the whole; at the top left from the first query.
        arguments = q[:, :, part], k[:, :, :last], v[:, :, :last]
        compare(run(*arguments, none, **late), every, every, part)
        compare(run(q[:, :, :last], *arguments[1:], none), every, every, slice(0, last))
        # A cache of which the batches' lengths are used; what lies behind them is NaN.
        cached = [torch.full_like(x, torch.nan) for x in (k, v)]
        for cache, x in zip(cached, (k, v), strict=True):
            cache[:, :, :last] = x[:, :, :last]
        lengths = torch.full_like(none, last)
        compare(run(q[:, :, part], *cached, lengths, padded=True, **late), every, every, part)


@needs_compiler
@pytest.mark.sampled(1)
@pytest.mark.parametrize("point", INVARIANT_CALLS, ids=lambda p: "-".join(map(str, (*p[0], *p[3]))))
def test_a_query_has_the_same_bits_in_every_batch_and_length(
    point: tuple[tuple[int, int, int], int, int, dict[str, Any]], emulated: None
) -> None:
    shape, kv_heads, tokens, options = point
    assert_queries_keep_their_bits(shape, kv_heads, tokens, BF16, options, PIECES, "cpu")


@needs_compiler
def test_other_tiles_of_keys_give_other_bits(emulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration that depends on the length is seen."""
    configs = iter([INVARIANT, SMALL] + [INVARIANT] * 99)
    monkeypatch.setattr(attention_wgmma, "choose_invariant", lambda d: next(configs))
    with pytest.raises(AssertionError):
        assert_queries_keep_their_bits((1, 1, 8), 1, 300, BF16, {}, [], "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("d", [8, 40, 64, 80, 128, 192, 256])
@pytest.mark.parametrize("dtype", attention_wgmma.DTYPES)
def test_a_query_has_the_same_bits_in_every_batch_and_length_on_a_gpu(dtype: torch.dtype, d: int) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma exists on compute capability 9.0 alone")
    pieces = [*PIECES, (700, 701), (1000, 1300), (0, 1500), (1499, 1500)]
    for options in ({}, {"window": 300}, {"softcap": 3.0}, {"window": 77, "softcap": 2.0}):
        assert_queries_keep_their_bits((5, 4, d), 2, 1500, dtype, options, pieces, "cuda")


def test_the_configuration_of_invariant_calls_depends_on_the_head_size_alone() -> None:
    chosen = {d: attention_wgmma.choose_invariant(d) for d in (8, 64, 128, 192, 256)}
    assert {d: c.keys for d, c in chosen.items()} == {8: 128, 64: 128, 128: 128, 192: 96, 256: 80}


def test_invariant_calls_name_their_limits() -> None:
    variant = registry.implementation("attention", "cuda/invariant")
    for case in registry.operator("attention").cases:
        answer = variant.supports(case, "cpu")
        options = AttentionOptions.of(case)
        is_refused = bool(case.dtype == "float32" or options.dropout_p or options.terms)
        assert not (is_refused and answer), case.name
        # No other implementation on a GPU has such a variant: none is recommended.
        assert answer or "impl=" not in answer.reason


# Of each width of a head in a product, what ships and what `choose` may take.
SOURCES = dict.fromkeys(
    (
        *(s for s in attention_wgmma.aot_kernels() if "bfloat16" in s.label),
        *(
            attention_wgmma.source(BF16, d, c.for_softcap if v.softcap else c, v)
            for d in (64, 80, 96, 128)
            for c in attention_wgmma.candidates(d)
            for v in (PLAIN, *VARIANTS)
        ),
    )
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "source",
    SOURCES,
    ids=lambda s: s.label,
)
def test_products_run_during_the_exponentials(source: CudaSource) -> None:
    """No register is spilled, no product is waited for alone, and the loop's last wait is behind its powers.

    The five waits: for the first scores; in the loop for the scores, and for the values in two branches; for
    the last values. Half a tile at the end has six more: two where it is the only one, four where it follows.
    """
    sass = disassemble.sass(source.compile("sm_90a"))
    assert not re.search(r"\b(STL|LDL)\b", sass)
    defines = dict(source.defines)
    keys, is_narrow = int(defines["KEYS"]), defines["NARROW_END"] == "1"
    assert sass.count("WARPGROUP.DEPBAR") == (11 if is_narrow else 5)
    _, *overlaps = sass.split("WARPGROUP.DEPBAR.LE gsb0, 0x1")
    powers = sorted(part.partition("WARPGROUP.DEPBAR")[0].count("MUFU.EX2") for part in overlaps)
    # The compiler moves a few of the keys / 4 powers of half a tile behind the wait.
    least = [keys // 5, keys // 2] if is_narrow else [keys // 2]
    assert all(count >= bound for count, bound in zip(powers, least, strict=True))


def test_the_generated_shapes_are_current() -> None:
    assert (LIBRARY / "wgmma_score_shapes.cuh").read_text() == wgmma_shapes.text_scores()


def test_every_configuration_fits_in_shared_memory() -> None:
    for most, configs in attention_wgmma.CANDIDATES.items():
        assert all(config.smem_bytes(most) <= 227 << 10 for config in configs)


def test_a_third_group_is_chosen_where_it_has_queries() -> None:
    rows = {t: attention_wgmma.choose(64, t, t, True).rows for t in (20, 197, 512, 3001, 8192)}
    assert rows == {20: 128, 197: 128, 512: 192, 3001: 192, 8192: 192}


def test_a_smaller_tile_of_keys_is_chosen_where_it_saves_keys() -> None:
    """Tiles of 128 end with half a tile: of 400 keys they compute 448 as tiles of 112 do, of 50 keys 64."""
    keys = {t: attention_wgmma.choose(64, 197, t, False).keys for t in (50, 112, 128, 197, 256, 400, 1024)}
    assert keys == {50: 128, 112: 112, 128: 128, 197: 112, 256: 128, 400: 128, 1024: 128}
    assert attention_wgmma.choose(64, 197, 197, True).keys == 128


@pytest.mark.parametrize("keys", [80, 112, 128])
@pytest.mark.parametrize("narrow_end", [False, True])
def test_the_keys_that_a_group_computes_are_counted(keys: int, narrow_end: bool) -> None:
    """As attention_wgmma.cu does it: is_narrow() for keys without a mask."""
    config = Config(keys=keys, groups=2, narrow_end=narrow_end)
    for tk in range(1, 3 * keys):
        tiles = -(-tk // keys)
        is_narrow = narrow_end and tk <= (tiles - 1) * keys + keys // 32 * 16
        half = keys // 32 * 16
        assert config.computed_keys(tk) == (tiles - 1) * keys + (half if is_narrow else keys)


def test_every_candidate_is_chosen_somewhere() -> None:
    calls = [(t, causal) for t in (197, 1024) for causal in (True, False)]
    for most, configs in attention_wgmma.CANDIDATES.items():
        chosen = {attention_wgmma.choose(most, t, t, causal) for t, causal in calls}
        assert chosen == set(configs)


@pytest.mark.parametrize("d", [8, 64, 72, 96, 104, 128, 192, 256])
def test_capped_calls_take_the_same_tiles_of_keys_in_turns(d: int) -> None:
    """They compute no half tile at the end."""
    for t, causal in ((197, True), (197, False), (1024, True), (1024, False)):
        config = attention_wgmma.choose(d, t, t, causal, softcap=True)
        assert config.keys == attention_wgmma.choose(d, t, t, causal).keys
        assert config.pingpong and not config.narrow_end


def test_tensors_that_the_copy_engine_cannot_read_are_not_supported() -> None:
    q, options = torch.zeros(2, 3, 20, 72, dtype=BF16), AttentionOptions()
    padded = torch.zeros(2, 3, 20, 80, dtype=BF16)[..., :72]

    def supports(x: torch.Tensor, options: AttentionOptions = options) -> bool:
        return attention_wgmma.supports(x, x, x, options)

    assert supports(q) and supports(padded) and supports(q.transpose(1, 2)) and supports(q[:, :, ::2])
    assert not supports(q.float())
    assert not supports(q, AttentionOptions(dropout_p=0.5))
    assert not supports(q[..., 4:68])  # begins between two multiples of 16 bytes
    assert not supports(torch.zeros(2, 3, 20, 76, dtype=BF16)[..., :72])
    assert not supports(q[:1].expand(2, -1, -1, -1))
    assert not supports(q.transpose(2, 3))
    assert not supports(q[:, :, :0])


def test_only_calls_that_the_kernel_supports_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(with_cuda, "has_wgmma", lambda device: True)
    monkeypatch.setattr(attention_wgmma, "forward", lambda q, k, v, lengths, options: calls.append(lengths))
    monkeypatch.setattr(with_cuda, "forward_with", lambda *arguments, **params: calls.append("mma.sync"))
    q, lengths = torch.zeros(2, 3, 20, 72, dtype=BF16), torch.ones(2, dtype=torch.int32)
    with_cuda.forward(q, q, q, lengths)
    with_cuda.forward(q, q, q, lengths, dropout_p=0.5)
    with_cuda.forward(q[..., 4:68], q[..., 4:68], q[..., 4:68], lengths)  # copied to aligned rows
    with_cuda.forward(q, q, q, lengths, padded=True)
    monkeypatch.setattr(with_cuda, "has_wgmma", lambda device: False)
    with_cuda.forward(q, q, q, lengths)
    assert calls[:3] == [None, "mma.sync", None]
    assert torch.equal(calls[3], lengths)
    assert calls[4:] == ["mma.sync"]


GPU_POINTS: list[tuple[tuple[int, int, int, int], tuple[int, int], Any, dict[str, Any]]] = [
    ((1, 4, 700, 0), (2, 700), None, {"causal": True}),
    ((1, 3, 577, 0), (3, 845), None, {}),
    ((1, 2, 900, 0), (1, 400), None, {"causal": True}),
    ((3, 4, 300, 0), (4, 900), [0, 777, 2000], {"scale": 0.1}),
    ((3, 4, 520, 0), (2, 500), [1, 333, 500], {"causal": True}),
    ((17, 8, 200, 0), (8, 200), None, {"causal": True}),  # several tiles for each block
    ((1, 1, 1, 0), (1, 1), None, {}),
    ((2, 4, 1500, 0), (2, 1500), None, {"causal": True, "window": 300}),
    ((2, 2, 333, 0), (2, 1200), [1200, 500], {**LATE_MASK, "window": 77, "softcap": 2.0}),
    ((1, 2, 700, 0), (1, 300), None, LATE_MASK),
    ((1, 2, 577, 0), (2, 1333), None, {"softcap": 5.0}),
]


@pytest.mark.gpu
@pytest.mark.parametrize("d", [8, 40, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", attention_wgmma.DTYPES)
def test_the_forward_matches_the_reference_on_a_gpu(dtype: torch.dtype, d: int) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma exists on compute capability 9.0 alone")
    for config in dict.fromkeys((*attention_wgmma.candidates(d), attention_wgmma.choose_invariant(d))):
        for q, kv, lengths, options in GPU_POINTS:
            one = config.for_softcap if "softcap" in options else config
            point = (dtype, (*q[:3], d), kv, lengths, options, one)
            shares = [errors(point, 0, "cuda"), errors(point, 0, "cuda")]
            assert max(shares[0]) <= 1.0, (q, kv, one.label)
            assert shares[0] == shares[1], "other bits in the second run"
