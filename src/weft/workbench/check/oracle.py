"""Oracle: an operator's float64 answers at a case, and the error that its baseline makes there.

The answers are computed once for a case, direction and device, for all implementations, from inputs
in memory of their own. A gradient's answer is autograd through the reference in float64, at the
gradient of the output as rounded to the output's dtype.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any
from weakref import WeakMethod

import torch

from weft.core import FORWARD, Case, Implementation, Operator, registry
from weft.core.cases import FLOAT8
from weft.workbench.calls import inputs as case_inputs
from weft.workbench.calls.bind import bind, differentiable_outputs, split_gradients
from weft.workbench.calls.buffers import tensors_of
from weft.workbench.calls.part_times import part
from weft.workbench.calls.staging import CallSpec, TensorForm
from weft.workbench.check.by_rows import (
    DISTRUST,
    MIN_BYTES,
    Moments,
    RowReference,
    compare_by_rows,
    return_freed_memory,
    row_reference,
)
from weft.workbench.check.local_error import LocalJudge, SliceFigures
from weft.workbench.check.reference import (
    cast,
    doubles,
    forward_in_float64,
    gradients_in,
    gradients_in_float64,
)
from weft.workbench.check.slices import layouts
from weft.workbench.check.tolerance import Bound, Measured, bound, measure, participants, rms

# A small answer says little of the baseline's error: more seeds are taken until this many elements
# were seen, up to MAX_SEEDS, where the inputs have at most SMALL_INPUT elements. An answer of FEW_ELEMENTS
# gets them with larger inputs, too: of four gradients of sinks one has most of the error, five seeds are five
# draws of it, and a right kernel failed in two of four runs on an H200.
ENOUGH_ELEMENTS, MAX_SEEDS = 1 << 14, 16
SMALL_INPUT = 1 << 14
FEW_ELEMENTS, MEDIUM_INPUT = 16, 1 << 21
# The baseline itself is at fault if its error is so many times what one rounding explains: of float32, where
# sums and chains of operations are long, and of a shorter type, to which results are rounded a few times.
# Weft's own baselines use at most 2.3 and 1.1 of these on a CPU. On a GPU this was not run; from the H200's
# records of float32 products about 10 are expected.
ROUNDINGS_FLOAT32, ROUNDINGS_SHORT = 64.0, 8.0
EPS_TF32 = 2.0**-10
# Bytes of an answer that is cached. A larger one on a GPU is computed again: in float64 it takes twice an
# output's memory for each seed, beside the candidate's.
LARGEST_CACHED = {"cpu": 1 << 30, "cuda": 1 << 29}


class Oracle:
    """Right answers at one case, direction and device, shared by all candidates checked there.

    ``baseline`` is the implementation whose error sets the tolerance; by default the registry's, by
    the name that the operator's tolerance gives. With ``accepts_dense_layouts`` an output may be a
    permutation of a contiguous tensor, whatever the baseline's strides. Answers are cached up to a
    budget of memory and recomputed past it.
    """

    def __init__(
        self,
        operator: Operator,
        case: Case,
        direction: str,
        device: str,
        seeds: Sequence[int],
        baseline: Implementation | None = None,
        *,
        accepts_dense_layouts: bool = False,
    ) -> None:
        self.operator, self.case = operator, case
        self.accepts_dense_layouts = accepts_dense_layouts
        self.direction, self.device = direction, device
        self.seeds = tuple(seeds)
        self.baseline = baseline or registry.implementation(operator.name, operator.tolerance.baseline)
        self._answers: dict[int, tuple[torch.Tensor, ...]] = {}
        large = sum(i.nbytes for i in case.inputs) >= MIN_BYTES
        # False as soon as the rows turn out to depend on each other.
        self.may_split = self.is_large = direction == FORWARD and operator.splits_rows and large
        self._row_reference: RowReference | None = None
        self._cache_bytes_left = _cache_budget(device)

    @cached_property
    def local(self) -> LocalJudge:
        """Judge of the errors by slices; it knows the bounds once :attr:`bounds` are computed."""
        shapes, dtypes = [f.shape for f in self.forms], [f.dtype for f in self.forms]
        # Weak: in a cycle the oracle's tensors, gigabytes of them, would wait for the garbage collector.
        method = WeakMethod(self._noise)

        def noise(seed: int) -> Sequence[Sequence[torch.Tensor]] | None:
            of_oracle = method()
            return of_oracle(seed) if of_oracle is not None else None

        return LocalJudge(layouts(shapes, dtypes), noise)

    def inputs(self, seed: int) -> list[torch.Tensor]:
        """Return the inputs of this seed in ordinary memory, in the case's layouts."""
        return case_inputs.make(self.case, self.device, seed)

    def grad(self, seed: int) -> torch.Tensor | None:
        """Return the gradient of the output for this seed; None in the forward direction."""
        if self.direction == FORWARD:
            return None
        form = self.grad_form
        output = torch.empty(form.shape, dtype=form.dtype, device="meta")
        return case_inputs.gradient_like(output, seed, device=self.device)

    @cached_property
    def forward_forms(self) -> tuple[TensorForm, ...]:
        """Form of each forward output: the baseline's dtype and strides, the reference's shape."""
        x = self.inputs(self.seeds[0])
        outputs = tensors_of(bind(self.operator, self.baseline, self.case, FORWARD, x)())
        forms = tuple(TensorForm(tuple(out.shape), out.dtype, tuple(out.stride())) for out in outputs)
        del outputs  # large ones would not fit beside the answers
        if self.direction == FORWARD and self._rows(x) is None:
            answers = self.answer(self.seeds[0])
            assert len(forms) == len(answers), "the baseline returns as much as the reference"
            for form, answer in zip(forms, answers, strict=True):
                assert form.shape == tuple(answer.shape), "the baseline has another shape"
        return forms

    @property
    def grad_form(self) -> TensorForm:
        """Form of a backward's incoming gradient; of several differentiable outputs, stacked."""
        outputs = tuple(torch.empty(f.shape, dtype=f.dtype, device="meta") for f in self.forward_forms)
        like = differentiable_outputs(self.operator, outputs)
        return TensorForm(tuple(like.shape), like.dtype, None)

    @cached_property
    def forms(self) -> tuple[TensorForm, ...]:
        """Form of each output: the forward's, or one gradient for each differentiable input."""
        if self.direction == FORWARD:
            return self.forward_forms
        inputs = [i for i in self.case.inputs if i.name in self.operator.differentiable]
        return tuple(TensorForm(i.shape, getattr(torch, i.dtype), None) for i in inputs)

    @cached_property
    def units(self) -> tuple[torch.dtype, ...]:
        """Dtype whose last place is the unit of each output's tolerance: its own, or a coarser one."""
        own = tuple(form.dtype for form in self.forms)
        coarser = dict(self.operator.gradient_units)
        if self.direction == FORWARD or not coarser:
            return own
        dtype_of = {i.name: getattr(torch, i.dtype) for i in self.case.inputs}
        names = [n for n in dtype_of if n in self.operator.differentiable]
        pairs = [(d, dtype_of[coarser.get(n, n)]) for n, d in zip(names, own, strict=True)]
        return tuple(max(pair, key=lambda d: torch.finfo(d).eps) for pair in pairs)

    @property
    def call_spec(self) -> CallSpec:
        """Specification of the call for a candidate; it holds no answer."""
        grad_form = None if self.direction == FORWARD else self.grad_form
        return CallSpec(
            operator=self.operator,
            case=self.case,
            direction=self.direction,
            device=self.device,
            output_forms=self.forms,
            grad_form=grad_form,
        )

    def answer(self, seed: int) -> tuple[torch.Tensor, ...]:
        """Return the float64 outputs (forward) or gradients (backward) for this seed."""
        if seed in self._answers:
            return self._answers[seed]
        with part("answer in float64"):
            return self._compute_answer(seed)

    def _compute_answer(self, seed: int) -> tuple[torch.Tensor, ...]:
        x, grad = list(self.inputs(seed)), self.grad(seed)
        answer: tuple[torch.Tensor, ...]
        if grad is None:
            rows = self._rows(x)
            answer = (
                rows.whole(x) if rows else tuple(tensors_of(forward_in_float64(self.operator, x, self.case)))
            )
        else:
            answer = gradients_in_float64(self.operator, x, grad, self.case)
        size = sum(t.numel() * t.element_size() for t in answer)
        if size <= min(self._cache_bytes_left, LARGEST_CACHED[torch.device(self.device).type]):
            self._cache_bytes_left -= size
            self._answers[seed] = answer
        return answer

    def _rows(self, x: Sequence[torch.Tensor]) -> RowReference | None:
        """Return how this reference is computed by rows; None if it is not."""
        if self.may_split and self._row_reference is None:
            self._row_reference = row_reference(self.operator, x, self.case)
            self.may_split = self._row_reference is not None
        return self._row_reference if self.may_split else None

    def errors(
        self,
        seed: int,
        outputs: Sequence[torch.Tensor],
        bounds: Sequence[Bound] | None = None,
        share: float = 1.0,
    ) -> list[Measured]:
        """Measure the error of each output at this seed, less what ``bounds`` allow an element itself.

        Of answers that are computed by rows, a random ``share`` is measured.
        """
        return self._compare(seed, outputs, bounds, share)[0]

    def _compare(
        self,
        seed: int,
        outputs: Sequence[torch.Tensor],
        bounds: Sequence[Bound] | None = None,
        share: float = 1.0,
    ) -> tuple[list[Measured], list[Moments] | None]:
        """Return the errors, and the moments of the answers where those were computed by rows."""
        with part("comparison"):
            return self._measure_errors(seed, outputs, bounds or [None] * len(outputs), share)

    def _measure_errors(
        self,
        seed: int,
        outputs: Sequence[torch.Tensor],
        limits: Sequence[Bound | None],
        share: float,
    ) -> tuple[list[Measured], list[Moments] | None]:
        x = self.inputs(seed) if self.may_split else []
        rows = self._rows(x) if x else None
        if rows is None or rows.mean:
            del x
            answers, terms = self.answer(seed), self.terms(seed)
            slices = [
                n if o.shape == a.shape else None
                for n, o, a in zip(self.local.layouts, outputs, answers, strict=False)
            ]
            pairs = [torch.broadcast_tensors(o, a) for o, a in zip(outputs, answers, strict=True)]
            columns = zip(pairs, limits, terms, slices, strict=True)
            return [measure(o, a, b, t, n) for (o, a), b, t, n in columns], None
        result = compare_by_rows(rows, x, outputs, limits, self.local.layouts, share)
        del x
        return_freed_memory()
        return result

    @cached_property
    def bounds(self) -> tuple[Bound, ...]:
        """Bound on each output's error, from the baseline's error over all the seeds."""
        with part("bounds"):
            if self.may_split and (bounds := self._bounds_by_rows()) is not None:
                return bounds
            return self._bounds_of_answers()

    def _bounds_of_whole_answers(self) -> tuple[Bound, ...]:
        """Compute the bounds again: pieces of the rows gave an answer far from the baseline."""
        self.may_split = False
        self._answers.clear()
        return self._bounds_of_answers()

    def _bounds_of_answers(self) -> tuple[Bound, ...]:
        errors: list[list[Measured]] = [[] for _ in self.forms]
        self._errors: dict[int, list[Measured]] = {}  # of the baseline, by seed
        scales = [0.0] * len(self.forms)
        counts = [math.inf] * len(self.forms)
        for seed in self.seeds:
            answers = self.answer(seed)
            # Pooled over the seeds: the largest scale and the largest error, so that one lucky seed of
            # the baseline does not make the bound too tight.
            for i, scale in enumerate(self._scales(seed, answers)):
                scales[i] = max(scales[i], scale)
                counts[i] = min(counts[i], participants(answers[i]))
            outputs, terms = self.baseline_outputs(seed), self.terms(seed)
            slices = self.local.layouts
            self._errors[seed] = [measure(out, answers[i], slices=slices[i]) for i, out in enumerate(outputs)]
            for i, error in enumerate(self._errors[seed]):
                errors[i].append(error)
                if (layout := slices[i]) is not None:
                    sizes = layout.size_sums(answers[i], self.forms[i].dtype, terms[i])
                    self._keep_figures(seed, i, sizes, error)
                if self.may_split and error.rms > DISTRUST * scales[i]:
                    return self._bounds_of_whole_answers()
        for seed in self.further_seeds():
            for i, out in enumerate(self.baseline_outputs(seed)):
                errors[i].append(measure(out, self.answer(seed)[i]))
        tolerance = self.operator.tolerance
        return tuple(
            bound(tolerance, unit, scale, errors[i], counts[i], self.case)
            for i, (unit, scale) in enumerate(zip(self.units, scales, strict=True))
        )

    def _keep_figures(self, seed: int, index: int, sizes: torch.Tensor | None, error: Measured) -> None:
        """Store the baseline's error by slices for :attr:`local`."""
        if sizes is None or error.squares is None:
            return
        floor: float | torch.Tensor = 0.0
        grad = self.grad(seed)
        if self.operator.path_scale is not None:
            floor = self._path_scales(seed, index, grad)
        elif self.direction == FORWARD and self.operator.scale is not None:
            scale = self.operator.scale(*doubles(self.inputs(seed)), **self.case.params)
            floor = rms(torch.as_tensor(scale, dtype=torch.float64))
        elif grad is not None:
            floor = self._least_gradient(grad, self.forms[index])
        self.local.figures[seed, index] = SliceFigures(sizes, error.squares, floor)

    def _path_scales(self, seed: int, index: int, grad: torch.Tensor | None) -> torch.Tensor:
        """Return the RMS of the operator's path scale in each slice of an output."""
        layout, path = self.local.layouts[index], self.operator.path_scale
        assert layout is not None and path is not None
        wide_grad = None if grad is None else grad.double()
        sizes = path(wide_grad, *doubles(self.inputs(seed)), **self.case.params)
        counts, squares = layout.size_sums(self.answer(seed)[index], self.forms[index].dtype, sizes)
        return (squares / counts.clamp(min=1)).sqrt()

    @staticmethod
    def _least_gradient(grad: torch.Tensor, form: TensorForm) -> float:
        """Return one rounding of the incoming gradient: below it a gradient that cancels is residue."""
        return min(torch.finfo(torch.float32).eps, torch.finfo(form.dtype).eps) * rms(grad.double())

    def _noise(self, seed: int) -> list[tuple[torch.Tensor, ...]] | None:
        """Return answers that are as far from the right one as those of honest code may be.

        None for an answer that is computed by rows, or that does not fit into memory twice.
        """
        if self.may_split:
            return None
        try:
            changed = self._answer_at_changed_inputs(seed, self._longest_step())
            in_float32 = self._answer_in_float32(seed)
        except torch.OutOfMemoryError:
            return None
        return [changed] if in_float32 is None else [changed, in_float32]

    @cached_property
    def baseline_fault(self) -> str:
        """Return how the baseline disagrees with the reference, or an empty string if it does not.

        The baseline's error sets the tolerance of all others. Its own bound has no baseline: a factor times
        the sum of (1) the tolerance's units in the last place of the case's shortest dtype, at the scale of
        the output, (2) the change of the answer when each input changes by one such unit, (3) the error of
        the reference's own formula in float32, and (4) the change of the gradients when each result that the
        forward stores changes by one rounding. (2) to (4) are the errors of honest code where large numbers
        cancel, in the inputs and on the way. They are computed only where (1) alone is exceeded.
        """
        forward = self.baseline.forward
        # A judged problem's reference in its own dtype, or a file's without an eager: one formula with the
        # oracle, however badly it rounds.
        if self.baseline.name != self.operator.tolerance.baseline or hasattr(forward, "computes_reference"):
            return ""
        eps = self._longest_step()
        factor = ROUNDINGS_FLOAT32 if eps <= torch.finfo(torch.float32).eps else ROUNDINGS_SHORT
        chain = self.operator.tolerance.chain_at(self.case) * torch.finfo(torch.float32).eps
        unit = self.operator.tolerance.ulps * eps + chain
        for seed in self.seeds:
            limits = [unit * bound.scale for bound in self.bounds]
            if all(e.maximum <= factor * n for e, n in zip(self._errors[seed], limits, strict=True)):
                continue
            try:
                fault = self._fault_at(seed, eps, unit, factor)
            except torch.OutOfMemoryError:
                return ""  # of the second reference, at a huge case: the smaller cases show a fault as well
            if fault:
                return fault
        return ""

    def _fault_at(self, seed: int, eps: float, unit: float, factor: float) -> str:
        """Return the baseline's fault at one seed, with elements far above the scale judged by their own."""
        honest = [self._answer_at_changed_inputs(seed, eps)]
        # A float64 baseline may not round so.
        if (
            eps >= torch.finfo(torch.float32).eps
            and (in_float32 := self._answer_in_float32(seed)) is not None
        ):
            honest.append(in_float32)
        stored = self._gradients_at_changed_results(seed)
        columns = (self.baseline_outputs(seed), self.answer(seed), self.terms(seed), self.bounds)
        for i, (out, answer, terms, usual) in enumerate(zip(*columns, strict=True)):
            if not out.is_floating_point():
                continue
            own = replace(usual, own=factor * unit)
            error = measure(out, answer, own, terms)
            rounding = unit * usual.scale + max(measure(h[i], answer, own, terms).maximum for h in honest)
            if stored is not None:
                rounding += measure(stored[1][i], stored[0][i].double(), own, terms).maximum
            if error.maximum > factor * rounding:
                index, got, expected = error.worst
                direction = "output" if self.direction == FORWARD else "gradient"
                return (
                    f"the baseline {self.baseline.name!r} disagrees with the reference: error "
                    f"{error.maximum:.3g} at element {index} of {direction} {i} of case {self.case.name} "
                    f"(got {got:.6g}, expected {expected:.6g}, seed {seed}), over {factor:g} times what "
                    f"rounding explains; fix {self._baseline_sources()} first"
                )
        return ""

    def _longest_step(self) -> float:
        """Return the largest machine epsilon of the case: of its inputs, its outputs, and of tf32.

        Inputs of 8 bits do not count: their values are exact, and no honest code rounds to their dtype again.
        """
        inputs = [getattr(torch, i.dtype) for i in self.case.inputs if i.dtype not in FLOAT8]
        dtypes = inputs + [form.dtype for form in self.forms]
        steps = [torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point]
        return max([*steps, *([EPS_TF32] if "tf32" in self.case.params.values() else [])], default=0.0)

    def _answer_at_changed_inputs(self, seed: int, eps: float) -> tuple[torch.Tensor, ...]:
        """Return the answer where each element of each input is changed by up to ``eps`` of itself."""
        x, grad = self.inputs(seed), self.grad(seed)
        generator = torch.Generator(x[0].device)
        generator.manual_seed(seed)

        def change(t: torch.Tensor) -> torch.Tensor:
            if not t.is_floating_point():
                return t
            noise = torch.rand(t.shape, generator=generator, dtype=torch.float64, device=t.device)
            return t.double() * (1.0 + eps * (2.0 * noise - 1.0))

        x = [change(t) for t in x]
        if grad is None:
            return tuple(tensors_of(forward_in_float64(self.operator, x, self.case)))
        return gradients_in_float64(self.operator, x, change(grad), self.case)

    def _gradients_at_changed_results(self, seed: int) -> tuple[Sequence[torch.Tensor], ...] | None:
        """Return the baseline's gradients, and those where each stored result changes by one rounding.

        None where the forward stores nothing for the backward. A log-sum-exp of 14,000 is stored in float32
        with an error of up to 0.0005, which no change of the logits shows where one of them dominates.
        """
        grad, x = self.grad(seed), self.inputs(seed)
        if grad is None or (backward := self.baseline.backward) is None:
            return None
        params = dict(self.case.params)
        saved = self.operator.saved(tuple(x), self.baseline.forward(*x, **params), params)
        own = {id(t) for t in x}
        generator = torch.Generator(grad.device)
        generator.manual_seed(seed)

        def change(t: Any) -> Any:
            if id(t) in own or not isinstance(t, torch.Tensor) or not t.is_floating_point():
                return t
            sign = torch.randint(2, t.shape, generator=generator, device=t.device) * 2 - 1
            return (t.double() * (1.0 + torch.finfo(t.dtype).eps * sign)).to(t.dtype)

        grads = split_gradients(self.operator, grad)
        return backward(*grads, *saved, **params), backward(*grads, *map(change, saved), **params)

    def _answer_in_float32(self, seed: int) -> tuple[torch.Tensor, ...] | None:
        """Return the answer by the reference's formula in float32; None if torch cannot compute it so."""
        x, grad = self.inputs(seed), self.grad(seed)
        try:
            if grad is not None:
                return gradients_in(torch.float32, self.operator, x, grad, self.case)
            with torch.no_grad():
                return tuple(tensors_of(self.operator.reference(*cast(x, torch.float32), **self.case.params)))
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError):  # a reference written for float64 alone
            return None

    def _baseline_sources(self) -> str:
        if self.operator.name not in registry.operator_names():
            return "the reference or the function of the baseline"
        return f"spec.py's reference or with_{self.baseline.backend}.py"

    def _bounds_by_rows(self) -> tuple[Bound, ...] | None:
        """Return the bounds with answers that are never whole; None if the reference is not computed so.

        The baseline is close to the right answer at every size. Where it is not, the rows depend on
        each other in a way that few rows do not show, and the whole reference is computed.
        """
        errors: list[list[Measured]] = [[] for _ in self.forms]
        scales, counts = [0.0] * len(self.forms), [math.inf] * len(self.forms)
        for seed in self.seeds:
            outputs = self.baseline_outputs(seed)
            measured, moments = self._compare(seed, outputs)
            if moments is None:
                return None
            for i, (error, moment) in enumerate(zip(measured, moments, strict=True)):
                if error.misplaced or error.rms > DISTRUST * moment.rms:
                    self.may_split = False
                    return None
                errors[i].append(error)
                self._keep_figures(seed, i, moment.sizes, error)
                scales[i] = max(scales[i], moment.rms)
                counts[i] = min(counts[i], moment.participants)
        return tuple(
            bound(self.operator.tolerance, unit, scale, e, count, self.case)
            for unit, scale, e, count in zip(self.units, scales, errors, counts, strict=True)
        )

    def further_seeds(self) -> tuple[int, ...]:
        """Return more seeds for the baseline's error, where the answer is small.

        The error of a single element may be 0 by luck, and so may an error that all elements of a
        row share, such as the rounding of its norm. The seeds follow from the first seed, so that a
        verdict can be repeated.
        """
        sizes = [size for form in self.forms if (size := math.prod(form.shape))]
        input_size = max(i.numel for i in self.case.inputs)
        if sizes and input_size <= SMALL_INPUT:
            total = min(-(-ENOUGH_ELEMENTS // max(sizes)), MAX_SEEDS)
        elif sizes and input_size <= MEDIUM_INPUT and min(sizes) <= FEW_ELEMENTS:
            total = MAX_SEEDS
        else:
            return ()
        generator = random.Random(self.seeds[0])  # not the global one: the candidate may seed that
        return tuple(generator.randrange(1 << 31) for _ in range(total - len(self.seeds)))

    def terms(self, seed: int) -> tuple[torch.Tensor | None, ...]:
        """Return the sizes of each gradient's terms before they cancel, or None for each output."""
        grad = self.grad(seed)
        if grad is None or self.operator.gradient_scale is None:
            return (None,) * len(self.forms)
        arguments = (grad.double(), *doubles(self.inputs(seed)))
        terms = self.operator.gradient_scale(*arguments, **self.case.params)
        return terms if isinstance(terms, tuple) else (terms,)

    def _scales(self, seed: int, answers: tuple[torch.Tensor, ...]) -> list[float]:
        if self.direction == FORWARD and self.operator.scale is not None:
            scale = self.operator.scale(*doubles(self.inputs(seed)), **self.case.params)
            return [rms(torch.as_tensor(scale, dtype=torch.float64))] * len(answers)
        grad = self.grad(seed)
        if grad is None:
            return [rms(a) for a in answers]
        # Where all gradients nearly cancel (a softmax that is one-hot), their own RMS measures nothing.
        scales = []
        for answer, terms, form in zip(answers, self.terms(seed), self.forms, strict=True):
            if terms is not None:
                scales.append(max(rms(answer), rms(terms)))
                continue
            scales.append(max(rms(answer), self._least_gradient(grad, form)))
        return scales

    def baseline_outputs(self, seed: int) -> tuple[torch.Tensor, ...]:
        """Return the outputs of the implementation that sets the tolerance."""
        x, grad = self.inputs(seed), self.grad(seed)
        return tuple(tensors_of(bind(self.operator, self.baseline, self.case, self.direction, x, grad)()))


class _LeadingOracle(Oracle):
    """View of an oracle with the first ``count`` outputs of a forward alone."""

    def __init__(self, whole: Oracle, count: int) -> None:
        vars(self).update(vars(whole))
        self.whole, self.count = whole, count

    @property
    def forms(self) -> tuple[TensorForm, ...]:  # type: ignore[override]  # cached there
        return self.whole.forms[: self.count]

    @property
    def bounds(self) -> tuple[Bound, ...]:  # type: ignore[override]  # cached there
        return self.whole.bounds[: self.count]

    @property
    def local(self) -> LocalJudge:  # type: ignore[override]  # cached there
        return self.whole.local

    @property
    def baseline_fault(self) -> str:  # type: ignore[override]  # cached there
        return self.whole.baseline_fault

    def answer(self, seed: int) -> tuple[torch.Tensor, ...]:
        return self.whole.answer(seed)[: self.count]

    def terms(self, seed: int) -> tuple[torch.Tensor | None, ...]:
        return self.whole.terms(seed)[: self.count]


def for_outputs(oracle: Oracle, implementation: Implementation) -> Oracle:
    """Return the oracle for as many outputs as an implementation declares that it returns."""
    if implementation.outputs is None or oracle.direction != FORWARD:
        return oracle
    return _LeadingOracle(oracle, implementation.outputs)


def _cache_budget(device: str) -> int:
    """Return the bytes of answers worth caching: an eighth of a GPU's memory, 1 GiB of a host's."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_properties(torch.device(device)).total_memory // 8
    return 1 << 30
