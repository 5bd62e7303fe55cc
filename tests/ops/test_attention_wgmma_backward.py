"""Attention's wgmma backward in the emulator: sizes, masks, lengths, schedules; planted faults are seen."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import warp_emulator
from helpers.paths import SRC, TESTS
from helpers.warp_emulator import EmulatorError
from ops.test_attention_wgmma import rows_of_a_model, toy_map
from weft.backends import disassemble
from weft.ops._common.hopper import tensor_map
from weft.ops.attention import attention_wgmma, attention_wgmma_backward, with_cuda
from weft.ops.attention.attention_wgmma import PLAIN, VARIANTS, Variant
from weft.ops.attention.mask import BOTTOM_RIGHT
from weft.ops.attention.spec import AttentionOptions, reference

EMULATOR = TESTS / "helpers" / "hopper_emulator.hpp"
KERNEL = SRC / "weft/ops/attention/attention_wgmma_backward.cu"
BF16, FP16 = torch.bfloat16, torch.float16
LATE_MASK = {"causal": True, "alignment": BOTTOM_RIGHT}
# dtype, (B, H, Tq, D), (Hkv, Tk), key lengths, options.
Point = tuple[torch.dtype, tuple[int, int, int, int], tuple[int, int], Any, dict[str, Any]]
POINTS: list[Point] = [
    (BF16, (1, 2, 200, 64), (2, 200), None, {"causal": True}),
    (FP16, (1, 2, 130, 128), (1, 270), None, {}),
    (BF16, (2, 1, 150, 72), (1, 290), [260, 33], {"causal": True}),
    (BF16, (3, 2, 70, 40), (1, 150), [0, 400, 130], {"scale": 0.125}),
    (FP16, (1, 1, 300, 8), (1, 140), None, {"causal": True}),
    (BF16, (1, 1, 70, 128), (1, 300), None, {"causal": True}),
    (BF16, (1, 2, 310, 8), (1, 310), None, {"causal": True, "window": 90}),
    (FP16, (1, 1, 330, 8), (1, 140), None, {"causal": True, "window": 33}),  # the last queries see no key
    (BF16, (2, 1, 150, 72), (1, 400), [390, 33], {**LATE_MASK, "window": 100}),
    (BF16, (1, 1, 200, 40), (1, 90), None, LATE_MASK),  # the first queries see no key
    (FP16, (1, 1, 130, 128), (1, 140), None, {"softcap": 1.0}),
    (BF16, (1, 2, 150, 8), (1, 290), None, {**LATE_MASK, "window": 130, "softcap": 2.0}),
]
# Two tiles of keys, three of queries; two heads share keys; keys past a length are NaN.
SMALL: Point = (BF16, (1, 2, 130, 8), (1, 140), [133], {})
CAUSAL: Point = (BF16, (1, 1, 200, 8), (1, 200), None, {"causal": True})
WINDOW: Point = (BF16, (1, 1, 330, 8), (1, 330), None, {"causal": True, "window": 40})
RIGHT: Point = (BF16, (1, 1, 150, 8), (1, 290), [257], {**LATE_MASK, "window": 90})
EMPTY: Point = (BF16, (1, 1, 330, 8), (1, 140), None, {"causal": True, "window": 33})
CAPPED: Point = (BF16, (1, 1, 70, 8), (1, 140), None, {"softcap": 1.0})
TWO_BOXES: Point = (BF16, (1, 1, 130, 72), (1, 140), None, {})
# name: the call, the text that is replaced, and by what
FAULTS: dict[str, tuple[Point, str, str]] = {
    "no proxy fence behind ds": (
        SMALL,
        "      store_rows(memory.ds(ds_written.stage), DS_BOX, ds);\n      fence_async_proxy();\n",
        "      store_rows(memory.ds(ds_written.stage), DS_BOX, ds);\n",
    ),
    "no proxy fence behind dq": (
        SMALL,
        "    fence_async_proxy();\n    __syncwarp();\n",
        "    __syncwarp();\n",
    ),
    "no proxy fence behind the zeros of a tail": (SMALL, "      fence_async_proxy();\n    }\n", "    }\n"),
    "keys past a length are not cleared": (
        SMALL,
        "store_zeros(memory.k() + box * KEY_BOX + chunk * 16);",
        ";",
    ),
    "ds is read before the other group has written it": (
        TWO_BOXES,
        "init(shared.ds_buffers().full(stage), GROUPS * 4)",
        "init(shared.ds_buffers().full(stage), 4)",
    ),
    "ds is overwritten while the product for dq reads it": (
        TWO_BOXES,
        "      wait(memory.ds_buffers().empty(ds_written.stage), ds_written.parity ^ 1);\n",
        "",
    ),
    "scores are used before a wait": (
        SMALL,
        "      wgmma_wait<1>();  // s; the product for dp runs during the exponentials\n",
        "",
    ),
    "gradients of weights are used before a wait, 64 queries": (
        TWO_BOXES,
        "        wgmma_wait<1>();  // dp; the product for dv runs on\n",
        "",
    ),
    "gradients of weights are used before a wait, 128 queries": (
        SMALL,
        "      } else {\n        wgmma_wait<0>();\n      }\n",
        "      }\n",
    ),
    "sums of dq are used before a wait": (
        SMALL,
        "        wgmma_wait<1>();  // dq; the product for dk runs on\n",
        "",
    ),
    "weights are overwritten while a product reads them": (
        TWO_BOXES,
        "      round(ds, s);\n",
        "      round(p, s), round(ds, s);\n",
    ),
    "a stage is released while products read it": (
        SMALL,
        "      multiply_factor(dk, ds, memory.q(stage));\n",
        "      if (threadIdx.x % 32 == 0) memory.ring().release(stage);\n"
        "      multiply_factor(dk, ds, memory.q(stage));\n",
    ),
    "sums of dq are overwritten while they are added, with blocks side by side": (
        SMALL,
        "    wait(memory.dq_buffers().empty(ds_read.stage), ds_read.parity ^ 1);\n",
        "",
    ),
    "a part of dq is added before it is written": (
        SMALL,
        "      wait(memory.dq_buffers().full(stage), parity);\n",
        "",
    ),
    "the two parts of dq are the same": (
        TWO_BOXES,
        "memory.dq(ds_read.stage) + (PARTS == 2 ? group * PART_BYTES : 0)",
        "memory.dq(ds_read.stage)",
    ),
    "a part of dq is the first of two": (SMALL, "if (rank == 0) bulk_store", "if (rank != 0) bulk_store"),
    "a part of dq does not wait for the parts before it, with blocks side by side": (
        SMALL,
        "      while (rank > 0 && load_acquire(args.counters + tile) != rank) {\n      }\n",
        "",
    ),
    "a part of dq is released before it is complete": (
        SMALL,
        "tma_wait_read<0>();\n      memory.dq_buffers().release(stage);\n      tma_wait<0>();  // complete",
        "memory.dq_buffers().release(stage);\n      // complete",
    ),
    "the mask shows one query too many": (
        CAUSAL,
        "(args.causal && key > query)",
        "(args.causal && key > query + 1)",
    ),
    "a tile that needs a mask gets none": (
        CAUSAL,
        "first_key + 63 > (BAND",
        "first_key > (BAND",
    ),
    "the window shows one key too many": (WINDOW, "key <= query - args.window", "key < query - args.window"),
    "a tile at the window's edge gets no mask": (
        WINDOW,
        "(BAND && first_key < position",
        "(false && first_key < position",
    ),
    "queries end one tile before the window does": (
        WINDOW,
        "(behind - 1) / QUERIES : -1",
        "(behind - 1) / QUERIES - 1 : -1",
    ),
    "the order of the parts ignores the position": (
        RIGHT,
        "query_tile * QUERIES + shift(args, keys) - args.window + 1, 0) / KEYS",
        "query_tile * QUERIES - args.window + 1, 0) / KEYS",
    ),
    "the bottom right is that of all keys, not of the length": (
        RIGHT,
        "args.bottom_right ? keys - args.tq : 0",
        "args.bottom_right ? args.tk - args.tq : 0",
    ),
    "dq of a tile without keys is what memory had": (
        EMPTY,
        "if (i + j >= count || work.parts(args, work.tile + i + j) == 0) continue;",
        "if (i + j >= count) continue;",
    ),
    "dq is rounded before all its parts are there, with blocks side by side": (
        SMALL,
        "      while (parts > 0 && load_acquire(args.counters + first + thread) != parts) {\n      }\n",
        "",
    ),
    "one part of dq too few is waited for": (
        RIGHT,
        "(seen - 1) / KEYS - first / KEYS + 1;",
        "(seen - 1) / KEYS;",
    ),
    "the cap has no slope": (CAPPED, "          s[i] *= fmaf(-t, t, 1.0f);\n", ""),
    "scores are not capped": (CAPPED, "if (SOFTCAP) s[i] = fmaf(", "if (false) s[i] = fmaf("),
    "k is overwritten while another group reads it": (
        TWO_BOXES,
        "    named_barrier(ALL_READ, GROUPS * GROUP_THREADS);\n",
        "",
    ),
    "k is loaded while gradients in its place are stored": (
        CAUSAL,
        "    tma_wait_read<0>();\n    mbarrier_arrive(memory.unused());\n",
        "    mbarrier_arrive(memory.unused());\n",
    ),
    "k is loaded while the groups read the tile before": (
        CAUSAL,
        "mbarrier_init(shared.unused(), GROUPS + STAGES);",
        "mbarrier_init(shared.unused(), STAGES);",
    ),
    "the next tile's ds comes from the buffer of the last": (
        CAUSAL,
        "    ds_read.next();\n  }\n",
        "  }\n",
    ),
    "the last part of dq is missing": (SMALL, "    if (computes_dq(steps - 1)) {", "    if (false) {"),
}
LARGEST, MEAN = 1.0, 0.6  # as in test_attention_cuda.py


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    warp_emulator.emulate(monkeypatch, tmp_path_factory.getbasetemp(), EMULATOR)
    monkeypatch.setattr(tensor_map, "_encode_heads", toy_map)


def errors(point: Point, seed: int, device: str = "cpu") -> list[float]:
    """Return the errors of dq, dk and dv as shares of their bounds: largest and mean square."""
    dtype, (b, h, tq, d), (kv_heads, tk), key_lengths, options = point
    generator = torch.Generator().manual_seed(seed)
    q, k, v, grad = (
        rows_of_a_model(b, heads, t, d, dtype, generator, device)
        for heads, t in ((h, tq), (kv_heads, tk), (kv_heads, tk), (h, tq))
    )
    lengths = torch.tensor(key_lengths or [0] * b, dtype=torch.int32, device=device)
    params = {**options, "padded": key_lengths is not None}
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = reference(exact[0], exact[1], exact[2], lengths, **params)
    expected = list(torch.autograd.grad(out, exact, grad.double(), retain_graph=True))
    rounded = out.detach().to(dtype)
    # The kernel gets the rounded output. What that changes in the sums of output times gradient, which are
    # subtracted in each row, changes the gradients of scores by as many weights: the gradient of lse.
    row_errors = (grad.double() * (rounded.double() - out.detach())).sum(-1)
    for i, change in enumerate(torch.autograd.grad(lse, exact[:2], row_errors)):
        expected[i] = expected[i] - change.nan_to_num()  # NaN: a row without keys
    for batch, length in enumerate(key_lengths or []):
        k[batch, :, length:], v[batch, :, length:] = torch.nan, torch.inf
    arguments = AttentionOptions(**params)
    assert attention_wgmma_backward.supports((q, k, v, grad, rounded), arguments)
    visible = lengths if params["padded"] else None
    saved = (q, k, v, visible, rounded, lse.detach().float())
    # As attention_packed has it: gradients are written between other rows, which stay as they are.
    buffers = [
        torch.full((b, x.shape[2], x.shape[1], 2, d), torch.nan, dtype=dtype, device=device)
        for x in (q, k, v)
    ]
    dq, dk, dv = (buffer[:, :, :, 1].transpose(1, 2) for buffer in buffers)
    gradients = attention_wgmma_backward.backward(grad, saved, arguments, (dq, dk, dv))
    assert all(bool(buffer[:, :, :, 0].isnan().all()) for buffer in buffers)
    shares = []
    for answer, value in zip(gradients, expected, strict=True):
        error = (answer.double() - value).abs().nan_to_num(1e9) / torch.finfo(dtype).eps
        shares.append(float(error.amax() / (LARGEST * value.abs().amax())))
        shares.append(float(error.square().mean() / (MEAN * value.square().mean().sqrt()) ** 2))
    return shares


needs_compiler = pytest.mark.skipif(
    warp_emulator.COMPILER is None, reason="no g++ to compile the kernel with"
)


@needs_compiler
@pytest.mark.pooled(1, "emulated: attention backward")
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "point", POINTS, ids=lambda p: f"{'x'.join(map(str, p[1]))}-{p[2][1]}-{'-'.join(p[4])}"
)
def test_gradients_match_the_reference_in_any_schedule(point: Point, emulated: None) -> None:
    assert max(errors(point, 0)) <= 1.0


def two_blocks_at_once(patch: pytest.MonkeyPatch) -> None:
    """Let the emulator run pairs of blocks at the same time, as it does with those of a cluster."""
    real = attention_wgmma_backward.source

    def source(*arguments: Any) -> Any:
        program = real(*arguments)
        return replace(program, defines=(*program.defines, ("CLUSTER", "2")))

    patch.setattr(attention_wgmma_backward, "source", source)
    patch.setattr(attention_wgmma_backward, "num_sms", lambda device: 2)


@needs_compiler
@pytest.mark.pooled(1, "emulated: attention backward")
def test_blocks_side_by_side_add_in_order(emulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums of dq have the same bits whether blocks run one after the other or side by side."""
    alone = errors(SMALL, 0)
    two_blocks_at_once(monkeypatch)
    assert max(alone) <= 1.0
    assert errors(SMALL, 0) == alone


