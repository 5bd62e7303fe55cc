"""The oracle: an operator's float64 answer at a case, and the error that the baseline makes there.

Computed once for a case, direction and device, for all implementations; from inputs drawn apart
from any candidate's memory. The gradient's oracle is autograd through the reference, in float64, at
the gradient of the output as rounded to the output's dtype.
"""

from __future__ import annotations

import math
import random
import secrets
from collections.abc import Callable, Sequence
from functools import cached_property, partial

import torch

from weft.core import FORWARD, Case, Implementation, Operator, registry
from weft.workbench import inputs as drawing
from weft.workbench.bind import apart, bind, graded
from weft.workbench.slots import Result, tensors_of
from weft.workbench.stage import Form, Scene
from weft.workbench.tolerance import Bound, Measured, bound, measure, participants, rms

PIECE = (
    1 << 27
)  # elements of the first input that the reference gets at once, where rows stand alone


FEW, MOST_DRAWS = 1 << 14, 16  # elements that a baseline's error is taken over, and its draws
SMALL = 1 << 14  # elements of an input, up to which a draw costs next to nothing


def fresh_seeds(n: int) -> tuple[int, ...]:
    """Seeds from the operating system, so that no implementation can know them."""
    return tuple(secrets.randbelow(1 << 31) for _ in range(n))


