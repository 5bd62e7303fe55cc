"""A checkpoint's tensors in parts, one file a process: ``torch.distributed.checkpoint`` over
safetensors.

    step-00000100/  model/shard-00001-model-00001-of-00001.safetensors      the first process'
                    model/shard-00002-...                                   the second's
                    optimizer/shard-...
                    state.json                                              as ever

Each file's header says where its parts lie in the whole, so that any number of processes reads
them, each what it needs, and one process the whole. The default format of DCP keeps that in a
pickle, which is code to whoever reads it; here nothing is pickled.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp

from weft.gpt2 import checkpoint

Tensors = Mapping[str, torch.Tensor]


def write(path: Path, name: str, tensors: Tensors, rank: int) -> dict[str, dict[str, Any]]:
    """Write this process' parts of ``tensors`` into a checkpoint; all processes call it.

    Returns:
        Size and hash of the files that this process wrote, by their names in the checkpoint.

    Raises:
        OSError: a process could not write; all raise it.
    """
    inside = path / checkpoint.folder(name)
    writer = dcp.HuggingFaceStorageWriter(str(inside), save_distributed=True)
    with _quiet():
        try:
            dcp.save(dict(tensors), storage_writer=writer)
        except dcp.CheckpointException as error:
            for failed, _ in error.failures.values():
                if isinstance(failed, OSError):
                    raise failed from error
            raise
    mine = sorted(inside.glob(f"shard-{rank + 1:05d}-*.safetensors"))
    return {f"{inside.name}/{file.name}": checkpoint.describe(file) for file in mine}


def read_into(path: Path, name: str, tensors: Tensors) -> None:
    """Fill ``tensors`` by name from a checkpoint, in parts or whole.

    Where a group of processes is, all of them call it, each with its own parts.
    """
    inside = path / checkpoint.folder(name)
    reader = dcp.HuggingFaceStorageReader(str(inside if inside.is_dir() else path))
    with _quiet():
        dcp.load(cast(dict[str, Any], dict(tensors)), storage_reader=reader)


def read(path: Path, name: str, only: str = "") -> dict[str, torch.Tensor]:
    """Whole tensors of a checkpoint, in parts or whole, on the CPU: of those whose name begins
    with ``only``. Each process reads for itself."""
    inside = path / checkpoint.folder(name)
    reader = dcp.HuggingFaceStorageReader(str(inside if inside.is_dir() else path))
    found: dict[str, Any] = {}
    for key, told in reader.read_metadata().state_dict_metadata.items():
        assert isinstance(told, dcp.TensorStorageMetadata)
        if key.startswith(only):
            found[key] = torch.empty(told.size, dtype=told.properties.dtype)
    with _quiet():
        dcp.load(found, storage_reader=reader, no_dist=True)
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """Without DCP's remarks on how it was called, which are no user's business."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed")
        yield
