"""Calls of attention's wgmma forward for its emulator tests, and faults that are planted in its source."""

from __future__ import annotations

from typing import Any

import torch

from weft.ops.attention import attention_wgmma
from weft.ops.attention.attention_wgmma import Config
from weft.ops.attention.mask import BOTTOM_RIGHT

BF16, FP16 = torch.bfloat16, torch.float16
# What `choose` takes, by the largest head size.
THREE, TWO, FEW = attention_wgmma.candidates(64)
(MEDIUM,) = attention_wgmma.candidates(96)
LARGE, FULL = attention_wgmma.candidates(128)
(MIDDLE,) = attention_wgmma.candidates(192)
(WIDE,) = attention_wgmma.candidates(256)
INVARIANT = attention_wgmma.choose_invariant(128)
# Small tiles, for several of them in a short call.
SMALL = Config(keys=80, groups=2)
SMALL_SHARED = Config(keys=80, groups=2, out_in_q=True)
# The producer runs ahead into the next tile of queries.
AHEAD = Config(keys=80, groups=2, query_slots=2, stages=3)
FAR_AHEAD = Config(keys=80, groups=3, query_slots=2, stages=4)
FREE = Config(keys=80, groups=3, query_slots=2, stages=3, pingpong=False)
NARROW_TWO = Config(keys=128, groups=2, narrow_end=True, pingpong=False)
LATE_MASK = {"causal": True, "alignment": BOTTOM_RIGHT}
# dtype, (B, H, Tq, D), (Hkv, Tk), key lengths, options, configuration.
Point = tuple[torch.dtype, tuple[int, int, int, int], tuple[int, int], Any, dict[str, Any], Config]
POINTS: list[Point] = [
    (BF16, (1, 2, 200, 64), (2, 200), None, {"causal": True}, THREE),
    (FP16, (1, 2, 130, 64), (1, 333), None, {}, TWO),
    (BF16, (3, 1, 20, 64), (1, 300), [0, 400, 130], {"scale": 0.125}, TWO),
    (BF16, (2, 2, 150, 40), (1, 290), [290, 33], {"causal": True}, THREE),
    (FP16, (1, 3, 70, 8), (3, 19), None, {"causal": True}, THREE),
    (BF16, (1, 2, 129, 80), (2, 200), None, {"causal": True}, MEDIUM),
    (BF16, (1, 2, 70, 128), (2, 330), None, {}, FULL),
    (FP16, (1, 4, 140, 128), (2, 150), None, {"causal": True}, LARGE),
    (BF16, (2, 1, 130, 128), (1, 370), [177, 352], {}, FULL),
    (FP16, (1, 1, 150, 72), (1, 40), None, {"causal": True}, SMALL),
    (BF16, (1, 1, 70, 192), (1, 130), None, {"causal": True}, MIDDLE),
    (BF16, (2, 1, 33, 256), (1, 170), [100, 161], {}, WIDE),
    (BF16, (1, 2, 200, 40), (1, 300), None, {"causal": True, "window": 70}, THREE),
    (FP16, (1, 1, 330, 8), (1, 200), None, {"causal": True, "window": 33}, SMALL),
    (BF16, (1, 2, 150, 72), (2, 410), None, {**LATE_MASK, "window": 100}, SMALL_SHARED),
    (BF16, (3, 1, 170, 64), (1, 300), [0, 300, 130], {**LATE_MASK, "window": 1}, TWO),
    (FP16, (1, 1, 200, 128), (1, 90), None, LATE_MASK, INVARIANT),  # the first queries see no key
    (BF16, (1, 2, 130, 64), (1, 333), None, {"softcap": 3.0}, TWO.for_softcap),
    (FP16, (1, 1, 140, 128), (1, 150), None, {"causal": True, "softcap": 1.0}, LARGE.for_softcap),
    (
        BF16,
        (2, 1, 150, 8),
        (1, 370),
        [177, 352],
        {**LATE_MASK, "window": 150, "softcap": 2.0},
        THREE.for_softcap,
    ),
    # Two slots of queries: four or more tiles for each of the two blocks.
    (BF16, (2, 4, 201, 64), (2, 201), None, {"causal": True}, THREE),
    (FP16, (2, 4, 300, 40), (1, 333), [290, 33], {"causal": True}, AHEAD),
    (BF16, (3, 4, 197, 8), (4, 97), None, {}, FAR_AHEAD),
    (FP16, (2, 2, 450, 48), (1, 450), None, {"causal": True}, FREE),
    (BF16, (3, 4, 197, 64), (2, 197), [0, 197, 150], {}, FEW),
    (BF16, (3, 4, 201, 64), (2, 201), [0, 201, 60], {"causal": True}, THREE),
    (BF16, (3, 4, 150, 128), (2, 300), [0, 300, 130], {}, LARGE),
    (FP16, (1, 3, 400, 112), (1, 400), None, {"causal": True}, LARGE),
    (BF16, (1, 3, 500, 8), (1, 500), None, {"causal": True, "window": 100}, AHEAD),
    (FP16, (2, 2, 420, 40), (1, 600), [600, 333], {**LATE_MASK, "window": 150}, FREE),
    (BF16, (3, 2, 290, 8), (1, 370), [177, 352, 0], {**LATE_MASK, "window": 70, "softcap": 2.0}, FAR_AHEAD),
    (FP16, (1, 4, 200, 128), (2, 90), None, LATE_MASK, AHEAD),
    (BF16, (2, 2, 300, 128), (1, 300), [300, 33], {**LATE_MASK, "window": 130}, LARGE),
    # Half of the last tile of keys is computed alone: for every other group, or at the keys' end.
    (BF16, (2, 2, 450, 64), (2, 450), None, {"causal": True}, THREE),
    (FP16, (2, 3, 200, 40), (1, 180), [180, 33], {}, THREE),
    (FP16, (2, 4, 180, 64), (2, 300), None, {"causal": True}, TWO),
    (BF16, (2, 3, 290, 96), (1, 290), [290, 0], {"causal": True}, MEDIUM),
    (BF16, (1, 2, 400, 8), (1, 330), None, {"causal": True, "softcap": 2.0}, NARROW_TWO),
    (FP16, (2, 2, 420, 8), (1, 600), [600, 333], {**LATE_MASK, "window": 150}, THREE),
    (BF16, (3, 1, 170, 80), (1, 300), [0, 300, 150], {**LATE_MASK, "window": 1}, MEDIUM),
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
# The second tile of keys has 52, whose scores are larger than those of the first.
NARROW_END: Point = (BF16, (1, 2, 330, 8), (1, 180), None, {}, THREE)
NARROW_CAUSAL: Point = (BF16, (1, 2, 450, 8), (1, 450), None, {"causal": True}, THREE)
NARROW_OFTEN: Point = (BF16, (2, 4, 330, 8), (1, 180), None, {}, NARROW_TWO)
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
    "no group has the first turn": (SEVERAL, "    if (group == GROUPS - 1) pass_turn();", "    //"),
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
    "half a tile is computed for queries that see more": (
        NARROW_CAUSAL,
        "<= j * KEYS + NARROW_KEYS;",
        "<= j * KEYS + KEYS;",
    ),
    "outputs are not rescaled before half a tile": (
        NARROW_END,
        "for (int n = 0; n < WIDTH / 2; ++n) out[n] *= shrink[n / 2 % 2];",
        ";",
    ),
    "half a tile has no turn": (NARROW_CAUSAL, "const bool has_turn = FOLLOWS ||", "const bool has_turn ="),
    "half a tile's values are released before their product": (
        NARROW_OFTEN,
        "    wgmma_wait<0>(), pin_registers(out), pin_registers(narrow);\n    release_values();\n",
        "    release_values();\n    wgmma_wait<0>(), pin_registers(out), pin_registers(narrow);\n",
    ),
    "half a tile's scores are used before a wait": (
        NARROW_CAUSAL,
        "    wgmma_wait<FOLLOWS ? 1 : 0>();\n",
        "",
    ),
    "queries are released before half a tile": (
        NARROW_OFTEN,
        "    wgmma_wait<FOLLOWS ? 1 : 0>();\n    pin_registers(s);\n    release_keys();\n"
        "    if (is_first_lane()) memory.queries().release(q_tile());",
        "    release_keys();\n    if (is_first_lane()) memory.queries().release(q_tile());\n"
        "    wgmma_wait<FOLLOWS ? 1 : 0>();\n    pin_registers(s);\n",
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
