"""AdamW as GPT-2 is trained with it: decay on matrices alone, float32 masters, clipping folded in.

A step costs the host no wait of its own: ``norms`` are a tensor that the loop reads together with
the loss, and what they say comes back as numbers in ``step``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from weft.core import WeftError
from weft.ops.adamw import begin

CLIP_EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_ adds to a norm, and ops.adamw too
MOMENTS = ("exp_avg", "exp_avg_sq")
Tensors = list[torch.Tensor]
Named = Mapping[str, torch.Tensor]
Local = Callable[[torch.Tensor], torch.Tensor]


@dataclass(kw_only=True)
class Group:
    """Parameters of one decay, and what is kept of each, in one order.

    ``masters`` is empty where the parameters are float32 themselves; ``sums`` until a gradient is
    gathered from several micro-batches.
    """

    decay: float
    names: list[str] = field(default_factory=list)
    owners: list[torch.nn.Parameter] = field(default_factory=list)
    params: Tensors = field(default_factory=list)
    masters: Tensors = field(default_factory=list)
    exp_avgs: Tensors = field(default_factory=list)
    exp_avg_sqs: Tensors = field(default_factory=list)
    sums: Tensors = field(default_factory=list)

    @property
    def whole(self) -> Tensors:
        """The float32 values: the masters, or the parameters."""
        return self.masters or self.params


class Optimizer:
    """AdamW (arXiv:1711.05101) over named parameters, by ``weft.ops.adamw``.

    Args:
        named: parameters by name, all float32 or all of one half precision, on one device.
        masters: the float32 values of half-precision parameters, by name; where left out, the
            parameters' own.
        betas, eps, weight_decay: AdamW's; tensors of fewer than two dimensions are not decayed
            (biases and norms), as GPT-2's are not.
        impl: the implementation that ``weft.ops.adamw`` is to use; None is its choice.
        local: this process' part of a parameter or a gradient, where it is spread over several.

    Raises:
        WeftError: no parameters, or float32 and half-precision ones together.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, torch.nn.Parameter]],
        *,
        masters: Named | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        impl: str | None = None,
        local: Local = lambda x: x,
    ) -> None:
        self.betas, self.eps, self.impl, self.local = betas, eps, impl, local
        decayed, plain = Group(decay=weight_decay), Group(decay=0.0)
        for name, p in named:
            group = decayed if p.dim() >= 2 else plain
            own = local(p.detach())
            group.names.append(name)
            group.owners.append(p)
            group.params.append(own)
            if own.dtype != torch.float32:
                given = own if masters is None else masters[name]
                group.masters.append(given.detach().to(own.device, torch.float32, copy=True))
            for moments in (group.exp_avgs, group.exp_avg_sqs):
                moments.append(torch.zeros_like(own, dtype=torch.float32))
        self.groups = [g for g in (decayed, plain) if g.names]
        self._found: list[Tensors] | None = None
        self._begun: list[Callable[..., None]] = []
        dtypes = {p.dtype for g in self.groups for p in g.params}
        if len(dtypes) != 1:
            got = ", ".join(sorted(map(str, dtypes))) or "no parameters"
            raise WeftError("Optimizer: parameters", expected="of one dtype", got=got)

    @torch.no_grad()  # or a part's own tensor would be taken from it by autograd, 30 us each
    def gather(self, first: bool) -> None:
        """Add the gradients of one of several micro-batches to float32 sums, and drop them."""
        for g in self.groups:
            found = [self.local(_of(p)) for p in g.owners]
            if not g.sums:
                g.sums = [torch.empty_like(m, dtype=torch.float32) for m in g.whole]
            if first:
                torch._foreach_copy_(g.sums, found)
            else:
                torch._foreach_add_(g.sums, found)
            for p in g.owners:
                p.grad = None

    @torch.no_grad()
    def gradients(self) -> list[Tensors]:
        """Each group's gradients: the sums where micro-batches were several.

        They are looked up once a step.
        """
        if self._found is None:
            self._found = [g.sums or [self.local(_of(p)) for p in g.owners] for g in self.groups]
        return self._found

    @torch.no_grad()
    def norms(self) -> torch.Tensor:
        """The norm of each group's gradients, (groups,) float32, on their device."""
        found = []
        for grads in self.gradients():
            each = torch._foreach_norm(grads, 2, dtype=torch.float32)
            found.append(torch.linalg.vector_norm(torch.stack(each)))
        return torch.stack(found)

    def ready(self, clips: bool) -> None:
        """What :meth:`step` does that needs no number, once all gradients are on their way.

        Between the norms and the update the device has nothing to do and waits for the host, which
        so has only to launch. ``clips`` says whether ``step`` may be told to clip.
        """
        self._begun = [
            begin(
                group.params,
                grads,
                group.exp_avgs,
                group.exp_avg_sqs,
                masters=group.masters or None,
                clips=clips,
                impl=self.impl,
            )
            for group, grads in zip(self.groups, self.gradients(), strict=True)
        ]

    def step(
        self, number: int, lr: float, norms: Iterable[float], norm: float, clip: float | None
    ) -> None:
        """Update all parameters by the gradients, of which none is changed, and drop them.

        Args:
            number: how many updates this makes, from 1.
            lr: the learning rate.
            norms: what :meth:`norms` said, as numbers: each group's own.
            norm: the norm of all gradients together, over all processes.
            clip: the most that it may be, or None. A group's call clips its own norm n to
                c (n + 1e-6), where c is the factor of the whole.
        """
        factor = 1.0 if clip is None else min(1.0, clip / (norm + CLIP_EPS))
        if not self._begun:
            self.ready(clip is not None)
        for group, own, finish in zip(self.groups, norms, self._begun, strict=True):
            finish(
                lr=lr,
                betas=self.betas,
                eps=self.eps,
                weight_decay=group.decay,
                step=number,
                max_norm=factor * (own + CLIP_EPS) if factor < 1.0 else None,
            )
        self.drop()

    def drop(self) -> None:
        """Forget the gradients: of a step that is taken, skipped, or failed."""
        self._found, self._begun = None, []
        for group in self.groups:
            for p in group.owners:
                p.grad = None

    def masters(self) -> dict[str, torch.Tensor]:
        """The float32 values by the parameters' names: what a checkpoint's weights are."""
        return {n: t for g in self.groups for n, t in zip(g.names, g.whole, strict=True)}

    def moments(self) -> dict[str, torch.Tensor]:
        """Both averages of each parameter, as ``exp_avg.NAME`` and ``exp_avg_sq.NAME``."""
        return {f"{kind}.{name}": t for kind, name, t in self._moments()}

    def _moments(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        for g in self.groups:
            for kind, tensors in zip(MOMENTS, (g.exp_avgs, g.exp_avg_sqs), strict=True):
                for name, t in zip(g.names, tensors, strict=True):
                    yield kind, name, t

    @torch.no_grad()
    def load(self, masters: Named, moments: Named) -> None:
        """Take what :meth:`masters` and :meth:`moments` gave; parameters are rounded from it.

        Raises:
            WeftError: names or shapes are others; nothing is taken then.
        """
        for mine, given in ((self.masters(), masters), (self.moments(), moments)):
            _refuse_others(mine, given)
        for mine, given in ((self.masters(), masters), (self.moments(), moments)):
            for name, t in mine.items():
                t.copy_(given[name])
        for group in self.groups:
            if group.masters:
                torch._foreach_copy_(group.params, group.masters)


def whole_norm(norms: Iterable[float]) -> float:
    """The norm of gradients that lie in groups of these norms."""
    return math.hypot(*norms)


def _of(p: torch.nn.Parameter) -> torch.Tensor:
    assert p.grad is not None, "every parameter of the model has a gradient"
    return p.grad


def _refuse_others(mine: Named, given: Named) -> None:
    odd = sorted(set(mine) ^ set(given))
    if odd:
        where = "the checkpoint" if odd[0] in mine else "the model"
        hint = "the checkpoint is of another model"
        raise WeftError("the checkpoint's tensors", got=f"{odd[0]} missing in {where}", hint=hint)
    for name, t in mine.items():
        if t.shape != given[name].shape:
            expected, got = tuple(t.shape), tuple(given[name].shape)
            raise WeftError(f"the checkpoint's {name}", expected=expected, got=got)
