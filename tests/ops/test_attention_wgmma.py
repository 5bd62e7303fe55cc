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
from helpers.paths import SRC, TESTS
from helpers.warp_emulator import EmulatorError
from weft.backends import disassemble
from weft.backends.nvrtc import CudaSource
from weft.core import registry
from weft.ops._common.hopper import tensor_map, wgmma_shapes
from weft.ops.attention import attention_wgmma, with_cuda
from weft.ops.attention.attention_wgmma import Config
from weft.ops.attention.mask import BOTTOM_RIGHT
from weft.ops.attention.spec import AttentionOptions, reference

EMULATOR = TESTS / "helpers" / "hopper_emulator.hpp"
LIBRARY = SRC / "weft/ops/_common/hopper"
KERNEL = SRC / "weft/ops/attention/attention_wgmma.cu"
BF16, FP16 = torch.bfloat16, torch.float16
THREE, TWO = attention_wgmma.candidates(64)[:2]
CAUSAL, FULL, SHARED = attention_wgmma.candidates(128)[:3]
SMALL = Config(keys=80, groups=2)
SMALL_SHARED = Config(keys=80, groups=2, out_in_q=True)
# The producer runs ahead into the next tile of queries.
AHEAD = Config(keys=80, groups=2, query_slots=2, stages=3)
AHEAD_THREE = Config(keys=128, groups=3, query_slots=2)
FAR_AHEAD = Config(keys=80, groups=3, query_slots=2, stages=4)
FREE = Config(keys=80, groups=3, query_slots=2, stages=3, turns=False, static_order=True)
FREE_TWO = Config(keys=128, groups=2, turns=False)
KEYS_FIRST = Config(keys=80, groups=2, keys_first=True)
KEYS_FIRST_SHARED = Config(keys=80, groups=2, out_in_q=True, keys_first=True)
WIDE = attention_wgmma.candidates(256)[0]
MIDDLE = attention_wgmma.candidates(192)[0]
LATE_MASK = {"causal": True, "alignment": BOTTOM_RIGHT}
# dtype, (B, H, Tq, D), (Hkv, Tk), key lengths, options, configuration.
Point = tuple[torch.dtype, tuple[int, int, int, int], tuple[int, int], Any, dict[str, Any], Config]
POINTS: list[Point] = [
    (BF16, (1, 2, 200, 64), (2, 200), None, {"causal": True}, THREE),
    (FP16, (1, 2, 130, 64), (1, 333), None, {}, TWO),
    (BF16, (3, 1, 20, 64), (1, 300), [0, 400, 130], {"scale": 0.125}, TWO),
    (BF16, (2, 2, 150, 40), (1, 290), [290, 33], {"causal": True}, THREE),
    (FP16, (1, 3, 70, 8), (3, 19), None, {"causal": True}, THREE),
    (BF16, (1, 2, 129, 80), (2, 200), None, {"causal": True}, CAUSAL),
    (BF16, (1, 2, 70, 128), (2, 330), None, {}, FULL),
    (FP16, (1, 4, 140, 128), (2, 150), None, {"causal": True}, CAUSAL),
    (BF16, (2, 1, 130, 96), (1, 370), [177, 352], {}, SHARED),
    (FP16, (1, 1, 150, 72), (1, 40), None, {"causal": True}, SMALL),
    (BF16, (1, 1, 70, 192), (1, 130), None, {"causal": True}, MIDDLE),
    (BF16, (2, 1, 33, 256), (1, 170), [100, 161], {}, WIDE),
    (BF16, (1, 2, 200, 40), (1, 300), None, {"causal": True, "window": 70}, THREE),
    (FP16, (1, 1, 330, 8), (1, 200), None, {"causal": True, "window": 33}, SMALL),
    (BF16, (1, 2, 150, 72), (2, 410), None, {**LATE_MASK, "window": 100}, SMALL_SHARED),
    (BF16, (3, 1, 170, 64), (1, 300), [0, 300, 130], {**LATE_MASK, "window": 1}, TWO),
    (FP16, (1, 1, 200, 128), (1, 90), None, LATE_MASK, CAUSAL),  # the first queries see no key
    (BF16, (1, 2, 130, 64), (1, 333), None, {"softcap": 3.0}, TWO),
    (FP16, (1, 1, 140, 80), (1, 150), None, {"causal": True, "softcap": 1.0}, CAUSAL),
    (BF16, (2, 1, 150, 8), (1, 370), [177, 352], {**LATE_MASK, "window": 150, "softcap": 2.0}, THREE),
    # Two slots of queries: four or more tiles for each of the two blocks.
    (BF16, (2, 4, 201, 64), (2, 201), None, {"causal": True}, AHEAD_THREE),
    (FP16, (2, 4, 300, 40), (1, 333), [290, 33], {"causal": True}, AHEAD),
    (BF16, (3, 4, 197, 8), (4, 97), None, {}, FAR_AHEAD),
    (FP16, (2, 2, 450, 48), (1, 450), None, {"causal": True}, FREE),
    (BF16, (3, 3, 150, 64), (1, 300), [0, 300, 130], {}, FREE_TWO),
    (BF16, (1, 3, 500, 8), (1, 500), None, {"causal": True, "window": 100}, AHEAD),
    (FP16, (2, 2, 420, 40), (1, 600), [600, 333], {**LATE_MASK, "window": 150}, FREE),
    (BF16, (3, 2, 290, 8), (1, 370), [177, 352, 0], {**LATE_MASK, "window": 70, "softcap": 2.0}, FAR_AHEAD),
    (FP16, (1, 4, 200, 128), (2, 90), None, LATE_MASK, AHEAD),
    (BF16, (3, 2, 170, 64), (1, 300), [0, 300, 130], {**LATE_MASK, "window": 90}, KEYS_FIRST),
    (FP16, (1, 4, 200, 128), (2, 90), None, LATE_MASK, KEYS_FIRST_SHARED),
]
# A block computes several tiles of queries, each over several tiles of keys; heads share keys, and the last
# tile of keys ends with NaN. The second: groups that see different numbers of tiles of keys.
SEVERAL: Point = (BF16, (2, 2, 150, 72), (1, 250), [105, 250], {"causal": True}, SMALL)
LONG: Point = (BF16, (1, 2, 70, 8), (1, 560), None, {}, SMALL)
LATE: Point = (BF16, (1, 1, 330, 8), (1, 330), None, {"causal": True}, Config(keys=80, groups=3))
FEW_KEYS: Point = (BF16, (2, 4, 150, 8), (4, 40), None, {}, SMALL)
# The second group's window begins some tiles of keys behind the first group's.
WINDOW: Point = (BF16, (1, 1, 330, 8), (1, 330), None, {"causal": True, "window": 20}, SMALL)
# Several tasks for each block, in which the second group skips a tile.
MANY: Point = (BF16, (1, 1, 1000, 8), (1, 1000), None, {"causal": True, "window": 100}, SMALL)
RIGHT: Point = (BF16, (1, 1, 150, 8), (1, 290), [257], {**LATE_MASK, "window": 90}, SMALL)
NO_KEYS: Point = (BF16, (1, 1, 200, 8), (1, 90), None, LATE_MASK, SMALL)
CAPPED: Point = (BF16, (1, 1, 70, 8), (1, 200), None, {"softcap": 1.5}, SMALL)
# Short tiles, of which the producer has two ahead.
SLOTS: Point = (BF16, (2, 4, 300, 8), (4, 60), None, {}, AHEAD)
IN_Q: Point = (BF16, (1, 3, 200, 72), (1, 200), None, {}, SMALL_SHARED)
# name: the call, the text that is replaced, and by what; some have two replacements
FAULTS: dict[str, tuple[Any, ...]] = {
    "no proxy fence before the outputs are stored": (
        SEVERAL,
        "    fence_async_proxy();\n    named_barrier(",
        "    named_barrier(",
    ),
    "no proxy fence behind the zeros of a tail": (
        SEVERAL,
        "      fence_async_proxy();\n      __syncwarp();\n",
        "      __syncwarp();\n",
    ),
    "values past a length are not cleared": (SEVERAL, "store_zeros(to + box * KEY_BOX + chunk * 16);", ";"),
    "a tail is cleared before its values have come": (
        SEVERAL,
        "      wait(memory.tail(), tail_parity);\n",
        "",
    ),
    "the tail's parity stays": (SEVERAL, "      tail_parity ^= 1;\n", ""),
    "values are released while a product reads them": (
        LONG,
        "      wgmma_wait<1>();  // the scores",
        "      release_values();\n      wgmma_wait<1>();  // the scores",
        "      pin_registers(p);\n      release_values();\n",
        "      pin_registers(p);\n",
    ),
    "keys are released while a product reads them": (
        LONG,
        "      wgmma_wait<1>();  // the scores; the values' product runs on\n      pin_registers(s);\n"
        "      release_keys();\n",
        "      release_keys();\n      wgmma_wait<1>();\n",
    ),
    "queries are released while products read them": (
        SEVERAL,
        "    release_keys();\n    cap(s, args.cap_scale);\n    mask_tile(s, task, first, begin);\n",
        "    release_keys();\n    if (is_first_lane()) memory.queries().release(q_tile());\n"
        "    mask_tile(s, task, first, begin);\n",
    ),
    "a consumer waits for the wrong phase of the queries": (
        SEVERAL,
        "memory.queries().wait_full({q_tile(), q_ring.parity});",
        "memory.queries().wait_full({q_tile(), q_ring.parity ^ 1});",
    ),
    "scores are used before a wait": (
        SEVERAL,
        "      wgmma_wait<1>();  // the scores; the values' product runs on\n",
        "",
    ),
    "outputs are used before a wait": (
        SEVERAL,
        "    multiply_values(out, p, memory.v(v_ring.stage));\n    wgmma_wait<0>();\n",
        "    multiply_values(out, p, memory.v(v_ring.stage));\n",
    ),
    "weights are overwritten while a product reads them": (
        SEVERAL,
        "      if (softmax.weigh(s, args.scale_log2, shrink)) {\n",
        "      const bool raised = softmax.weigh(s, args.scale_log2, shrink);\n"
        "      round_weights(p, s);\n      if (raised) {\n",
    ),
    "no fence before the values' product": (
        FEW_KEYS,
        "    memory.values().wait_full(v_ring);\n    wgmma_fence();\n    multiply_values(",
        "    memory.values().wait_full(v_ring);\n    multiply_values(",
    ),
    "the mask shows one key too many": (SEVERAL, "min(task.keys, row + 1)", "min(task.keys, row + 2)"),
    "a tile that needs a mask gets none": (
        SEVERAL,
        "(args.causal ? min(task.keys, position + 1) : task.keys)) return;",
        "(args.causal ? min(task.keys, position + ROWS) : task.keys)) return;",
    ),
    "outputs are not rescaled": (
        IN_Q,
        "for (int i = 0; i < WIDTH / 2; ++i) out[i] *= shrink[i / 2 % 2];",
        ";",
    ),
    "totals are not rescaled": (IN_Q, "        total[h] *= shrink[h];\n", ""),
    "a group does not wait for its turn": (SEVERAL, "      take_turn();\n", ""),
    "a group does not pass its turn on": (SEVERAL, "      pass_turn();\n", ""),
    "nobody has the first turn": (SEVERAL, "    if (group == GROUPS - 1) pass_turn();", "    //"),
    "a skipped tile is freed before it is full": (
        LATE,
        "      memory.values().wait_full(v_ring);  // else",
        "      // else",
    ),
    "skipped tiles are not freed": (LATE, "      skip(task, end, task.key_tiles);\n", ""),
    "the next queries do not wait for the last ones' products": (
        FEW_KEYS,
        "      wait(memory.queries().empty(tile), q_ring.parity ^ 1);\n",
        "",
    ),
    "a slot is filled while the group reads it": (
        SLOTS,
        "      wait(memory.queries().empty(tile), q_ring.parity ^ 1);\n",
        "",
    ),
    "a slot of queries is released while products read it": (
        SLOTS,
        "    const int index = load_word(memory.task(q_tile()));\n    __syncwarp();",
        "    const int index = load_word(memory.task(q_tile()));\n"
        "    if (is_first_lane()) memory.queries().release(q_tile());\n    __syncwarp();",
        "    if (!OUT_IN_Q && is_first_lane()) memory.queries().release(q_tile());\n    memory.values()",
        "    memory.values()",
    ),
    "a group releases the slot that comes next": (
        SLOTS,
        "    if (!OUT_IN_Q && is_first_lane()) memory.queries().release(q_tile());\n    memory.values()",
        "    if (!OUT_IN_Q && is_first_lane()) memory.queries().release(query_tile(group, q_ring.stage));\n"
        "    memory.values()",
    ),
    "the second slot has the parity of the tile after it": (
        SLOTS,
        "memory.queries().wait_full({q_tile(), q_ring.parity});",
        "memory.queries().wait_full({q_tile(), q_ring.parity ^ q_ring.stage});",
    ),
    "the producer does not wait for the second slot's next phase": (
        SLOTS,
        "wait(memory.queries().empty(tile), q_ring.parity ^ 1);",
        "wait(memory.queries().empty(tile), q_ring.parity ^ 1 ^ q_ring.stage);",
    ),
    "the first keys are loaded twice": (
        (BF16, (2, 4, 300, 8), (4, 90), None, {}, KEYS_FIRST),
        " && !(KEYS_FIRST && j == task.first_key_tile)",
        "",
    ),
    "products read the queries of the other slot": (
        SLOTS,
        "const unsigned q = memory.q(q_tile());",
        "const unsigned q = memory.q(query_tile(group, q_ring.stage));",
    ),
    "the groups' slots overlap": (
        SLOTS,
        "return QUERY_SLOTS == 1 ? group : slot * GROUPS + group;",
        "return slot + group;",
    ),
    "outputs are overwritten while they are stored": (
        FEW_KEYS,
        "    if (!OUT_IN_Q && is_storer()) tma_wait_read<0>();\n",
        "",
    ),
    "queries come while outputs are stored from there": (
        IN_Q,
        "      if (OUT_IN_Q) tma_wait_read<0>();\n",
        "",
    ),
    "the block ends before its stores": (FEW_KEYS, "    if (is_storer()) tma_wait<0>();", "    //"),
    "a descriptor with the wrong distance of blocks": (
        SEVERAL,
        "descriptor<MN_MAJOR, KEY_BOX>",
        "descriptor<MN_MAJOR>",
    ),
    "the window shows one key too many": (WINDOW, "row + 1 - args.window", "row - args.window"),
    "a tile at the window's edge gets no mask": (
        WINDOW,
        "BAND && j * KEYS < position + ROWS",
        "false && j < ROWS",
    ),
    "tiles before a group's window are not freed": (
        WINDOW,
        "      if (BAND) skip(task, task.first_key_tile, begin);\n",
        "",
    ),
    "a group begins behind its window's first tile": (
        RIGHT,
        "- args.window + 1, 0) / KEYS : 0;",
        "- args.window + 1 + KEYS, 0) / KEYS : 0;",
    ),
    "the first tile of a group has no turn": (
        MANY,
        "const bool has_turn = BAND && begin",
        "const bool has_turn = false && begin",
    ),
    "the bottom right is that of all keys, not of the length": (
        RIGHT,
        "args.bottom_right ? keys - args.tq : 0",
        "args.bottom_right ? args.tk - args.tq : 0",
    ),
    "a row that has seen no key subtracts -inf": (WINDOW, "if (top[h] == -INFINITE) pivot[h] = 0.0f;", ";"),
    "scores are not capped": (
        CAPPED,
        "    s[i] = fmaf(-2.0f, reciprocal(power_of_2(s[i] * cap_scale) + 1.0f), 1.0f);",
        "    s[i] *= cap_scale;",
    ),
    "the cap comes after the mask": (
        (BF16, (1, 1, 70, 8), (1, 70), None, {"causal": True, "softcap": 1.5}, SMALL),
        "    cap(s, args.cap_scale);\n    mask_tile(s, task, first, begin);\n",
        "    mask_tile(s, task, first, begin);\n    cap(s, args.cap_scale);\n",
    ),
    "heads take the keys of the wrong group": (FEW_KEYS, "j * KEYS, task.head / args.group", "j * KEYS, 0"),
}


