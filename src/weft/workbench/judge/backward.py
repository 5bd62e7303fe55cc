"""Gradients of a problem: an operator whose outputs are the gradients of inputs and parameters.

The gradients are judged as outputs of a problem of their own. Its inputs are the problem's inputs and
an incoming gradient for each differentiable output; one call is a forward and a backward. Parameters
are no inputs of a case and outputs may differ in shape, so an operator's ``differentiable`` inputs do
not suffice. The oracle is autograd through the reference in float64; the error of autograd through
the reference in its own dtype sets the tolerance, by the rule of :mod:`weft.workbench.check`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from weft.core import Case, Cost, Finding, Implementation, Input, Operator, Verdict, WeftError
from weft.workbench.calls.buffers import tensors_of
from weft.workbench.calls.inputs import gradient_like
from weft.workbench.judge.data_template import output_tensors
from weft.workbench.judge.problem import (
    Compute,
    Generator,
    Problem,
    ProblemCase,
    ReferenceBehavior,
    error_line,
    sum_tolerance,
)
from weft.workbench.judge.torch_modes import cuda_on_cpu
from weft.workbench.judge.variation import preserved_rng

Tensors = Sequence[torch.Tensor]
_RAISED = "returns: raised MissingGradient: "


class MissingGradient(RuntimeError):
    """An output or a gradient that the reference has and the candidate's autograd graph has not."""


def _no_parameters(case: ProblemCase) -> Mapping[str, torch.Tensor]:
    return {}


@dataclass(frozen=True, kw_only=True)
class Differentiable:
    """A file's function of its data, and its parameters at the weights of a case, by name."""

    compute: Compute
    parameters: Callable[[ProblemCase], Mapping[str, torch.Tensor]] = _no_parameters


@dataclass(frozen=True, kw_only=True)
class GradientSpec:
    """Gradients to compare: plain data, which a worker can be sent.

    ``outputs`` are the index, shape and dtype of each output that has a gradient function in the
    reference; ``inputs`` are the indexes of the inputs that get a gradient; ``parameters`` are the
    shapes of such parameters by name.
    """

    outputs: Sequence[tuple[int, Sequence[int], str]]
    inputs: Sequence[int]
    parameters: Mapping[str, Sequence[int]]

    def incoming(self) -> tuple[Input, ...]:
        """Return the description of the incoming gradients, which are inputs of the operator."""
        several = len(self.outputs) > 1
        return tuple(
            Input(name=f"grad[{n}]" if several else "grad", shape=tuple(shape), dtype=dtype)
            for n, (_, shape, dtype) in enumerate(self.outputs)
        )


# -- one call: forward and backward -------------------------------------------------------------


