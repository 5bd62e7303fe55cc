"""GPT-2's data: shards, batches by step, and their errors. See test_gpt2_text.py."""

from __future__ import annotations

import errno
import os
import resource
import struct
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.core import WeftError
from weft.gpt2.data import shards
from weft.gpt2.data.batches import Batches, Prefetch, permuted
from weft.gpt2.data.text import open_tokens
from weft.gpt2.data.token_sequence import Segment, TokenSequence
from weft.gpt2.data.tokenisers import tokeniser

few = settings(max_examples=25)
IDS = st.lists(st.integers(0, 65535), max_size=60)


def tokens(ids: Iterable[int], name: str = "here") -> TokenSequence:
    return TokenSequence([Segment(name=name, label=name, ids=np.array(list(ids), np.uint16))])


def parsed(path: Path) -> list[int]:
    """Read llm.c's format by its description, without Weft's code."""
    content = path.read_bytes()
    magic, version, count = struct.unpack_from("<3i", content)
    assert (magic, version, len(content)) == (20240520, 1, 1024 + 2 * count)
    assert content[12:1024] == bytes(1012)
    return list(struct.unpack_from(f"<{count}H", content, 1024))


def write(path: Path, ids: Iterable[int], magic: int = 20240520, version: int = 1) -> Path:
    """Write llm.c's format by its description."""
    ids = list(ids)
    head = struct.pack("<3i", magic, version, len(ids)).ljust(1024, b"\0")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(head + struct.pack(f"<{len(ids)}H", *ids))
    return path


# --- batches


@few
@given(st.integers(1, 3000), st.integers(), st.integers(0, 1 << 40))
def test_an_epoch_has_each_window_once(count: int, seed: int, epoch: int) -> None:
    window_order = permuted(np.arange(count), count, seed, epoch)
    assert sorted(window_order.tolist()) == list(range(count))


def test_order_is_uniform_and_differs_by_seed_and_epoch() -> None:
    """Chi-square test of the windows' positions over 20 seeds and 20 epochs. 99.9 % of uniform orders are
    below the limit; the seeds are fixed, so it cannot fail by chance."""
    limits = {2: 10.8, 7: 22.5}  # count - 1 degrees of freedom
    for count, limit in limits.items():
        orders = [permuted(np.arange(count), count, s, e) for s in range(20) for e in range(20)]
        for window in range(count):
            seen = np.bincount([int(o[window]) for o in orders], minlength=count)
            even = len(orders) / count
            assert ((seen - even) ** 2 / even).sum() < limit, (count, window, seen)
    long = [tuple(permuted(np.arange(50), 50, s, e).tolist()) for s in range(9) for e in range(9)]
    assert len(set(long)) == 81


@few
@given(st.integers(1, 40), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(0, 9))
def test_any_split_of_a_step_gives_the_same_samples(
    windows: int, world: int, accumulate: int, size: int, step: int
) -> None:
    length = 5
    data = tokens(range(windows * length + 1 + step % length))
    batches = Batches(data, world * accumulate * size, length, 3, 1000)
    x, y = batches.at(step)
    assert x.dtype == y.dtype == torch.int64 and x.is_contiguous() and y.is_contiguous()
    assert torch.equal(y, x + 1) and not (x[:, 0] % length).any()
    cut = [batches.at(step, m, accumulate, r, world) for m in range(accumulate) for r in range(world)]
    assert {len(part[0]) for part in cut} == {size}
    assert torch.equal(torch.cat([part[0] for part in cut]), x)
    assert torch.equal(torch.cat([part[1] for part in cut]), y)