class Oracle:
    """The right answers at one (case, direction, device), shared by all who are checked there.

    ``baseline`` is the implementation whose error sets the tolerance; without one it is the
    registry's, by the name that the operator's tolerance gives. Answers are kept up to ``budget``
    bytes and recomputed past it.
    """

    def __init__(
        self,
        operator: Operator,
        case: Case,
        direction: str,
        device: str,
        seeds: Sequence[int],
        baseline: Implementation | None = None,
    ) -> None:
        self.operator, self.case = operator, case
        self.direction, self.device = direction, device
        self.seeds = tuple(seeds)
        self.baseline = baseline or registry.implementation(
            operator.name, operator.tolerance.baseline
        )
        self._kept: dict[int, tuple[torch.Tensor, ...]] = {}
        self._room = _budget(device)

    def inputs(self, seed: int) -> list[torch.Tensor]:
        """The inputs of this seed in ordinary memory, in the case's layouts."""
        return drawing.make(self.case, self.device, seed)

    def grad(self, seed: int) -> torch.Tensor | None:
        """The gradient of the output for this seed; None in the forward direction."""
        if self.direction == FORWARD:
            return None
        form = self.grad_form
        output = torch.empty(form.shape, dtype=form.dtype, device="meta")
        return drawing.gradient_like(output, seed, device=self.device)

    @cached_property
    def forward_forms(self) -> tuple[Form, ...]:
        """The form of each output of the forward: the baseline's own, of the reference's shape."""
        x = self.inputs(self.seeds[0])
        made = tensors_of(bind(self.operator, self.baseline, self.case, FORWARD, x)())
        if self.direction == FORWARD:
            answers = self.answer(self.seeds[0])
            assert len(made) == len(answers), "the baseline returns as much as the reference"
            for out, answer in zip(made, answers, strict=True):
                assert out.shape == answer.shape, "the baseline has another shape"
        return tuple(Form(tuple(out.shape), out.dtype, tuple(out.stride())) for out in made)

    @property
    def grad_form(self) -> Form:
        """The form of the gradient that a backward is given; of several graded outputs, stacked."""
        made = tuple(torch.empty(f.shape, dtype=f.dtype, device="meta") for f in self.forward_forms)
        like = graded(self.operator, made)
        return Form(tuple(like.shape), like.dtype, None)

    @cached_property
    def forms(self) -> tuple[Form, ...]:
        """The form of each output: one in the forward, else one gradient a differentiable input."""
        if self.direction == FORWARD:
            return self.forward_forms
        wanted = [i for i in self.case.inputs if i.name in self.operator.differentiable]
        return tuple(Form(i.shape, getattr(torch, i.dtype), None) for i in wanted)

    @property
    def scene(self) -> Scene:
        """What a candidate is told: what is asked of it, and no answer."""
        grad_form = None if self.direction == FORWARD else self.grad_form
        return Scene(
            operator=self.operator,
            case=self.case,
            direction=self.direction,
            device=self.device,
            forms=self.forms,
            grad_form=grad_form,
        )

    def answer(self, seed: int) -> tuple[torch.Tensor, ...]:
        """The float64 outputs (forward) or gradients (backward) for this seed."""
        if seed in self._kept:
            return self._kept[seed]
        x, grad = self.inputs(seed), self.grad(seed)
        made: tuple[torch.Tensor, ...]
        if grad is None:
            made = tuple(tensors_of(_forward64(self.operator, x, self.case)))
        else:
            made = _backward64(self.operator, x, grad, self.case)
        size = sum(t.numel() * t.element_size() for t in made)
        if size <= self._room:
            self._room -= size
            self._kept[seed] = made
        return made

    @cached_property
    def bounds(self) -> tuple[Bound, ...]:
        """What each output's error may be, from the baseline's error over all the seeds."""
        errors: list[list[Measured]] = [[] for _ in self.forms]
        scales = [0.0] * len(self.forms)
        counts = [math.inf] * len(self.forms)
        for seed in self.seeds:
            answers = self.answer(seed)
            for i, scale in enumerate(self._scales(seed, answers)):
                scales[i] = max(scales[i], scale)
                counts[i] = min(counts[i], participants(answers[i]))
            for i, out in enumerate(self._baseline_outputs(seed)):
                errors[i].append(measure(out, answers[i]))
        for seed in self.further_seeds():
            for i, out in enumerate(self._baseline_outputs(seed)):
                errors[i].append(measure(out, self.answer(seed)[i]))
        tolerance = self.operator.tolerance
        return tuple(
            bound(tolerance, form.dtype, scale, errors[i], counts[i])
            for i, (form, scale) in enumerate(zip(self.forms, scales, strict=True))
        )

    def further_seeds(self) -> tuple[int, ...]:
        """Seeds for the baseline's error alone, where an answer is so small that a draw or two of
        it say little: the error of a single element may be 0 by luck, and so may what all of a
        row share, the rounding of its norm. They follow from the first seed, so that a verdict can
        be repeated."""
        largest = max(math.prod(form.shape) for form in self.forms)
        if largest == 0 or max(i.numel for i in self.case.inputs) > SMALL:
            return ()
        drawn = random.Random(self.seeds[0])
        wanted = min(-(-FEW // largest), MOST_DRAWS)
        return tuple(drawn.randrange(1 << 31) for _ in range(wanted - len(self.seeds)))

    def terms(self, seed: int) -> tuple[torch.Tensor | None, ...]:
        """The sizes of each gradient's terms before they cancel, where the operator names them."""
        grad = self.grad(seed)
        if grad is None or self.operator.gradient_scale is None:
            return (None,) * len(self.forms)
        arguments = (grad.double(), *_doubles(self.inputs(seed)))
        made = self.operator.gradient_scale(*arguments, **self.case.params)
        return made if isinstance(made, tuple) else (made,)

    def _scales(self, seed: int, answers: tuple[torch.Tensor, ...]) -> list[float]:
        if self.direction == FORWARD and self.operator.scale is not None:
            made = self.operator.scale(*_doubles(self.inputs(seed)), **self.case.params)
            return [rms(torch.as_tensor(made, dtype=torch.float64))] * len(answers)
        grad = self.grad(seed)
        if grad is None:
            return [rms(a) for a in answers]
        # Where all gradients all but cancel (a softmax that is one-hot), what is left is smaller
        # than one rounding of the incoming gradient, and its own RMS is no measure of anything.
        incoming = rms(grad.double())
        found = []
        for answer, terms, form in zip(answers, self.terms(seed), self.forms, strict=True):
            if terms is not None:
                found.append(max(rms(answer), rms(terms)))
                continue
            least = min(torch.finfo(torch.float32).eps, torch.finfo(form.dtype).eps)
            found.append(max(rms(answer), least * incoming))
        return found

    def _baseline_outputs(self, seed: int) -> tuple[torch.Tensor, ...]:
        x, grad = self.inputs(seed), self.grad(seed)
        return tuple(
            tensors_of(bind(self.operator, self.baseline, self.case, self.direction, x, grad)())
        )


class _Leading(Oracle):
    """Another's answers, the first so many outputs of a forward alone."""

    def __init__(self, whole: Oracle, count: int) -> None:
        vars(self).update(vars(whole))
        self.whole, self.count = whole, count

    @property
    def forms(self) -> tuple[Form, ...]:  # type: ignore[override]  # cached there
        return self.whole.forms[: self.count]

    @property
    def bounds(self) -> tuple[Bound, ...]:  # type: ignore[override]  # cached there
        return self.whole.bounds[: self.count]

    def answer(self, seed: int) -> tuple[torch.Tensor, ...]:
        return self.whole.answer(seed)[: self.count]

    def terms(self, seed: int) -> tuple[torch.Tensor | None, ...]:
        return self.whole.terms(seed)[: self.count]


def for_outputs(oracle: Oracle, implementation: Implementation) -> Oracle:
    """The oracle for as many outputs as an implementation says it returns."""
    if implementation.outputs is None or oracle.direction != FORWARD:
        return oracle
    return _Leading(oracle, implementation.outputs)


def _budget(device: str) -> int:
    """Bytes of answers worth keeping: an eighth of a GPU's memory, a gigabyte of a host's."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_properties(torch.device(device)).total_memory // 8
    return 1 << 30


def _doubles(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [x.double() if x.is_floating_point() else x for x in inputs]


def _forward64(operator: Operator, x: Sequence[torch.Tensor], case: Case) -> Result:
    """The reference on the inputs in float64; by rows of the first where those stand alone."""
    if x[0].numel() > PIECE and operator.draw is None:
        by_part = _of_rows(operator, x, case)
        if by_part is not None:
            return _by_rows(by_part, x[0])
    copies = [d.clone() if d is v else d for d, v in zip(_doubles(x), x, strict=True)]
    with torch.no_grad():  # on copies: a reference that writes into an input harms no one
        found: Result = operator.reference(*copies, **case.params)
    return found


def _of_rows(
    operator: Operator, x: Sequence[torch.Tensor], case: Case
) -> Callable[[slice], torch.Tensor] | None:
    """The reference on some rows of the first input, and of others of its shape if those go with
    it; None where a row's answer hangs on other rows."""

    def reference(beside: bool, part: slice) -> torch.Tensor:
        others = [v[part] if beside and v.shape == x[0].shape else v for v in x[1:]]
        with torch.no_grad():
            found = operator.reference(*_doubles([x[0][part], *others]), **case.params)
        assert isinstance(found, torch.Tensor), "by rows there is one output"
        return found

    for beside in (False, True):
        one = partial(reference, beside)
        try:
            if _alone(one):
                return one
        except RuntimeError as error:  # what torch raises on sizes that do not go together
            if "size" not in str(error):
                raise
    return None


def _backward64(
    operator: Operator, x: Sequence[torch.Tensor], grad: torch.Tensor, case: Case
) -> tuple[torch.Tensor, ...]:
    wanted = [spec.name in operator.differentiable for spec in case.inputs]

    def gradients(xs: Sequence[torch.Tensor], g: torch.Tensor) -> tuple[torch.Tensor, ...]:
        arguments = [
            v.detach().requires_grad_(w) for v, w in zip(_doubles(xs), wanted, strict=True)
        ]
        with torch.enable_grad():
            outputs = tensors_of(operator.reference(*arguments, **case.params))
        leaves = [v for v in arguments if v.requires_grad]
        grads = apart(operator, g.double())
        found = torch.autograd.grad(outputs[: len(grads)], leaves, grads, allow_unused=True)
        return tuple(
            torch.zeros_like(leaf) if one is None else one
            for leaf, one in zip(leaves, found, strict=True)
        )

    whole = len(x) == 1 and x[0].shape == grad.shape and x[0].numel() > PIECE
    if whole and _alone(lambda part: gradients((x[0][part],), grad[part])[0]):
        return (_by_rows(lambda part: gradients((x[0][part],), grad[part])[0], x[0]),)
    return gradients(x, grad)


def _by_rows(compute: Callable[[slice], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The answers for a piece of the rows at a time, one after another, in float64."""
    rows = max(1, PIECE // (x.numel() // x.shape[0]))
    made: torch.Tensor | None = None
    for start in range(0, x.shape[0], rows):
        answer = compute(slice(start, start + rows))
        if made is None:
            made = answer.new_empty((x.shape[0], *answer.shape[1:]))
        made[start : start + rows] = answer
    assert made is not None
    return made


def _alone(compute: Callable[[slice], torch.Tensor]) -> bool:
    """Whether the answer for two rows is the answers for each, one after another."""
    both, first, second = compute(slice(0, 2)), compute(slice(0, 1)), compute(slice(1, 2))
    if both.dim() == 0 or both.shape[0] != 2 or first.shape[0] != 1:
        return False
    apart = torch.cat((first, second))
    return torch.allclose(both, apart, rtol=1e-12, atol=1e-300, equal_nan=True)
