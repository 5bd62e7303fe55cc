"""What a cell's channel carries comes out as it went in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.workbench import cell_frames
from weft.workbench.cell import Cell, Limits
from weft.workbench.cell_pipes import Kept

MIB = 1 << 20


@pytest.fixture(scope="module")
def cell() -> Iterator[Cell]:
    with Cell("cell_toys:handlers", limits=Limits(seconds=20)) as made:
        yield made


@pytest.mark.parametrize("name", cell_frames.DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5, 7)], ids=str)
def test_every_dtype_comes_back_bit_for_bit(cell: Cell, name: str, shape: tuple[int, ...]) -> None:
    dtype = cell_frames.DTYPES[name]
    count = torch.empty(shape, dtype=dtype).numel() * dtype.itemsize
    raw = torch.arange(count, dtype=torch.uint8) % (2 if dtype is torch.bool else 251)
    sent = raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
    [back] = cell.ask("echo", {}, [sent]).tensors
    assert (back.dtype, back.shape, back.device.type) == (dtype, sent.shape, "cpu")
    assert bytes(cell_frames.view(back)) == bytes(cell_frames.view(sent))


@settings(max_examples=25)
@given(
    shapes=st.lists(st.lists(st.integers(0, 6), max_size=5), max_size=4),
    payload=st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | st.text()),
    data=st.data(),
)
def test_shapes_strides_and_payloads_survive(
    cell: Cell, shapes: list[list[int]], payload: dict, data: st.DataObject
) -> None:
    sent = []
    for shape in shapes:
        tensor = torch.randn(shape)
        sent.append(tensor.permute(data.draw(st.permutations(range(len(shape))))))
    reply = cell.ask("echo", payload, sent)
    assert reply.payload == payload
    assert all(t.is_contiguous() for t in reply.tensors)
    assert all(torch.equal(a, b) for a, b in zip(reply.tensors, sent, strict=True))


def test_a_view_is_sent_as_what_it_shows(cell: Cell) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    sent = [
        base[:, 1::2],
        base.T,
        torch.zeros(()).expand(3, 4),
        torch.view_as_complex(base.view(4, 3, 2)).conj(),
    ]
    for verb in ("echo", "turned"):
        for one, back in zip(sent, cell.ask(verb, {}, sent).tensors, strict=True):
            assert torch.equal(back, one if verb == "echo" else one.transpose(0, -1))


def test_a_large_message_goes_both_ways_at_once(cell: Cell) -> None:
    sent = torch.arange(12 * MIB, dtype=torch.int32)  # more than any socket's buffer
    assert torch.equal(cell.ask("echo", {}, [sent, sent]).tensors[1], sent)


@pytest.mark.slow
def test_a_message_of_over_two_gib(cell: Cell) -> None:
    sent = torch.zeros((1 << 31) + 12345, dtype=torch.uint8)
    sent[-5:] = 7
    [back] = cell.ask("echo", {}, [sent], seconds=100).tensors
    assert back.shape == sent.shape
    assert back[-6:].tolist() == [0, 7, 7, 7, 7, 7]


@given(limit=st.integers(2, 60), parts=st.lists(st.binary(max_size=40), max_size=10))
def test_kept_is_the_whole_or_its_two_ends(limit: int, parts: list[bytes]) -> None:
    kept, whole = Kept(limit), b"".join(parts)
    for part in parts:
        kept.add(part)
    text = kept.text()
    half = limit // 2
    if len(whole) <= 2 * half:
        assert text == whole.decode(errors="replace")
    else:
        first, last = whole[:half].decode(errors="replace"), whole[-half:].decode(errors="replace")
        assert text == f"{first}\n... {len(whole) - 2 * half} bytes left out ...\n{last}"