def is_new(config: Config) -> bool:
    """Return True if a program has a ring that ships nowhere yet."""
    return config.query_slots > 1 or config.stages > 2 or config.keys_first or not config.turns


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
    point, *texts = FAULTS[fault]
    text = KERNEL.read_text()
    for old, new in zip(texts[::2], texts[1::2], strict=True):
        assert text.count(old) == 1, "the text of the fault is not in the file once"
        text = text.replace(old, new)
    (tmp_path / KERNEL.name).write_text(text)
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
    [SEVERAL, LATE, FEW_KEYS, IN_Q, WINDOW, MANY, RIGHT, NO_KEYS, CAPPED, SLOTS],
    ids=["several", "late", "few", "in-q", "window", "many", "right", "no-keys", "capped", "slots"],
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
@pytest.mark.parametrize("config", [AHEAD, FAR_AHEAD, FREE, KEYS_FIRST], ids=lambda c: c.label)
def test_the_tile_of_keys_alone_decides_the_bits(config: Config, emulated: None) -> None:
    q, k, v = (torch.randn(2, 2, 450, 8).to(BF16) * 3 for _ in range(3))
    for options in (AttentionOptions(causal=True), AttentionOptions(causal=True, window=130)):
        results = [attention_wgmma.forward_with(c, q, k, v, None, options) for c in (SMALL, config)]
        assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