@needs_compiler
@pytest.mark.pooled(1, "emulated: attention backward")
@pytest.mark.parametrize("section", [1, 2, 3])
def test_sections_cover_all_heads(section: int, emulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three heads of keys with two tiles each, the last section with fewer heads or one for all."""
    monkeypatch.setattr(attention_wgmma_backward, "section_heads", lambda *a: section)
    assert max(errors((BF16, (3, 2, 140, 8), (1, 140), [140, 0, 77], {"causal": True}), 0)) <= 1.0


def test_sections_are_large_enough() -> None:
    """Equal shares of the heads: for the tiles' distance, for the last section's balance, for the cache."""
    section_heads = attention_wgmma_backward.section_heads
    assert section_heads(64, 32, 32.0, 1 << 22, 132) == 13  # 10.8: five sections
    assert section_heads(384, 8, 4.0, 1 << 19, 132) == 55  # 49.5: seven sections
    assert section_heads(32, 16, 64.0, 1 << 23, 132) == 32  # 16.5: one section
    assert section_heads(64, 64, 1000.0, 1 << 22, 132) == 7  # 6: ten sections
    assert section_heads(3, 1, 1.0, 1 << 30, 132) == 3


@needs_compiler
@pytest.mark.sampled(1)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(
    fault: str, emulated: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of the kernel with one fault gives a wrong result or breaks the emulator's rules."""
    point, old, new = FAULTS[fault]
    texts = {file.name: file.read_text() for file in (KERNEL, *KERNEL.parent.glob("attention_wgmma_*.cuh"))}
    assert sum(text.count(old) for text in texts.values()) == 1, (
        "the text of the fault is not in the files once"
    )
    for name, text in texts.items():
        (tmp_path / name).write_text(text.replace(old, new))
    real = attention_wgmma_backward.source
    monkeypatch.setattr(
        attention_wgmma_backward, "source", lambda *a: replace(real(*a), file=tmp_path / KERNEL.name)
    )
    if "side by side" in fault:
        two_blocks_at_once(monkeypatch)
    for seed in range(6):
        try:
            if max(errors(point, seed)) > 2:
                return
        except EmulatorError:
            return
    raise AssertionError("the fault does not show")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("variant", (PLAIN, *VARIANTS), ids=lambda v: v.label or "plain")
@pytest.mark.parametrize("d", [64, 128])
def test_products_are_not_waited_for_one_by_one(d: int, variant: Variant) -> None:
    """No register is spilled. The waits: scores, gradients of weights, dq, the end of a step, the last dq."""
    sass = disassemble.sass(attention_wgmma_backward.source(BF16, d, variant).compile("sm_90a"))
    assert not re.search(r"\b(STL|LDL)\b", sass)
    both_compute_dq = attention_wgmma_backward.step_queries(d, variant) > 64 or d > 64
    assert sass.count("WARPGROUP.DEPBAR") == 4 + both_compute_dq


def test_the_block_fits_in_shared_memory() -> None:
    assert max(map(attention_wgmma_backward.smem_bytes, (64, 128))) <= 227 << 10


GPU_POINTS: list[tuple[tuple[int, int, int, int], tuple[int, int], Any, dict[str, Any]]] = [
    ((1, 4, 700, 0), (2, 700), None, {"causal": True}),
    ((1, 3, 577, 0), (3, 845), None, {}),
    ((1, 2, 900, 0), (1, 400), None, {"causal": True}),
    ((3, 4, 300, 0), (4, 900), [0, 777, 2000], {"scale": 0.1}),
    # Not one key alone: the gradients of q and k would be 0, and an error would have no scale.
    ((1, 1, 2, 0), (1, 3), None, {}),
    ((2, 4, 1500, 0), (2, 1500), None, {"causal": True, "window": 300}),
    ((2, 2, 333, 0), (2, 1200), [1200, 500], {**LATE_MASK, "window": 77, "softcap": 2.0}),
    ((1, 2, 700, 0), (1, 300), None, LATE_MASK),
    ((1, 2, 577, 0), (2, 1333), None, {"softcap": 5.0}),
]


def assert_gradients_keep_their_bits(
    d: int, device: str, lengths: list[int], masks: list[dict[str, Any]]
) -> None:
    """Compare gradients of whole batches with those of each batch alone, also in memory that is given."""
    b, h, kv_heads, tokens = len(lengths), 2, 1, max(lengths)
    generator = torch.Generator().manual_seed(d)
    q, k, v, grad = (
        rows_of_a_model(b, n, tokens, d, BF16, generator, device) for n in (h, kv_heads, kv_heads, h)
    )
    visible = torch.tensor(lengths, dtype=torch.int32, device=device)
    grad = grad[:1].expand(b, -1, -1, -1)  # as of a sum over batches: the copy engine does not read it
    for options in masks:

        def gradients(rows: slice, into: Any = None, options: Any = options) -> Any:
            inputs = (*(x[rows] for x in (q, k, v)), visible[rows])
            outputs = with_cuda.forward_invariant(*inputs, **options)
            return with_cuda.backward_invariant(grad[rows], *inputs, *outputs, into=into, **options)

        whole = gradients(slice(None))
        for batch in range(b):
            rows = slice(batch, batch + 1)
            odd = [x.new_empty(x[rows].numel() + 1)[1:].view(x[rows].shape) for x in (q, k, v)]
            for alone in (gradients(rows), gradients(rows, into=tuple(odd)))[batch % 2 :]:
                for x, expected in zip(alone, whole, strict=True):
                    assert torch.equal(x, expected[rows]), (options, batch)


@needs_compiler
@pytest.mark.pooled(1, "emulated: attention backward")
@pytest.mark.parametrize("options", [{"causal": True}, {"padded": True}], ids=["causal", "padded"])
def test_gradients_have_the_same_bits_in_every_batch(
    options: dict[str, Any], emulated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(with_cuda, "has_wgmma", lambda device: True)
    monkeypatch.setattr(attention_wgmma, "num_sms", lambda device: 2)
    assert_gradients_keep_their_bits(8, "cpu", [140, 70], [options])


@pytest.mark.gpu
@pytest.mark.parametrize("d", [8, 64, 80, 128, 192, 256])
def test_gradients_have_the_same_bits_in_every_batch_on_a_gpu(d: int) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma exists on compute capability 9.0 alone")
    masks: list[dict[str, Any]] = [{"causal": True}, {"padded": True}]
    if d <= attention_wgmma_backward.MAX_HEAD_SIZE:
        masks.append({"causal": True, "window": 70})
    assert_gradients_keep_their_bits(d, "cuda", [1200, 731, 90, 0], masks)


@pytest.mark.gpu
@pytest.mark.parametrize("d", [8, 40, 64, 80, 96, 128])
@pytest.mark.parametrize("dtype", attention_wgmma_backward.DTYPES)
def test_gradients_match_the_reference_on_a_gpu(dtype: torch.dtype, d: int) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma exists on compute capability 9.0 alone")
    for q, kv, lengths, options in GPU_POINTS:
        shares = [errors((dtype, (*q[:3], d), kv, lengths, options), 0, "cuda") for _ in range(2)]
        assert max(shares[0]) <= 1.0, (q, kv)
        assert shares[0] == shares[1], "other bits in the second run"
