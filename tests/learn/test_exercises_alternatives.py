"""A grader accepts every right solution, not only the reference answer: other forms of it pass."""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np
import pytest

from weft.learn.candidate import Candidate
from weft.learn.exercise import find
from weft.learn.grade import grade

# exercise -> replacements in the reference answer, or a whole file
EDITS: dict[str, list[tuple[str, str]]] = {
    "mask_other": [
        (
            "tl.sum(tl.where(inside, x, 0.0), axis=0)",
            "tl.sum(tl.load(x_ptr + row * n_cols + columns, mask=inside, other=0.0), axis=0)",
        )
    ],
    "softmax_merge": [
        ("s_a * torch.exp(m_a - shift)", "torch.nan_to_num(s_a * torch.exp(m_a - m))"),
        ("s_b * torch.exp(m_b - shift)", "torch.nan_to_num(s_b * torch.exp(m_b - m))"),
    ],
    "sum_long_rows": [
        ("tl.zeros((BLOCK,), dtype=tl.float32)", "0.0"),
        ("x.to(tl.float32)", "tl.sum(x.to(tl.float32), axis=0)"),
        ("tl.sum(partial, axis=0))", "partial)"),
    ],
    "layer_norm_forward": [
        ("w = tl.load(w_ptr + columns, mask=inside)", "w = tl.load(w_ptr + columns, inside, 1)")
    ],
    "layer_norm_dx": [
        ("rstd * (h - c1 - xhat * c2)", "rstd / n_cols * (n_cols * h - n_cols * c1 - xhat * n_cols * c2)")
    ],
    "cross_entropy": [
        ("    x_target = tl.load(x_ptr + row * n_cols + target)\n", ""),
        ("    loss = m", "    x_target = tl.sum(tl.where(columns == target, x, 0.0), axis=0)\n    loss = m"),
    ],
    "gelu_tanh": [("x / (1 + tl.exp(-2 * u))", "x * tl.sigmoid(2 * u)")],
    "dropout_counter": [("tl.where(r >= p, x / (1 - p), 0.0)", "x * (r >= p) / (1 - p)")],
    "matmul_tiles": [("acc += tl.dot(a, b)", "acc = tl.dot(a, b, acc)")],
    "attention_causal": [("tl.minimum(first + BQ, T)", "T")],
    "map_with_guard": [
        (
            "    i = cuda.grid(1)\n    if i < out.size:\n",
            "    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):\n",
        )
    ],
    "block_reduction": [
        (
            "    while n > 1:\n        half = (n + 1) // 2\n        if t + half < n:\n"
            "            s[t] += s[t + half]\n        cuda.syncthreads()\n        n = half\n",
            "    if t == 0:\n        for k in range(1, n):\n            s[0] += s[k]\n",
        )
    ],
    "product_tile": [
        ("        a_tile[y * t + x] = float32(0)\n        b_tile[y * t + x] = float32(0)\n", ""),
        (
            "            a_tile[y * t + x] = a[row, start + x]\n",
            "            a_tile[y * t + x] = a[row, start + x]\n"
            "        else:\n            a_tile[y * t + x] = 0\n",
        ),
        (
            "            b_tile[y * t + x] = b[start + y, col]\n",
            "            b_tile[y * t + x] = b[start + y, col]\n"
            "        else:\n            b_tile[y * t + x] = 0\n",
        ),
    ],
}
FILES = {
    "tile_order": """
        def tile_of(pid, tiles_m, tiles_n, group):
            order = []
            for first in range(0, tiles_m, group):
                order += [[i, j] for j in range(tiles_n) for i in range(first, min(first + group, tiles_m))]
            return order[pid]


        def touched(tiles):
            rows, columns = zip(*tiles)
            return len(set(rows)) + len(set(columns))
        """,
    "compensated_sum": """
        def compensated_sum(values):
            total, lost = values[0], 0.0
            for value in values[1:]:
                t = total + value
                larger, smaller = (total, value) if abs(total) >= abs(value) else (value, total)
                lost = lost + ((larger - t) + smaller)
                total = t
            return total + lost
        """,
    "variance_offset": """
        def variance(values):
            values = list(values)
            mean = sum(values) / len(values)
            return sum((x - mean) * (x - mean) for x in values) / len(values)
        """,
    "bf16_rounding": """
        def to_bfloat16(bits):
            upper, lower = divmod(bits, 65536)
            if bits & 0x7F800000 == 0x7F800000 and bits & 0x7FFFFF:
                return 0x7FC0
            if lower > 0x8000 or lower == 0x8000 and upper % 2:
                upper += 1
            return upper
        """,
    "benchmark_sync": """
        def time_kernel(device, kernel, buffer, repeats):
            for _ in range(5):
                kernel(buffer)
            total = 0.0
            for _ in range(4):
                device.synchronize()
                start = device.now()
                for _ in range(repeats):
                    kernel(buffer)
                device.synchronize()
                total += device.now() - start
            return total / (4 * repeats)
        """,
    "benchmark_inputs": """
        def time_cold(device, kernel, nbytes, repeats):
            first = device.allocate(nbytes)
            buffers = [device.allocate(nbytes) for _ in range(repeats)]
            while nbytes * len(buffers) < 3 * device.l2_bytes:
                buffers.append(device.allocate(nbytes))
            kernel(first)
            device.synchronize()
            start = device.now()
            for i in range(repeats):
                kernel(buffers[i])
            device.synchronize()
            return (device.now() - start) / repeats
        """,
    "benchmark_samples": """
        import statistics


        def summary(samples):
            n, ordered = len(samples), sorted(samples)
            return statistics.median(samples), ordered[n // 4], ordered[-1 - n // 4]


        def time_robust(device, kernel, buffer, repeats):
            samples = []
            for _ in range(repeats + 1):
                device.synchronize()
                start = device.now()
                kernel(buffer)
                device.synchronize()
                samples.append(device.now() - start)
            return summary(samples[1:])[0]
        """,
    "occupancy": """
        import math


        def resident_blocks(threads, registers, shared):
            warps = math.ceil(threads / 32)
            of_registers = 65536 // (math.ceil(registers / 8) * 256)
            return min(32, 64 // warps, of_registers // warps, 233472 // (1024 + shared))


        def occupancy(threads, registers, shared):
            return resident_blocks(threads, registers, shared) * math.ceil(threads / 32) / 64
        """,
    "block_product": """
        import numpy as np


        def block_product(a, b, t, multiply):
            rows = []
            for i in range(0, len(a), t):
                row = []
                for j in range(0, b.shape[1], t):
                    block = 0
                    for k in range(0, len(b), t):
                        block = block + multiply(a[i : i + t, k : k + t], b[k : k + t, j : j + t])
                    row.append(block)
                rows.append(row)
            return np.block(rows)
        """,
}


def alternative(name: str, folder: Path) -> Path:
    exercise = find(name)
    if name in FILES:
        text = textwrap.dedent(FILES[name])
    else:
        text = exercise.source_file("answer").read_text()
        for old, new in EDITS[name]:
            assert old in text, f"{name}: the answer has no longer {old!r}"
            text = text.replace(old, new)
    path = folder / f"{name}.py"
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", FILES)
def test_another_right_file_passes(name: str, tmp_path: Path) -> None:
    checks = list(find(name).grader().grade(Candidate(alternative(name, tmp_path)), np.random.default_rng(7)))
    assert checks


@pytest.mark.sampled(1, each=lambda name: find(name).track)
@pytest.mark.parametrize("name", EDITS)
def test_another_right_kernel_passes(name: str, tmp_path: Path) -> None:
    result = grade(find(name), alternative(name, tmp_path))
    assert result.passed and result.checks, result.reason
