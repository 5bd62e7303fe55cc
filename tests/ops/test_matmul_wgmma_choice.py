"""The choice of a wgmma product's configuration, and the model of the time that each takes."""

from __future__ import annotations

import ast
import json
import re

import pytest
import torch

from helpers.paths import SRC
from weft.lab.products import short_name
from weft.ops._common.products import wgmma
from weft.ops._common.products.wgmma_model import LEAST_GAIN, Epilogue

RECORDS = SRC.parent / "results/nvidia-h200"
RECORD = RECORDS / "product-configurations-2026-11-28.ndjson"
LARGE_RECORD = RECORDS / "products-2026-11-24b.txt"  # with epilogues
BF16 = torch.bfloat16
CONFIGS = {c.label: c for c in (*wgmma.CHOSEN_FROM, *wgmma.WITH_K_PARTS)}
Option = tuple[wgmma.Config, int]


def is_divided(option: Option) -> bool:
    return option[1] > 1 or option[0].k_parts > 1


@pytest.mark.parametrize(
    ("size", "label", "splits"),
    [
        ((8192, 8192, 8192), "128x256x4-2", 1),  # it reads least from the L2 cache
        ((16384, 3072, 768), "128x192x4-1-pingpong", 1),
        ((2048, 2048, 2048), "128x256x4-1", 1),
        ((512, 4096, 4096), "128x128x6-1", 1),
        ((1024, 1024, 1024), "128x64x8-1", 1),
        ((128, 4096, 14336), "128x128x6-1", 4),
    ],
)
def test_the_configuration_with_the_cheapest_waves_is_chosen(
    size: tuple[int, int, int], label: str, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups that alternate for many tiles; for few tiles those that keep most SMs busy, and parts of K."""
    monkeypatch.setattr(wgmma, "num_sms", lambda device: 132)
    m, n, k = size
    a, b = torch.empty(m, k, dtype=BF16, device="meta"), torch.empty(k, n, dtype=BF16, device="meta")
    assert wgmma.choose(a, b) == (CONFIGS[label], splits)


def test_groups_alternate_where_k_is_short_and_the_epilogue_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wgmma, "num_sms", lambda device: 132)
    for (m, n, k), epilogue, expected in (
        ((16384, 3072, 768), Epilogue.GELU_PRE, True),
        ((16384, 3072, 768), Epilogue.GELU, True),
        ((512, 4096, 4096), Epilogue.BIAS, False),  # one tile an SM: nothing to alternate with
        ((128, 768, 768), Epilogue.GELU, False),
    ):
        a, b = torch.empty(m, k, dtype=BF16, device="meta"), torch.empty(k, n, dtype=BF16, device="meta")
        assert wgmma.choose(a, b, epilogue)[0].pingpong == expected, (m, n, k)


def test_the_model_agrees_with_the_record() -> None:
    """As its docstring says: the root-mean-square error, and what a choice among the recorded ones loses."""
    errors, losses = [], []
    for line in RECORD.read_text().splitlines()[1:]:
        record = json.loads(line)
        size = record["m"], record["n"], record["k"]
        times = {}
        for name, us in record["us"].items():
            label, _, splits = name.partition(" s")
            if label in CONFIGS:  # the record has all that were tried
                times[CONFIGS[label], int(splits)] = us
        model = {option: wgmma.estimated_us(*size, *option, 132) for option in times}
        chosen = min(model, key=lambda option: model[option] * (LEAST_GAIN if is_divided(option) else 1.0))
        losses.append(times[chosen] / min(times.values()) - 1)
        errors += [model[option] / times[option] - 1 for option in times]
    assert len(losses) == 260 and len(errors) > 6000
    assert max(losses) < 0.17 and sum(losses) / len(losses) < 0.014
    assert (sum(e * e for e in errors) / len(errors)) ** 0.5 < 0.08


def recorded() -> list[tuple[tuple[int, int, int], Epilogue, dict[Option, float]]]:
    """Return the sizes and epilogues of the record, and microseconds by configuration and parts of K.

    In that record all tiles were divided. Today's kernels do the same where there are fewer tiles than SMs.
    """
    names = {short_name(c): c for c in wgmma.CHOSEN_FROM}
    points = []
    for line in LARGE_RECORD.read_text().partition("-- fp8")[0].splitlines():
        if match := re.match(r"(\d+) (\d+) (\d+) (?:(\w+) )?chosen .*?({.*})", line):
            figures = {name.partition("s"): us for name, us in ast.literal_eval(match[5]).items()}
            figures = {key: us for key, us in figures.items() if key[0] in names}
            times = {(names[name], int(splits or 1)): us for (name, _, splits), us in figures.items()}
            size = int(match[1]), int(match[2]), int(match[3])
            tiles = {c: -(-size[0] // (128 * c.cluster)) * -(-size[1] // c.columns) for c, _ in times}
            times = {(c, s): us for (c, s), us in times.items() if s == 1 or tiles[c] < 132 // c.cluster}
            points.append((size, Epilogue[(match[4] or "plain").upper()], times))
    return points


def test_the_model_agrees_with_a_record_of_large_products_and_epilogues() -> None:
    """The constants were not fitted to it."""
    errors, losses = [], []
    points = recorded()
    assert len({size for size, _, _ in points}) == 13 and len(points) == 24
    for size, epilogue, times in points:
        model = {option: wgmma.estimated_us(*size, *option, 132, epilogue) for option in times}
        losses.append(times[min(model, key=lambda option: model[option])] / min(times.values()) - 1)
        errors += [model[option] / times[option] - 1 for option in times]
    assert max(losses) < 0.1 and sum(losses) / len(losses) < 0.015
    assert len(errors) == 264
    assert (sum(e * e for e in errors) / len(errors)) ** 0.5 < 0.095
