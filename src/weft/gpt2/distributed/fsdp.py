"""``FullySharded``: FSDP2, with a shard of every weight and moment in each process (Zhao et al.,
"PyTorch FSDP", 2023; ZeRO's third stage, Rajbhandari et al., 2020).

A weight is split by its first dimension. The shards are float32 master weights. The whole weights of a
few blocks at a time are gathered in the run's dtype for forward and backward; gradients are summed in
float32, directly into the shards.

FSDP2's hooks are Python code that runs around each unit that is gathered together, and for each of its
parameters. With one unit per block, gathered twice a step, they took the host of an H200 longer than
the model's own operators, and during the blocks' forward the host is hardly ahead of the device. So
small blocks share a unit; and where memory allows, gathered weights stay and ``AllGather`` refills them
after an update. This halves the host time of a step's forward and backward, or more: see
sweep-fsdp-2026-11-22.ndjson in the results.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from weft.gpt2.distributed.all_gather import AllGather, ShardAndWhole
from weft.gpt2.distributed.process_group import ProcessGroup, barrier
from weft.gpt2.distributed.strategy import MultiProcess, PreparedModel
from weft.gpt2.model.model import GPT
from weft.gpt2.train import checkpoint, sharded_checkpoint
from weft.gpt2.train.checkpoint import Checkpoint
from weft.gpt2.train.checkpoint_files import (
    MODEL,
    OPTIMIZER,
    RNG_PREFIX,
    Tensors,
    begin_checkpoint,
    checkpoint_path,
    checkpoint_write,
    commit_checkpoint,
    read_state,
)
from weft.gpt2.train.optimizer import Optimizer

# Approximate number of parameters of a unit: three blocks of the 124M, one of the 774M. Their gradients
# take 160 MB while they are summed, 8 bytes each.
UNIT_PARAMETERS = 20_000_000
# Weights of models up to this size stay gathered.
LARGEST_GATHERED = 1_000_000_000


class FullySharded(MultiProcess):
    """FSDP2: a shard of the model in each process.

    Args:
        group: the processes.
        reshard: whether a unit's whole weights are dropped after its forward and after its backward,
            and gathered before each; None: for models above ``LARGEST_GATHERED`` parameters.
    """

    shards_gradients = True

    def __init__(self, group: ProcessGroup, reshard: bool | None = None) -> None:
        super().__init__(group)
        self._reshard = reshard
        self._all_gather: AllGather | None = None
        self._mesh = init_device_mesh(self.device.type, (self.world,))

    def prepare_model(self, model: torch.nn.Module, dtype: torch.dtype) -> PreparedModel:
        """Shard the model in place. Until then each device has the whole model, once."""
        assert isinstance(model, GPT)
        # torch 2.13 warns for each block, whose result is a view: it must not be written in place. No
        # operator of Weft writes into its input.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
        is_half = dtype != torch.float32
        policy = MixedPrecisionPolicy(
            # Gathered in half precision, but summed in float32, as micro-batches are.
            param_dtype=dtype if is_half else None,
            reduce_dtype=torch.float32 if is_half else None,
        )
        if self._reshard is None:
            self._reshard = model.config.parameters > LARGEST_GATHERED
        options: dict[str, Any] = {"mesh": self._mesh, "mp_policy": policy}
        groups = group_blocks(list(model.h))
        units = [fully_shard(g, reshard_after_forward=self._reshard, **options)[0] for g in groups]
        # The root unit has the tables and the last norm. It stays gathered until the backward has ended,
        # because the token table is the first operand of the step and the last.
        root = fully_shard(model, reshard_after_forward=False, **options)
        self._units: list[FSDPModule] = [root, *units]
        # In the order of the forward, each unit requests the next one's weights before it computes, so
        # that they arrive in the meantime even where the device waits for the host.
        for unit, following in pairwise(self._units):
            unit.set_modules_to_forward_prefetch([following])
        if not self._reshard:  # FSDP2 then gathers for the first forward only
            root.set_reshard_after_backward(False)
        self._sharded_parameters = dict(model.named_parameters())
        return model, None

    def after_update(self) -> None:
        """Refill weights that stay gathered; FSDP2 gathers the others before each use."""
        if self._reshard:
            return
        # Created at the first update: the buckets need the whole weights, which exist only after a backward.
        if self._all_gather is None:
            self._all_gather = AllGather(self._buckets(), self.rank, self.world)
        self._all_gather()

    def _buckets(self) -> list[list[ShardAndWhole]]:
        """Return pairs of shard and whole weight, in buckets of about a unit's size.

        Valid after a backward: only then are the model's parameters the whole weights.
        """
        buckets: list[list[ShardAndWhole]] = []
        remaining = 0
        for name, whole in cast(GPT, self._units[0]).named_parameters():
            sharded = self._sharded_parameters[name]
            assert isinstance(sharded, DTensor) and not isinstance(whole, DTensor)
            if whole.numel() > remaining:
                buckets.append([])
                remaining = UNIT_PARAMETERS
            buckets[-1].append((sharded.to_local().detach(), whole))
            remaining -= whole.numel()
        return buckets

    def local_part(self, x: torch.Tensor) -> torch.Tensor:
        return x.to_local() if isinstance(x, DTensor) else x

    def sampling(self) -> AbstractContextManager[None]:
        """Gather all weights once, in the run's dtype, instead of once for each token."""
        return self._gathered()

    @contextmanager
    def _gathered(self) -> Iterator[None]:
        if not self._reshard:  # the weights are gathered already, or will be by the first forward
            yield
            return
        self._initialise_fsdp()
        for unit in self._units:
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()
        try:
            yield
        finally:
            for unit in self._units:
                unit.reshard()
            for unit in self._units[1:]:
                unit.set_reshard_after_forward(True, recurse=False)

    @torch.no_grad()
    def _initialise_fsdp(self) -> None:
        """Run one forward: FSDP2 initialises itself in its first one and cannot gather before.

        A run that is resumed after its last step has had no forward.
        """
        model = cast(GPT, self._units[0])
        training = model.training
        model.eval()
        model(torch.zeros(1, 1, dtype=torch.int64, device=self.device))
        model.train(training)

    def save(self, root: Path, step: int, optimizer: Optimizer, rng: Tensors, state: dict[str, Any]) -> Path:
        """Write the shards of each process into one folder, which the main process then commits."""
        temporary = checkpoint_path(root, step, temporary=True)
        masters, moments = self._as_dtensors(optimizer)
        described: dict[str, dict[str, Any]] = {}
        with checkpoint_write(root, step, remove=self.is_main):
            if self.is_main:
                begin_checkpoint(root, step)
            barrier(self.group)  # the folder exists
            for name, tensors in ((MODEL, masters), (OPTIMIZER, {**moments, **rng})):
                # All processes must call it for both files in the same order: DCP communicates inside.
                described |= sharded_checkpoint.write_shards(temporary, name, tensors, self.rank)
            by_process: list[dict[str, dict[str, Any]]] = [{} for _ in range(self.world)]
            # The state lists the hashes of all processes' files, and only their writers have hashed them.
            # Small Python objects: sizes and hashes, once for each checkpoint.
            dist.all_gather_object(by_process, described)
            if self.is_main:
                files = {name: entry for process in by_process for name, entry in process.items()}
                commit_checkpoint(root, step, files, state)
            barrier(self.group)  # the checkpoint is complete
        return checkpoint_path(root, step)

    def load_newest(self, root: Path, log: Callable[[str], None]) -> Checkpoint | None:
        """Verify the hashes in the main process. The result has the random generators' states only;
        each process reads its shards of the other tensors in :meth:`restore`."""
        step = self.broadcast_step(lambda: checkpoint.load_newest(root, log, read=checkpoint.verify))
        if step is None:
            return None
        path = checkpoint_path(root, step)
        rng = sharded_checkpoint.read_whole(path, OPTIMIZER, prefix=RNG_PREFIX)
        return Checkpoint(path=path, step=step, state=read_state(path), tensors={OPTIMIZER: rng})

    def restore(self, optimizer: Optimizer, saved: Checkpoint) -> None:
        masters, moments = self._as_dtensors(optimizer)
        sharded_checkpoint.read_into(saved.path, MODEL, masters)
        sharded_checkpoint.read_into(saved.path, OPTIMIZER, moments)

    def _as_dtensors(self, optimizer: Optimizer) -> tuple[Mapping[str, DTensor], Mapping[str, DTensor]]:
        """Return the optimizer's weights and moments as DTensors, which know their part of the whole."""
        owners = {n: p for g in optimizer.groups for n, p in zip(g.names, g.owners, strict=True)}
        masters = {n: _sharded_like(t, owners[n]) for n, t in optimizer.masters().items()}
        # A moment is called exp_avg.NAME or exp_avg_sq.NAME.
        # A moment is sharded as its weight.
        moments = {n: _sharded_like(t, owners[n.partition(".")[2]]) for n, t in optimizer.moments().items()}
        return masters, moments


def group_blocks(blocks: list[torch.nn.Module]) -> list[list[torch.nn.Module]]:
    """Group equal blocks, in order, into units of about ``UNIT_PARAMETERS``, or of one block."""
    block_parameters = sum(p.numel() for p in blocks[0].parameters())
    # Equal blocks make equal units; the last unit may have fewer.
    count = max(1, round(UNIT_PARAMETERS / block_parameters))
    return [blocks[i : i + count] for i in range(0, len(blocks), count)]


def _sharded_like(shard: torch.Tensor, owner: torch.Tensor) -> DTensor:
    assert isinstance(owner, DTensor)
    return DTensor.from_local(
        shard,
        owner.device_mesh,
        owner.placements,
        run_check=False,
        shape=owner.shape,
        stride=owner.stride(),
    )
