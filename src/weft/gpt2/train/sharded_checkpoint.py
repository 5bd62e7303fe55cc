"""Sharded checkpoints: one file per process, by ``torch.distributed.checkpoint`` over safetensors.

    step-00000100/  model/shard-00001-model-00001-of-00001.safetensors      of the first process
                    model/shard-00002-...                                   of the second
                    optimizer/shard-...
                    state.json                                              as in any checkpoint

Each file's header gives the positions of its shards in the whole tensors. So any number of processes
can read them, each the shards that it needs, and one process can read the whole. DCP's default format
stores these positions in a pickle, which runs code when it is read; here nothing is pickled.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp

from weft.gpt2.train.checkpoint_files import Tensors, describe_file, shard_folder


def write_shards(path: Path, name: str, tensors: Tensors, rank: int) -> dict[str, dict[str, Any]]:
    """Write this process's shards of ``tensors`` into a checkpoint; all processes call it.

    Returns:
        Size and hash of the files that this process wrote, by their names in the checkpoint.

    Raises:
        OSError: a process could not write; all of them raise it.
    """
    folder = path / shard_folder(name)
    writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    with _without_warnings():
        try:
            dcp.save(dict(tensors), storage_writer=writer)
        except dcp.CheckpointException as error:
            # DCP wraps the errors of all ranks; a full disk should be reported as such.
            for failure, _ in error.failures.values():
                if isinstance(failure, OSError):
                    raise failure from error
            raise
    # DCP numbers the files by rank, from 1; each process hashes what it wrote.
    own_files = sorted(folder.glob(f"shard-{rank + 1:05d}-*.safetensors"))
    return {f"{folder.name}/{file.name}": describe_file(file) for file in own_files}


def read_into(path: Path, name: str, tensors: Tensors) -> None:
    """Fill ``tensors`` by name from a checkpoint, sharded or not.

    In a process group all processes call it, each with its own shards.
    """
    with _without_warnings():
        dcp.load(cast(dict[str, Any], dict(tensors)), storage_reader=_reader(path, name))


def read_whole(path: Path, name: str, prefix: str = "") -> dict[str, torch.Tensor]:
    """Read the whole tensors whose name begins with ``prefix``, on the CPU, from a checkpoint, sharded
    or not. Each process reads for itself."""
    reader = _reader(path, name)
    tensors: dict[str, Any] = {}
    for key, metadata in reader.read_metadata().state_dict_metadata.items():
        assert isinstance(metadata, dcp.TensorStorageMetadata)
        if key.startswith(prefix):
            tensors[key] = torch.empty(metadata.size, dtype=metadata.properties.dtype)
    with _without_warnings():
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def _reader(path: Path, name: str) -> dcp.HuggingFaceStorageReader:
    folder = path / shard_folder(name)
    return dcp.HuggingFaceStorageReader(str(folder if folder.is_dir() else path))


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Silence DCP's warnings about how it was called, which a user cannot act on."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed")
        yield