@few
@given(st.integers(1, 30), st.integers(1, 7), st.integers(0, 5))
def test_steps_continue_through_the_epochs(windows: int, batch: int, seed: int) -> None:
    batches = Batches(tokens(range(windows * 4 + 1)), batch, 4, seed, 1000)
    assert batches.windows == windows
    steps = -(-3 * windows // batch)
    seen = torch.cat([batches.at(s)[0][:, 0] // 4 for s in range(steps)]).tolist()
    for epoch in range(3):
        part = seen[epoch * windows : (epoch + 1) * windows]
        assert sorted(part) == list(range(windows))
    assert batches.epoch(0) == 0 and batches.epoch(windows) == batch


def test_invalid_batches_are_refused() -> None:
    data = tokens(range(101))
    for expected, options in {
        "length: expected 1 or more": {"length": 0},
        "batch: expected 1 or more": {"batch": 0},
        "vocab_size: expected 1 or more": {"vocab_size": 0},
        "tokens: expected 102 or more.*got 101": {"length": 101},
    }.items():
        with pytest.raises(WeftError, match=expected):
            Batches(data, **{"batch": 4, "length": 10, "seed": 0, "vocab_size": 200, **options})
    batches = Batches(data, 4, 10, 0, 200)
    with pytest.raises(WeftError, match="multiple of 3 micro-batches times 1 processes, got 4"):
        batches.at(0, 0, 3)
    with pytest.raises(WeftError, match="multiple of 2 micro-batches times 3 processes, got 4"):
        batches.at(0, 0, 2, 0, 3)
    for wrong in ((-1, 0, 1, 0, 1), (0, 2, 2, 0, 1), (0, 0, 1, 2, 2), (0, -1, 1, 0, 1)):
        with pytest.raises(WeftError, match="a micro-batch"):
            batches.at(*wrong)


def test_id_outside_the_vocabulary_is_reported_with_its_shard(tmp_path: Path) -> None:
    ids = list(range(40))
    write(tmp_path / "a_000000.bin", ids)
    write(tmp_path / "a_000001.bin", [*ids[:7], 50257, *ids[8:]])
    both = shards.open_shards(sorted(tmp_path.glob("*.bin")))
    for vocab_size in (50257, 41):
        batches = Batches(both, 7, 11, 0, vocab_size)
        with pytest.raises(WeftError, match=r"a_000001\.bin, token 7: .* under \d+.*got 50257"):
            batches.at(0)
    assert Batches(both, 7, 11, 0, 50258).at(0)[0].max() == 50257
    # The token after a window may only be a target.
    with pytest.raises(WeftError, match=r"here, token 3: .*under 3, the vocabulary, got 3"):
        Batches(tokens(range(4)), 1, 3, 0, 3).at(0)


def test_prefetched_batches_are_the_same_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = Batches(tokens(range(61)), 4, 4, 0, 61)
    batches_read: list[tuple[int, int]] = []
    whole, ready = batches.at, threading.Semaphore(0)

    def counted(*position: int) -> Any:
        batches_read.append(position[:2])
        ready.release()
        return whole(*position)

    monkeypatch.setattr(batches, "at", counted)
    with Prefetch(batches, "cpu", accumulate=2, rank=0, world=2) as prefetch:
        for position in [(0, 0), (0, 1), (1, 0), (7, 1), (2, 0)]:
            for got, expected in zip(prefetch.at(*position), whole(*position, 2, 0, 2), strict=True):
                assert torch.equal(got, expected)
            prefetch.prefetch_next()
        assert all(ready.acquire(timeout=30) for _ in range(6))
    # Each call prefetches the next batch; a batch out of order is read when it is requested.
    assert batches_read[:6] == [(0, 0), (0, 1), (1, 0), (1, 1), (7, 1), (8, 0)]
    assert not [t for t in threading.enumerate() if t.name.startswith("weft-batches")]


@pytest.mark.gpu
def test_prefetched_batches_are_copied_asynchronously() -> None:
    """The copy is asynchronous: pinned memory must not be overwritten before it ends."""
    batches = Batches(tokens(i % 60000 for i in range(1 << 18)), 32, 1024, 0, 60000)
    with Prefetch(batches, "cuda", accumulate=2) as prefetch:
        busy = torch.randn(4096, 4096, device="cuda")
        prefetched = []
        for position in [(step, micro) for step in range(20) for micro in range(2)]:
            busy = busy @ busy.T / busy.norm()
            prefetched.append((position, prefetch.at(*position)))
            prefetch.prefetch_next()
    for position, pair in prefetched:
        for got, expected in zip(pair, batches.at(*position, 2), strict=True):
            assert got.device.type == "cuda" and torch.equal(got.cpu(), expected)


def test_prefetch_errors_are_raised_by_at() -> None:
    batches = Batches(tokens([*range(60), 99]), 1, 4, 0, 60)
    order = permuted(np.arange(15), 15, 0, 0).tolist()
    last = order.index(14)  # the window whose last target is 99
    with Prefetch(batches, "cpu") as prefetch:
        for step in range(last):
            prefetch.at(step)
            prefetch.prefetch_next()
        with pytest.raises(WeftError, match="here, token 60"):
            prefetch.at(last)
        prefetch.at(last + 1)


# --- shards


@few
@given(chunks=st.lists(IDS, max_size=6), most=st.integers(1, 70))
def test_shards_round_trip(chunks: list[list[int]], most: int, tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.mktemp("shards") / "new"
    ids = [i for chunk in chunks for i in chunk]
    arrays = [np.array(chunk, np.int64) for chunk in chunks]
    if not ids:
        with pytest.raises(WeftError, match="at least one token"):
            shards.write_shards(folder, "x", arrays, shard_tokens=most)
        assert list(folder.iterdir()) == []
        return
    written = shards.write_shards(folder, "x", arrays, shard_tokens=most)
    assert sorted(folder.iterdir()) == written
    assert [p.name for p in written] == [f"x_{n:06d}.bin" for n in range(-(-len(ids) // most))]
    assert [i for p in written for i in parsed(p)] == ids
    tokens = shards.open_shards(written)
    assert len(tokens) == len(ids) and tokens[:].tolist() == ids and tokens[-1] == ids[-1]
    for start in range(0, len(ids), 7):
        for stop in (start, start + 1, start + most + 1):
            assert tokens[start:stop].tolist() == ids[start:stop]
        shard, offset = divmod(start, most)
        assert tokens.location(start) == f"{written[shard]}, token {offset}"
    before, after = tokens.split(len(ids) // 3)
    assert [*before[:].tolist(), *after[:].tolist()] == ids
    assert not len(after) or after.location(len(after) - 1) == tokens.location(len(ids) - 1)


@few
@given(size=st.integers(0, 1024 + 99))
def test_truncated_shard_is_an_error(size: int, tmp_path_factory: Any) -> None:
    path = write(tmp_path_factory.mktemp("cut") / "x.bin", range(50))
    os.truncate(path, size)
    with pytest.raises(WeftError, match=rf"x\.bin: expected 1\d+ bytes.*got {size}\b"):
        shards.open_shard(path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: p.write_bytes(p.read_bytes() + b"\1"), "1124 bytes .50 tokens., got 1125 bytes"),
        (lambda p: write(p, range(50), magic=7), "magic number: expected 20240520, got 7"),
        (lambda p: write(p, range(50), magic=20240801), "got 20240801 .llm.c's for Llama 3"),
        (lambda p: write(p, range(50), version=2), "version: expected 1, got 2"),
        (lambda p: write(p, []), "tokens: expected at least one, got 0"),
        (lambda p: p.write_bytes(b""), "expected 1024 bytes of header, got 0"),
        (lambda p: p.unlink(), "cannot be read: got No such file"),
    ],
    ids=["odd", "magic", "llama", "version", "none", "empty", "gone"],
)
def test_invalid_shard_is_an_error(damage: Any, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "x.bin", range(50))
    damage(path)
    with pytest.raises(WeftError, match=rf"x\.bin.*{message}"):
        shards.open_shard(path)


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Limit memory to 2 GiB, so that reading a whole shard fails in this process."""
    status = Path("/proc/self/status").read_text()
    used = int(status.split("VmData:")[1].split()[0]) << 10
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (used + (2 << 30), hard))
    yield
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


@pytest.mark.usefixtures("little_memory")
def test_shards_may_be_larger_than_memory(tmp_path: Path) -> None:
    """Sparse files with more tokens than memory and no disk blocks; one token is 9."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    count = 2**31 - 1
    for number in range(memory // (2 * count) + 2):
        path = write(tmp_path / f"x_{number:06d}.bin", [])
        with path.open("r+b") as file:
            file.write(struct.pack("<3i", 20240520, 1, count))
            file.truncate(1024 + 2 * count)
    with path.open("r+b") as file:
        file.seek(-2, 2)
        file.write(struct.pack("<H", 9))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    train, validation = open_tokens(tmp_path, tokeniser=tokeniser("bytes"))
    assert (len(train) + len(validation)) * 2 > memory
    assert validation[-1] == 9 and train.identity != validation.identity
    x, _ = Batches(train, 8, 1024, 0, 256).at(10**6)
    assert x.shape == (8, 1024) and not x.any()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 512 << 10, f"{grown} KiB"  # the pages of the identity's sample, not the shards


def test_interrupted_write_leaves_no_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        yield np.arange(25)
        raise KeyboardInterrupt

    def folder_contents() -> dict[str, bytes]:
        return {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(KeyboardInterrupt):
        shards.write_shards(tmp_path, "x", broken(), shard_tokens=10)
    assert folder_contents() == {}
    shards.write_shards(tmp_path, "x", [np.arange(35)], shard_tokens=10)
    write(tmp_path / "x_val_000000.bin", [1])
    before = folder_contents()
    assert len(before) == 5
    with pytest.raises(WeftError, match=r"x_000000\.bin is there already; hint: --force"):
        shards.write_shards(tmp_path, "x", [np.arange(5)])
    with pytest.raises(WeftError, match="id in a shard: expected 0 to 65535, got 65536"):
        shards.write_shards(tmp_path, "x", [np.array([1, 65536])], force=True)
    with pytest.raises(WeftError, match="id in a shard: expected 0 to 65535, got -1"):
        shards.write_shards(tmp_path, "x", [np.array([1, -1])], force=True)
    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", full)
        with pytest.raises(WeftError, match=r"cannot be written to .*No space left on device"):
            shards.write_shards(tmp_path, "x", [np.arange(5)], force=True)
    assert folder_contents() == before
    shards.write_shards(tmp_path, "x", [np.arange(15)], shard_tokens=10, force=True)
    assert sorted(folder_contents()) == ["x_000000.bin", "x_000001.bin", "x_val_000000.bin"]
    with pytest.raises(WeftError, match="tokens of a shard: expected 1 to 2147483647, got 0"):
        shards.write_shards(tmp_path, "y", [], shard_tokens=0)