def gradients(
    function: Differentiable,
    spec: GradientSpec,
    case: ProblemCase,
    tensors: Tensors,
    context: Any = None,
    float64: bool = False,
    keys: Mapping[str, Sequence[str]] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Return the gradients at the case's inputs, which ``tensors`` holds before the incoming gradients.

    ``keys`` are the reference's, if it returns dictionaries.
    Raises :class:`MissingGradient` if the function's graph does not reach one of them.
    """
    assert case.template is not None
    count = len(case.template.inputs)
    inputs, incoming = tensors[:count], tensors[count:]
    with torch.enable_grad():
        # New tensor objects in the same memory, so that the caller's inputs do not require gradients.
        leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
        with context or nullcontext():
            data, _ = case.template.build(leaves, float64=float64)
            outputs = tensors_of(output_tensors(function.compute(data, case), keys=keys))
        weights = function.parameters(case)
        targets = [leaves[n] for n in spec.inputs] + [weights[n] for n in spec.parameters]
        names = gradient_names(spec, case.template.inputs)
        _require_graph(outputs, targets, names, spec)
        differentiable = [outputs[index] for index, _, _ in spec.outputs]
        # An unused target is named by `_plain_gradient`; autograd's own error would not say which it is.
        results = torch.autograd.grad(differentiable, targets, incoming, allow_unused=True)
    return tuple(
        _plain_gradient(result, name, [*inputs, *incoming])
        for result, name in zip(results, names, strict=True)
    )


def _require_graph(outputs: Tensors, targets: Tensors, names: Sequence[str], spec: GradientSpec) -> None:
    if len(outputs) <= max(index for index, _, _ in spec.outputs):
        raise RuntimeError(f"{len(outputs)} outputs, fewer than the reference's")
    for index, _, _ in spec.outputs:
        if not isinstance(outputs[index], torch.Tensor) or not outputs[index].requires_grad:
            raise MissingGradient(
                f"output {index} has no gradient function, so every gradient is None; a kernel needs a "
                "torch.autograd.Function around it"
            )
    for target, name in zip(targets, names, strict=True):
        if not target.requires_grad:
            raise MissingGradient(f"{name} is None: it does not require grad")


def _plain_gradient(result: torch.Tensor | None, name: str, sources: Tensors) -> torch.Tensor:
    """Return a dense gradient in memory of its own: autograd may return the incoming one itself."""
    if result is None:
        raise MissingGradient(f"{name} is None, the reference's is not: is it detached?")
    dense = result.to_dense() if result.layout is not torch.strided else result
    dense = dense.detach().contiguous()
    storage = dense.untyped_storage().data_ptr()
    shared = any(storage == s.untyped_storage().data_ptr() for s in sources)
    return dense.clone() if shared else dense


def gradient_names(spec: GradientSpec, inputs: Sequence[Input]) -> list[str]:
    """Return the names of the gradients in order: of the inputs, then of the parameters."""
    return [
        *(f"gradient of {inputs[n].name}" for n in spec.inputs),
        *(f"gradient of parameter {name}" for name in spec.parameters),
    ]


def match_parameters(
    own: Mapping[str, torch.Tensor], shapes: Mapping[str, Sequence[int]]
) -> dict[str, torch.Tensor]:
    """Return the parameter in ``own`` for each of the reference's that has one.

    A parameter of the same name and shape matches; otherwise the only one of that shape, if no other
    parameter of the reference without a namesake has it.
    """
    matched = {n: own[n] for n, s in shapes.items() if n in own and tuple(own[n].shape) == tuple(s)}
    free = {n: p for n, p in own.items() if n not in matched}
    open_shapes = {n: tuple(s) for n, s in shapes.items() if n not in matched}
    for name, shape in open_shapes.items():
        same_shape = [p for p in free.values() if tuple(p.shape) == shape]
        if len(same_shape) == 1 and list(open_shapes.values()).count(shape) == 1:
            matched[name] = same_shape[0]
    return {n: matched[n] for n in shapes if n in matched}


# -- operator and implementations ----------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class GradientFamily:
    """Everything that the reference and a candidate share: cases, generator, behavior and spec."""

    name: str
    cases: Sequence[ProblemCase]
    generator: Generator
    behavior: ReferenceBehavior
    spec: GradientSpec

    def operator(self, reference: Differentiable | None) -> Operator:
        """Return the operator; a worker makes it without a reference."""
        by_name = {c.name: c for c in self.cases}
        generator, spec = self.generator, self.spec

        def float64_gradients(*tensors: torch.Tensor, point: str) -> tuple[torch.Tensor, ...]:
            assert reference is not None, "a worker process has no reference"
            context = generator.call_context(self.behavior)
            return gradients(reference, spec, by_name[point], tensors, context, float64=True)

        def draw(case: Case, seed: int, device: str) -> list[torch.Tensor]:
            inputs = generator.inputs(by_name[str(case.params["point"])], seed, device)
            for n, form in enumerate(spec.incoming()):
                output = torch.empty(form.shape, dtype=getattr(torch, form.dtype), device="meta")
                # Another seed for each: with equal incoming gradients a candidate could swap them unnoticed.
                inputs.append(gradient_like(output, seed + n, device=device))
            return inputs

        def cost(case: Case, direction: str) -> Cost:
            return Cost(read=sum(i.nbytes for i in case.inputs), written=0)

        inputs = self.inputs(self.cases[0])
        return Operator(
            name=self.name,
            reference=float64_gradients,
            cases=tuple(
                Case(
                    name=c.name,
                    inputs=(*self.inputs(c), *spec.incoming()),
                    params={"point": c.name},
                    tags=c.tags,
                )
                for c in self.cases
            ),
            cost=cost,
            summary="gradients of a file's function",
            draw=draw,
            tolerance=sum_tolerance(self._longest_sum()),
            output_names=tuple(gradient_names(spec, inputs)),
        )

    @staticmethod
    def inputs(case: ProblemCase) -> tuple[Input, ...]:
        assert case.template is not None
        return case.template.inputs

    def _longest_sum(self) -> int:
        """Return an upper estimate of the terms of one chain of a gradient's sum, as in the forward."""
        inputs = self.inputs(self.cases[0])
        sizes = [i.numel for i in (*inputs, *self.spec.incoming())]
        shapes = [inputs[n].shape for n in self.spec.inputs]
        shapes += [tuple(s) for s in self.spec.parameters.values()]
        smallest = max(1, min(math.prod(s) for s in shapes))
        rows = [n for i in self.spec.incoming() for n in i.shape]
        return max([self.behavior.longest_sum, *rows, *(n // smallest // 10 for n in sizes)])

    def implementation(
        self,
        operator: Operator,
        name: str,
        function: Differentiable,
        backend: str = "eager",
        deterministic: bool = True,
    ) -> Implementation:
        """Return the forward and backward of a function as an implementation."""
        by_name = {c.name: c for c in self.cases}

        def forward(*tensors: torch.Tensor, point: str) -> tuple[torch.Tensor, ...] | torch.Tensor:
            context = self.generator.call_context(self.behavior)
            results = gradients(
                function, self.spec, by_name[point], tensors, context, keys=self.behavior.keys
            )
            return results[0] if len(results) == 1 else results

        return Implementation(
            operator=operator.name,
            name=name,
            backend=backend,
            forward=forward,
            directions=("forward",),
            deterministic=deterministic and self.behavior.repeatable,
        )


# -- in the judge's process ----------------------------------------------------------------------


def gradient_problem(
    problem: Problem,
    cases: Sequence[ProblemCase],
    generator: Generator,
    behavior: ReferenceBehavior,
    native: Differentiable,
    float64: Differentiable,
) -> Problem:
    """Return the problem of a problem's gradients.

    Its ``for_parameters`` returns it for those parameters that a candidate has. Raises
    :class:`WeftError` if the reference has no gradient or overwrites its inputs.
    """
    if behavior.in_place or behavior.buffers:
        raise WeftError(
            "--backward",
            expected="a reference that returns its output and overwrites nothing",
            got=f"{problem.path.name} writes into its inputs",
        )
    spec = _observe_gradients(problem, cases[0], generator, behavior, native, float64)

    def for_parameters(names: Collection[str]) -> Problem:
        parameters = {n: s for n, s in spec.parameters.items() if n in names}
        family = GradientFamily(
            name=problem.operator.name,
            cases=cases,
            generator=generator,
            behavior=behavior,
            spec=replace(spec, parameters=parameters),
        )
        operator = family.operator(float64)
        missing = [n for n in spec.parameters if n not in parameters]
        return replace(
            problem,
            operator=operator,
            baseline=family.implementation(operator, "reference", native),
            own_check=None,
            for_parameters=for_parameters,
            not_compared=tuple(f"parameter {n}" for n in missing),
            extra={**problem.extra, "gradients": asdict(spec)},
        )

    return for_parameters(list(spec.parameters))


def _observe_gradients(
    problem: Problem,
    case: ProblemCase,
    generator: Generator,
    behavior: ReferenceBehavior,
    native: Differentiable,
    float64: Differentiable,
) -> GradientSpec:
    """Run the reference's backward once in each precision and describe its gradients."""
    assert case.template is not None
    with preserved_rng():
        tensors = generator.inputs(case, 0, problem.extra["device"])
        spec = _reached_gradients(problem, case, generator, behavior, native, tensors)
        incoming = [torch.ones(i.shape, dtype=getattr(torch, i.dtype)) for i in spec.incoming()]
        wide = [t.double() if t.is_floating_point() else t for t in tensors]
        wide += [g.to(tensors[0].device).double() for g in incoming]
        context = generator.call_context(behavior)
        try:
            gradients(float64, spec, case, wide, context, float64=True)
        except Exception as error:
            got = error_line(error)
            raise WeftError("the reference's backward cannot be run in float64", got=got) from error
    return spec


def _reached_gradients(
    problem: Problem,
    case: ProblemCase,
    generator: Generator,
    behavior: ReferenceBehavior,
    native: Differentiable,
    tensors: Tensors,
) -> GradientSpec:
    assert case.template is not None
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in tensors]
    try:
        with torch.enable_grad():
            with cuda_on_cpu() if generator.cuda_on_cpu else nullcontext():
                data, _ = case.template.build(leaves)
                outputs = tensors_of(output_tensors(native.compute(data, case)))
            weights = native.parameters(case)
            candidates = {n: x for n, x in enumerate(leaves) if x.requires_grad}
            trainable = {n: p for n, p in weights.items() if p.requires_grad}
            differentiable = [(n, o) for n, o in enumerate(outputs) if o.requires_grad]
            targets = [*candidates.values(), *trainable.values()]
            results: Sequence[torch.Tensor | None] = [None] * len(targets)
            if differentiable and targets:
                grads = [torch.ones_like(o) for _, o in differentiable]
                results = torch.autograd.grad(
                    [o for _, o in differentiable], targets, grads, allow_unused=True
                )
    except Exception as error:
        raise WeftError("the reference's backward raised", got=error_line(error)) from error
    # Inputs have numbers as keys and parameters names, so none is lost.
    reached = dict(zip([*candidates, *trainable], results, strict=True))
    if all(r is None for r in reached.values()):
        raise WeftError(
            "--backward",
            expected="a reference whose output depends differentiably on an input or a parameter",
            got=f"{problem.path.name}: autograd reaches none",
        )
    return GradientSpec(
        outputs=[(n, list(o.shape), str(o.dtype).removeprefix("torch.")) for n, o in differentiable],
        inputs=[n for n in candidates if reached[n] is not None],
        parameters={n: list(p.shape) for n, p in trainable.items() if reached[n] is not None},
    )


def name_missing_gradient(verdict: Verdict) -> Verdict:
    """Return the verdict with a missing gradient as the finding ``gradient`` in place of ``returns``."""
    if not verdict.reason.startswith(_RAISED):
        return verdict
    why = verdict.reason.removeprefix(_RAISED)
    findings = tuple(
        Finding(check="gradient", status=f.status, detail=why) if f.check == "returns" else f
        for f in verdict.findings
    )
    return replace(verdict, reason=f"gradient: {why}", findings=findings)