# ---- Batch invariance: each call computes queries of the whole one again, beside others or alone.

# (B, H, D), Hkv, tokens, options; scores are large, so that sums are rescaled in some tiles.
INVARIANT: list[tuple[tuple[int, int, int], int, int, dict[str, Any]]] = [
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
@pytest.mark.parametrize("point", INVARIANT, ids=lambda p: "-".join(map(str, (*p[0], *p[3]))))
def test_a_query_has_the_same_bits_in_every_batch_and_length(
    point: tuple[tuple[int, int, int], int, int, dict[str, Any]], emulated: None
) -> None:
    shape, kv_heads, tokens, options = point
    assert_queries_keep_their_bits(shape, kv_heads, tokens, BF16, options, PIECES, "cpu")


@needs_compiler
def test_other_tiles_of_keys_give_other_bits(emulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration that depends on the length is seen."""
    configs = iter([TWO, SMALL] + [TWO] * 99)
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


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "source",
    [s for s in attention_wgmma.aot_kernels() if "bfloat16" in s.label]
    + [
        attention_wgmma.source(BF16, d, c)
        for d in (64, 128)
        for c in attention_wgmma.candidates(d)
        if is_new(c)
    ],
    ids=lambda s: s.label,
)
def test_products_run_during_the_exponentials(source: CudaSource) -> None:
    """No register is spilled, no product is waited for alone, and the loop's last wait is behind its powers.

    The five waits: for the first scores; in the loop for the scores, and for the values in two branches; for
    the last values.
    """
    sass = disassemble.sass(source.compile("sm_90a"))
    assert not re.search(r"\b(STL|LDL)\b", sass)
    assert sass.count("WARPGROUP.DEPBAR") == 5
    _, loop = sass.split("WARPGROUP.DEPBAR.LE gsb0, 0x1")
    keys = int(dict(source.defines)["KEYS"])
    assert loop.partition("WARPGROUP.DEPBAR")[0].count("MUFU.EX2") >= keys // 2


def test_the_generated_shapes_are_current() -> None:
    assert (LIBRARY / "wgmma_score_shapes.cuh").read_text() == wgmma_shapes.text_scores()


def test_every_configuration_fits_in_shared_memory() -> None:
    for most, configs in attention_wgmma.CANDIDATES.items():
        assert all(config.smem_bytes(most) <= 227 << 10 for config in configs)


def test_a_third_group_is_chosen_where_it_has_queries() -> None:
    rows = {t: attention_wgmma.choose(64, t, t, True).rows for t in (20, 197, 512, 3001, 8192)}
    assert rows == {20: 128, 197: 128, 512: 192, 3001: 192, 8192: 192}


def test_a_smaller_tile_of_keys_is_chosen_where_it_saves_keys() -> None:
    keys = {t: attention_wgmma.choose(64, 197, t, False).keys for t in (112, 128, 197, 256, 400, 1024)}
    assert keys == {112: 112, 128: 128, 197: 112, 256: 128, 400: 112, 1024: 128}
    assert attention_wgmma.choose(64, 197, 197, True).keys == 128


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
    for config in attention_wgmma.candidates(d):
        for q, kv, lengths, options in GPU_POINTS:
            point = (dtype, (*q[:3], d), kv, lengths, options, config)
            shares = [errors(point, 0, "cuda"), errors(point, 0, "cuda")]
            assert max(shares[0]) <= 1.0, (q, kv, config.label)
            assert shares[0] == shares[1], "other bits in the second run"
