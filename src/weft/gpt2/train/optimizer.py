"""AdamW as GPT-2 is trained with it: decay on matrices only, float32 masters, fused clipping.

A step never waits for the device by itself. ``norms`` returns a tensor, which the loop reads together
with the loss; ``step`` takes the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from weft.core import WeftError
from weft.ops.adamw import begin

CLIP_EPS = 1e-6  # added to a norm by torch.nn.utils.clip_grad_norm_, and by ops.adamw too
MOMENTS = ("exp_avg", "exp_avg_sq")
Tensors = list[torch.Tensor]
NamedTensors = Mapping[str, torch.Tensor]


@dataclass(kw_only=True)
class ParameterGroup:
    """Parameters with the same weight decay, and their state, all in the same order.

    ``params`` are this process's parts of ``owners``. ``masters`` is empty if the parameters are
    float32; ``gradient_sums`` is empty until gradients of several micro-batches are accumulated.
    """

    decay: float
    names: list[str] = field(default_factory=list)
    owners: list[torch.nn.Parameter] = field(default_factory=list)
    params: Tensors = field(default_factory=list)
    masters: Tensors = field(default_factory=list)
    exp_avgs: Tensors = field(default_factory=list)
    exp_avg_sqs: Tensors = field(default_factory=list)
    gradient_sums: Tensors = field(default_factory=list)

    @property
    def float32_values(self) -> Tensors:
        """The masters if there are any, else the parameters."""
        return self.masters or self.params


class Optimizer:
    """AdamW (arXiv:1711.05101) over named parameters, by ``weft.ops.adamw``.

    Args:
        named_parameters: parameters by name, all float32 or all of one half precision, on one device.
        masters: float32 values of half-precision parameters, by name; default: the parameters' own.
        betas, eps, weight_decay: AdamW's; tensors of fewer than two dimensions (biases and norms) are
            not decayed, as in GPT-2.
        impl: implementation of ``weft.ops.adamw``; None leaves the choice to dispatch.
        local_part: returns this process's part of a parameter or gradient.

    Raises:
        WeftError: no parameters, or parameters of several dtypes.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        *,
        masters: NamedTensors | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        impl: str | None = None,
        local_part: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    ) -> None:
        self.betas, self.eps, self.impl, self.local_part = betas, eps, impl, local_part
        decayed, undecayed = ParameterGroup(decay=weight_decay), ParameterGroup(decay=0.0)
        for name, p in named_parameters:
            # Matrices and embedding tables are decayed, biases and norm weights are not.
            group = decayed if p.dim() >= 2 else undecayed
            part = local_part(p.detach())
            group.names.append(name)
            group.owners.append(p)
            group.params.append(part)
            if part.dtype != torch.float32:
                master = part if masters is None else masters[name]
                # copy=True: the master must not share memory with the model's parameter.
                group.masters.append(master.detach().to(part.device, torch.float32, copy=True))
            for moments in (group.exp_avgs, group.exp_avg_sqs):
                moments.append(torch.zeros_like(part, dtype=torch.float32))
        self.groups = [g for g in (decayed, undecayed) if g.names]
        self._gradients: list[Tensors] | None = None
        self._launches: list[Callable[..., None]] = []
        dtypes = {p.dtype for g in self.groups for p in g.params}
        if len(dtypes) != 1:
            got = ", ".join(sorted(map(str, dtypes))) or "no parameters"
            raise WeftError("Optimizer: parameters", expected="of one dtype", got=got)

    # Under no_grad, or autograd would record each to_local() of a sharded gradient, 30 us each.
    @torch.no_grad()
    def accumulate(self, first: bool) -> None:
        """Add the gradients of one of several micro-batches to float32 sums, and drop them."""
        for g in self.groups:
            gradients = [self.local_part(_gradient(p)) for p in g.owners]
            if not g.gradient_sums:
                g.gradient_sums = [torch.empty_like(m, dtype=torch.float32) for m in g.float32_values]
            if first:
                # The first micro-batch overwrites the last step's sums, which saves a pass that clears them.
                torch._foreach_copy_(g.gradient_sums, gradients)
            else:
                torch._foreach_add_(g.gradient_sums, gradients)
            for p in g.owners:
                p.grad = None

    @torch.no_grad()
    def gradients(self) -> list[Tensors]:
        """Return each group's gradients: the sums, if there were several micro-batches.

        They are looked up once per step.
        """
        if self._gradients is None:
            self._gradients = [
                g.gradient_sums or [self.local_part(_gradient(p)) for p in g.owners] for g in self.groups
            ]
        return self._gradients

    @torch.no_grad()
    def norms(self) -> torch.Tensor:
        """Return the norm of each group's gradients, (groups,) float32, on their device."""
        norms = []
        for gradients in self.gradients():
            # float32, because a bfloat16 norm would lose the digits that clipping and the outlier test need.
            tensor_norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
            norms.append(torch.linalg.vector_norm(torch.stack(tensor_norms)))
        return torch.stack(norms)

    def prepare(self, may_clip: bool) -> None:
        """Do the part of :meth:`step` that needs no number, once all gradients are being computed.

        Between the norms and the update the device waits for the host, which then has only to launch.
        ``may_clip`` says whether ``step`` may be called with ``clip``.
        """
        self._launches = [
            begin(
                group.params,
                gradients,
                group.exp_avgs,
                group.exp_avg_sqs,
                masters=group.masters or None,
                clips=may_clip,
                impl=self.impl,
            )
            for group, gradients in zip(self.groups, self.gradients(), strict=True)
        ]

    def step(
        self, number: int, lr: float, group_norms: Iterable[float], norm: float, clip: float | None
    ) -> None:
        """Update all parameters; gradients are read only, and dropped at the end.

        Args:
            number: number of this update, from 1.
            lr: learning rate.
            group_norms: the numbers in :meth:`norms`.
            norm: norm of all gradients together, over all processes.
            clip: largest allowed ``norm``, or None. The fused clipping of a group compares the group's
                own norm n, so it gets the limit c (n + 1e-6), where c is the common factor.
        """
        # The same factor for all groups, as if one call had clipped all gradients.
        factor = 1.0 if clip is None else min(1.0, clip / (norm + CLIP_EPS))
        if not self._launches:
            self.prepare(clip is not None)
        for group, group_norm, launch in zip(self.groups, group_norms, self._launches, strict=True):
            launch(
                lr=lr,
                betas=self.betas,
                eps=self.eps,
                weight_decay=group.decay,
                step=number,
                max_norm=factor * (group_norm + CLIP_EPS) if factor < 1.0 else None,
            )
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Drop the gradients of a step that was applied, skipped or failed."""
        self._gradients, self._launches = None, []
        for group in self.groups:
            for p in group.owners:
                p.grad = None

    def masters(self) -> dict[str, torch.Tensor]:
        """Return the float32 values by the parameters' names: a checkpoint's weights."""
        return {n: t for g in self.groups for n, t in zip(g.names, g.float32_values, strict=True)}

    def moments(self) -> dict[str, torch.Tensor]:
        """Return both averages of each parameter, as ``exp_avg.NAME`` and ``exp_avg_sq.NAME``."""
        return dict(self._named_moments())

    def _named_moments(self) -> Iterator[tuple[str, torch.Tensor]]:
        for g in self.groups:
            for kind, tensors in zip(MOMENTS, (g.exp_avgs, g.exp_avg_sqs), strict=True):
                for name, t in zip(g.names, tensors, strict=True):
                    yield f"{kind}.{name}", t

    @torch.no_grad()
    def load(self, masters: NamedTensors, moments: NamedTensors) -> None:
        """Restore the results of :meth:`masters` and :meth:`moments`; parameters are rounded from them.

        Raises:
            WeftError: names or shapes differ; nothing is changed then.
        """
        pairs = ((self.masters(), masters), (self.moments(), moments))
        # All checks come before the first copy, so that a wrong checkpoint changes nothing.
        for own, loaded in pairs:
            _check_same_tensors(own, loaded)
        for own, loaded in pairs:
            for name, t in own.items():
                t.copy_(loaded[name])
        for group in self.groups:
            if group.masters:
                torch._foreach_copy_(group.params, group.masters)


def combined_norm(norms: Iterable[float]) -> float:
    """Return the norm of all gradients, from the norms of their groups."""
    return math.hypot(*norms)


def _gradient(p: torch.nn.Parameter) -> torch.Tensor:
    assert p.grad is not None, "every parameter of the model has a gradient"
    return p.grad


def _check_same_tensors(own: NamedTensors, loaded: NamedTensors) -> None:
    different = sorted(set(own) ^ set(loaded))
    if different:
        where = "the checkpoint" if different[0] in own else "the model"
        hint = "the checkpoint is of another model"
        raise WeftError("the checkpoint's tensors", got=f"{different[0]} missing in {where}", hint=hint)
    for name, t in own.items():
        if t.shape != loaded[name].shape:
            expected, got = tuple(t.shape), tuple(loaded[name].shape)
            raise WeftError(f"the checkpoint's {name}", expected=expected, got=got)
