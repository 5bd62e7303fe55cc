"""A problem read from files of another suite: an operator whose oracle is the reference in float64.

Both formats reduce to an input generator, a function of the generated data, and possibly weights. A
:class:`ProblemCase` is one set of the generator's arguments with one set of weights; it becomes a
case of the operator. The judge's process and the worker process build the same cases; in the worker
the function is the candidate's and the reference is not available.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from weft.core import BACKWARD, FORWARD, Case, Cost, Implementation, Operator, Tolerance, WeftError
from weft.core.text import printable
from weft.workbench.calls.buffers import tensors_of
from weft.workbench.calls.guarded_memory import digest
from weft.workbench.judge.data_template import DataTemplate, output_keys, output_tensors, split_data
from weft.workbench.judge.definition import NotSupported
from weft.workbench.judge.torch_modes import cuda_generators_on_cpu, cuda_on_cpu
from weft.workbench.judge.variation import (
    can_vary,
    count_special,
    is_partly_equal,
    is_taken,
    preserved_rng,
    seed_generators,
    vary,
)

Data = Any
Digest = tuple[int, int]
Compute = Callable[[Data, "ProblemCase"], Any]  # a file's function, at the weights of a case
_set_grad_enabled = torch._C._set_grad_enabled
OwnCheckFunction = Callable[[Case, int, Any], tuple[bool, str]]


@dataclass(frozen=True, kw_only=True)
class ProblemCase:
    """Arguments of a problem's generator, and the seed of the weights if the model has any."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    weights_seed: int | None = None
    tags: frozenset[str] = frozenset({"check"})
    template: DataTemplate | None = None


@dataclass(frozen=True, kw_only=True)
class ReferenceBehavior:
    """Behavior of a reference, observed by running it: plain data, which a worker can be sent.

    ``buffers`` are the indexes of tensors that the reference only writes to. ``in_place`` are the
    names of tensors that it reads and then overwrites. ``random``: it uses random numbers.
    ``repeatable``: the same data and random numbers give the same bits. ``longest_sum`` is an upper
    estimate of the number of terms in one of its sums. ``output_bytes`` are the bytes of its outputs.
    ``keys`` are the keys of its dictionaries, by which a candidate's are read.
    ``varied`` are the indexes of constant tensors that get other values at each seed, by case.
    """

    buffers: Sequence[int] = ()
    in_place: Sequence[str] = ()
    random: bool = False
    repeatable: bool = True
    longest_sum: int = 1
    output_bytes: int = 0
    keys: Mapping[str, Sequence[str]] = field(default_factory=dict)
    varied: Mapping[str, Sequence[int]] = field(default_factory=dict)

    @property
    def splits_rows(self) -> bool:
        """True if the reference may be computed for some rows at a time, where that proves equal."""
        return self.repeatable and not (self.random or self.buffers or self.in_place)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A reference to judge candidates by. ``baseline`` is its function in its own dtype.

    ``own_check(case, seed, output)`` applies the check of the file, or of its format, to an output;
    ``own_seed`` is the seed for it; gradients have no such check. ``extra`` is sent to the worker;
    ``notes`` go to the user; ``nbytes`` are the bytes of inputs, outputs and weights of the largest case.
    In a problem of gradients ``for_parameters`` returns it for the parameters that a candidate has, and
    ``not_compared`` names the gradients that are left out. ``constant`` names inputs that are the same at
    every seed: no time is measured at them.
    """

    kind: str
    path: Path
    operator: Operator
    baseline: Implementation
    own_check: OwnCheckFunction | None
    own_seed: int
    own_rule: str
    extra: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    nbytes: int = 0
    for_parameters: Callable[[Collection[str]], Problem] | None = None
    not_compared: tuple[str, ...] = ()
    constant: tuple[str, ...] = ()

    @property
    def direction(self) -> str:
        return BACKWARD if self.for_parameters else FORWARD


@dataclass(frozen=True, kw_only=True)
class Generator:
    """Input generator of a file: ``generate(case, seed)`` returns data whose elements have ``names``.

    ``cuda_on_cpu`` is true if the file names a GPU and is judged on the CPU. ``device`` is where
    tensors are created that name no device; '' leaves the host. ``varied`` is the behavior's.
    ``seen_digests`` are digests of the inputs by case and seed, None for a seed that was drawn twice; without
    it nothing is compared.
    """

    generate: Callable[[ProblemCase, int], Data]
    names: Sequence[str] = ()
    cuda_on_cpu: bool = False
    device: str = ""
    varied: Mapping[str, Sequence[int]] = field(default_factory=dict)
    seen_digests: dict[tuple[str, int], list[Digest] | None] | None = None

    def split(self, case: ProblemCase, seed: int) -> tuple[DataTemplate, list[torch.Tensor]]:
        """Generate data and split it; the states of the random generators are preserved."""
        device = cuda_generators_on_cpu() if self.cuda_on_cpu else nullcontext()
        factories = torch.device(self.device) if self.device else nullcontext()
        with preserved_rng(), torch.no_grad(), device, factories:
            template, tensors = split_data(self.generate(case, seed), self.names)
            for index in self.varied.get(case.name, ()):
                # Plus the index: two masks of one shape differ.
                tensors[index] = vary(tensors[index], seed + index)
            return template, tensors

    def on_gpu(self, case: ProblemCase) -> Generator:
        """Return the generator that creates its tensors on the GPU, where the file allows that.

        Gigabytes of random numbers take seconds on the host and milliseconds there. A file that names
        the CPU, or that returns other contents when asked twice, is left alone.
        """
        generator = replace(self, device="cuda")
        try:
            first = [digest(t) for t in generator.split(case, 1)[1] if t.is_cuda]
            again = [digest(t) for t in generator.split(case, 1)[1] if t.is_cuda]
        except Exception:  # noqa: BLE001 - the file may name a device, or call what a GPU lacks
            return self
        # `first` is empty if the file places every tensor on the CPU.
        return generator if first and first == again else self

    def with_template(self, case: ProblemCase, behavior: ReferenceBehavior) -> ProblemCase:
        """Return the case with the template of its data, from one call of the generator."""
        template, _ = self.split(case, 0)
        template = replace(template, buffers=frozenset(behavior.buffers))
        if not template.inputs:
            raise WeftError(f"the file's generator at {case.name}: no tensor among its data")
        return replace(case, template=template)

    def inputs(self, case: ProblemCase, seed: int, device: str) -> list[torch.Tensor]:
        """Return a seed's inputs on ``device``; raise :class:`WeftError` if their shapes vary."""
        template, tensors = self.split(case, seed)
        expected = _template(case)
        # One case has one set of shapes: bounds, buffers and guards are allocated once for all its seeds.
        if (template.tree, template.tensors) != (expected.tree, expected.tensors):
            raise WeftError(
                f"the file's generator at {case.name}",
                expected="the same shapes, dtypes and plain values for every seed",
                got="others",
            )
        self._compare_draws(case, seed, tensors)
        return [t.to(device) for t in expected.without_buffers(tensors)]

    def _compare_draws(self, case: ProblemCase, seed: int, tensors: Sequence[torch.Tensor]) -> None:
        """Raise :class:`WeftError` if the second draw of a seed differs from the first."""
        key = case.name, seed
        # (): not drawn yet. None: drawn twice and found equal, so that digests are computed no more.
        if self.seen_digests is None or self.seen_digests.get(key, ()) is None:
            return
        digests = [digest(t) for t in tensors]
        first = self.seen_digests.get(key)
        self.seen_digests[key] = digests if first is None else None
        if first is not None:
            _require_same(case, first, digests)

    def call_context(self, behavior: ReferenceBehavior) -> Any:
        """Return the context of a call: fixed random numbers and ``cuda`` as ``cpu`` if needed."""
        return nullcontext() if self.calls_plainly(behavior) else self._call_context(behavior)

    def calls_plainly(self, behavior: ReferenceBehavior) -> bool:
        """Return True if a call needs no context, which would take time inside of each timed call."""
        return not (behavior.random or self.cuda_on_cpu)

    @contextmanager
    def _call_context(self, behavior: ReferenceBehavior) -> Iterator[None]:
        # Reference and candidate draw the same random numbers, in the order of their calls.
        if behavior.random:
            seed_generators(0)
        with cuda_on_cpu() if self.cuda_on_cpu else nullcontext():
            yield


def _template(case: ProblemCase) -> DataTemplate:
    assert case.template is not None
    return case.template


# -- inputs that vary ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Variation:
    """Result of :func:`vary_inputs`: the generator and the behavior to go on with.

    ``constant`` names the inputs that stay constant although values decide there; ``notes`` tell the user.
    """

    generator: Generator
    behavior: ReferenceBehavior
    constant: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def vary_inputs(
    native: Compute,
    cases: Sequence[ProblemCase],
    generator: Generator,
    behavior: ReferenceBehavior,
    device: str,
    same_data: bool = False,
    given_integers: bool = False,
    without: Collection[str] = (),
) -> Variation:
    """Find the inputs that are the same at every seed, and vary those that the reference takes so.

    From here on the generator compares the draws of each seed. Integers are never varied: an index or
    a length may have one right value. Several of them count as constant, for an answer may be made for
    them, and so does an input that varies in part; with ``given_integers``, where a workload gives them,
    and for one integer alone only where no input varies. With ``same_data`` all cases have the data of
    the first; ``without`` "constants" nothing is varied. Raises :class:`WeftError` for a generator whose
    draws differ at one seed.
    """
    if "constants" in without:
        return Variation(generator=replace(generator, seen_digests={}), behavior=behavior)
    varied: dict[str, list[int]] = {}
    taken: dict[str, bool] = {}
    same: dict[str, None] = {}
    in_part: dict[str, None] = {}
    constant: dict[str, None] = {}
    for case in cases[:1] if same_data else cases:
        names = [i.name for i in _template(case).tensors]
        unvaried, partly, tensors = _unvaried(case, generator, case is cases[0])
        same |= dict.fromkeys(names[n] for n in unvaried)
        for n in (n for n in unvaried if can_vary(tensors[n])):
            if names[n] not in taken:
                run = partial(_run_varied, native, case, generator, behavior, device)
                # One answer for all cases, since each question costs runs of the reference.
                taken[names[n]] = is_taken(partial(run, [n]), count_special(run([])))
            if taken[names[n]]:
                varied.setdefault(case.name, []).append(n)
            else:
                constant[names[n]] = None
        if not given_integers:
            several = [n for n in unvaried if not can_vary(tensors[n]) and tensors[n].numel() > 1]
            constant |= dict.fromkeys(names[n] for n in (*several, *partly))
            in_part |= dict.fromkeys(names[n] for n in partly)
        if len(unvaried) == len(_template(case).inputs) and case.name not in varied:
            constant |= dict.fromkeys(names[n] for n in unvaried)
    if same_data and varied:
        varied = {c.name: varied[cases[0].name] for c in cases}
    changed = [name for name, is_varied in taken.items() if is_varied]
    remarks = [f"the same at every seed: {', '.join(same)}"] if same else []
    remarks += [f"the same at every seed in part: {', '.join(in_part)}"] if in_part else []
    remarks += [f"given other values at each seed: {', '.join(changed)}"] if changed else []
    return Variation(
        # Empty, not None: from here on the draws of a seed are compared.
        generator=replace(generator, varied=varied, seen_digests={}),
        behavior=replace(behavior, varied=varied),
        constant=tuple(constant),
        notes=("; ".join(remarks),) if remarks else (),
    )


def _unvaried(
    case: ProblemCase, generator: Generator, is_first: bool
) -> tuple[list[int], list[int], list[torch.Tensor]]:
    """Return the indexes of inputs that are the same at two seeds, whole and in part, and the tensors."""
    tensors = generator.split(case, 0)[1]
    digests = [digest(t) for t in tensors]
    if is_first:  # each seed that is judged at is compared when it is drawn
        _require_same(case, digests, [digest(t) for t in generator.split(case, 0)[1]])
    others = generator.split(case, 1)[1]
    read = [n for n, t in enumerate(tensors) if t.numel() and n not in _template(case).buffers]
    same = [n for n in read if digests[n] == digest(others[n])]
    partly = [n for n in read if n not in same and is_partly_equal(tensors[n], others[n])]
    return same, partly, tensors


def _require_same(case: ProblemCase, first: Sequence[Digest], again: Sequence[Digest]) -> None:
    """Raise :class:`WeftError` if two draws of one seed differ in more than the buffers."""
    template = _template(case)
    rows = enumerate(zip(template.tensors, first, again, strict=True))
    names = [i.name for n, (i, a, b) in rows if a != b and n not in template.buffers]
    if names:
        raise WeftError(
            f"the file's generator at {case.name}",
            expected="the same values for the same seed",
            got=f"others at the second call with it: {', '.join(names)}",
            hint="torch, numpy and random are seeded before each call; a generator of the file's own must "
            "be created in each call and seeded from one of these",
        )


def _run_varied(
    native: Compute,
    case: ProblemCase,
    generator: Generator,
    behavior: ReferenceBehavior,
    device: str,
    varied: Sequence[int],
) -> Sequence[torch.Tensor]:
    """Return the reference's outputs at one seed with these tensors varied."""
    template, tensors = replace(generator, varied={case.name: varied}).split(case, 1)
    with preserved_rng(), torch.no_grad(), generator.call_context(behavior):
        data, _ = template.build([t.to(device) for t in tensors])
        return tensors_of(output_tensors(native(data, case), tensors))


# -- operator and implementations --------------------------------------------------------------


def make_operator(
    name: str,
    cases: Sequence[ProblemCase],
    generator: Generator,
    behavior: ReferenceBehavior,
    float64_reference: Compute | None,
    weight_bytes: int = 0,
) -> Operator:
    """Return the operator with these cases; a worker makes it without a reference."""
    by_name = {c.name: c for c in cases}

    def reference(*inputs: torch.Tensor, point: str) -> Any:
        assert float64_reference is not None, "a worker process has no reference"
        case = by_name[point]
        with torch.no_grad(), generator.call_context(behavior):
            data, buffers = _template(case).build(inputs, float64=True)
            output = output_tensors(float64_reference(data, case), buffers)
        if output is not None:
            return output
        # It returned nothing: its output is the inputs that it overwrote.
        names = [i.name for i in _template(case).inputs]
        pairs = zip(inputs, names, strict=True)
        return output_tensors(tuple(x for x, n in pairs if n in behavior.in_place))

    def draw(case: Case, seed: int, device: str) -> list[torch.Tensor]:
        return generator.inputs(by_name[str(case.params["point"])], seed, device)

    def cost(case: Case, direction: str) -> Cost:
        return Cost(read=sum(i.nbytes for i in case.inputs) + weight_bytes, written=0)

    return Operator(
        name=name,
        reference=reference,
        cases=tuple(
            Case(name=c.name, inputs=_template(c).inputs, params={"point": c.name}, tags=c.tags)
            for c in cases
        ),
        cost=cost,
        summary="from a file",
        in_place=tuple(behavior.in_place),
        draw=draw,
        splits_rows=behavior.splits_rows,
        tolerance=sum_tolerance(behavior.longest_sum),
    )


def sum_tolerance(longest_sum: int) -> Tolerance:
    """Return Weft's default rule, with a bound on summation order that grows with the longest sum."""
    # 0.75 sqrt(n): sqrt(n) / 6 units for n random roundings, times 5 for the worst of many elements
    chain = min(64.0, max(8.0, 0.75 * longest_sum**0.5))
    return Tolerance(
        chain=chain,
        reason="the order of a sum is free, and the reference's own order is as good as another: "
        "n roundings of random sign, one after another, lose sqrt(n) / 6 units of the sum, and the "
        "worst of many elements about five times that",
    )


def make_implementation(
    operator: Operator,
    name: str,
    cases: Sequence[ProblemCase],
    generator: Generator,
    behavior: ReferenceBehavior,
    compute: Compute,
    backend: str = "eager",
    deterministic: bool = True,
) -> Implementation:
    """Return a function of data as an implementation, which is called with separate inputs."""
    by_name = {c.name: c for c in cases}
    is_plain = generator.calls_plainly(behavior)

    def forward(*inputs: torch.Tensor, point: str) -> Any:
        case = by_name[point]
        data, buffers = _template(case).build(inputs)
        # The function behind `no_grad`: its context takes several us of a call, and of the time between two.
        had_gradients = torch.is_grad_enabled()
        _set_grad_enabled(False)
        try:
            if is_plain:
                return output_tensors(compute(data, case), buffers, behavior.keys)
            with generator.call_context(behavior):
                return output_tensors(compute(data, case), buffers, behavior.keys)
        finally:
            _set_grad_enabled(had_gradients)

    return Implementation(
        operator=operator.name,
        name=name,
        backend=backend,
        forward=forward,
        directions=("forward",),
        deterministic=deterministic and behavior.repeatable,
    )


# -- behavior of a reference -------------------------------------------------------------------

OBSERVED_IN_FLOAT64 = 1 << 26  # bytes of inputs up to which a reference is run in float64 beforehand


def observe_behavior(
    native: Compute,
    float64: Compute,
    case: ProblemCase,
    generator: Generator,
    device: str,
    weights: Sequence[torch.Tensor] = (),
) -> ReferenceBehavior:
    """Run a reference several times at one case and describe its behavior.

    A tensor that it overwrites without reading is an output buffer; one that it reads and then
    overwrites is changed in place. The source does not show which, and a candidate may do the same.
    Raises :class:`WeftError` if the reference cannot be run here, or not in float64.
    """
    run = _ReferenceRun(native, float64, case, generator, device)
    with preserved_rng():
        first = _wrap_errors("the reference raised", run, 1)
        if not isinstance(run.shapes, list):  # what it returned is not tensors
            raise WeftError("the reference", expected="tensors as its output", got=run.shapes)
        kinds, shapes, keys = run.kinds, run.shapes, run.keys
        if any(dtype.is_complex for _, dtype in kinds):
            raise NotSupported("the reference returns complex numbers, which Weft does not compare")
        changed = run.changed()
        if run.nbytes <= OBSERVED_IN_FLOAT64:
            # Above that the check itself shows it; float64 at full size would be the peak of memory.
            _wrap_errors("the reference cannot be run in float64", run, 1, True)
            _check_shapes(shapes, run.shapes)
        # Other random numbers first: where they give the same bits, the reference is repeatable too.
        other = run(2)
        repeatable = other == first or run(1) == first
        buffers = _unread_tensors(run, kinds, first, changed) if repeatable else []
    # Terms of a sum in one chain: the longest dimension, or a tenth of all elements that
    # contribute to one output, since no implementation adds all of those one after another.
    tensors = run.template.tensors
    sizes = [n for t in tensors for n in t.shape] + [n for w in weights for n in w.shape]
    smallest = max(1, min(math.prod(shape) for shape, _ in kinds))
    return ReferenceBehavior(
        buffers=buffers,
        in_place=[tensors[n].name for n in changed if n not in buffers],
        # If the seed decides the bits, it uses random numbers; if the bits differ at one seed, it is
        # not repeatable.
        random=repeatable and other != first,
        repeatable=repeatable,
        longest_sum=max([1, *sizes, *(t.numel // smallest // 10 for t in tensors)]),
        output_bytes=sum(math.prod(shape) * dtype.itemsize for shape, dtype in kinds),
        keys=keys,
    )


class _ReferenceRun:
    """Runs of a reference on the inputs of one seed. Calling it returns digests of the outputs.

    Digests stand for the tensors, so that one call's inputs and outputs are in memory at a time.
    After a run ``kinds`` are the outputs' shapes and dtypes, ``keys`` those of its dictionaries.
    """

    def __init__(
        self, native: Compute, float64: Compute, case: ProblemCase, generator: Generator, device: str
    ) -> None:
        self.native, self.float64 = native, float64
        self.case, self.generator, self.device = case, generator, device
        self.kinds: list[tuple[torch.Size, torch.dtype]] = []
        self.shapes: Any = []
        self.keys: dict[str, list[str]] = {}
        self._generate()
        self.digests = [digest(t) for t in self.tensors]

    def _generate(self) -> None:
        self.template, generated = self.generator.split(self.case, 0)
        self.tensors = [t.to(self.device) for t in generated]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)

    def __call__(
        self, seed: int, wide: bool = False, overwritten: int | None = None
    ) -> list[tuple[int, int]]:
        """Run with this random seed, in float64 or with NaN in tensor number ``overwritten``."""
        if self.changed():
            self._generate()  # the run before wrote into its inputs
        inputs = self.tensors
        if wide:
            inputs = [t.double() if t.is_floating_point() else t for t in inputs]
        if overwritten is not None:
            # NaN reaches any output computed from it; integers have none, and 1 is a valid index.
            tensor = inputs[overwritten]
            tensor.fill_(math.nan if tensor.is_floating_point() else 1)
        plain = not wide and overwritten is None
        before = self.digests if plain else [digest(t) for t in inputs]
        seed_generators(seed)
        compute = self.float64 if wide else self.native
        with torch.no_grad(), cuda_on_cpu() if self.generator.cuda_on_cpu else nullcontext():
            returned = compute(self.template.build(inputs)[0], self.case)
        self.keys, output = output_keys(returned), output_tensors(returned)
        if output is None:
            changed = (t for t, d in zip(inputs, before, strict=True) if digest(t) != d)
            output = output_tensors(tuple(changed))
        outputs = tensors_of(output)
        wrong = [type(o) for o in outputs if not isinstance(o, torch.Tensor)]
        self.shapes = wrong[0] if wrong else [tuple(o.shape) for o in outputs]
        self.kinds = [] if wrong else [(o.shape, o.dtype) for o in outputs]
        return [] if wrong else [digest(o) for o in outputs]

    def changed(self) -> list[int]:
        """Return the indexes of the inputs that no longer hold what was generated."""
        pairs = zip(self.tensors, self.digests, strict=True)
        return [n for n, (t, before) in enumerate(pairs) if digest(t) != before]


def _unread_tensors(
    run: _ReferenceRun,
    kinds: Sequence[tuple[torch.Size, torch.dtype]],
    outputs: Sequence[tuple[int, int]],
    changed: Sequence[int],
) -> list[int]:
    """Return the indexes of possible output buffers whose contents do not affect the outputs."""
    unread = []
    for index, spec in enumerate(run.template.tensors):
        # Each tensor that is tried costs a run of the reference; others cannot hold an output.
        if index not in changed and (spec.shape, getattr(torch, spec.dtype)) not in kinds:
            continue
        if not spec.numel or len(run.template.tensors) == 1:  # a problem without any input is none
            continue
        if _wrap_errors("the reference raised", run, 1, False, index) == outputs:
            unread.append(index)
    return unread


def _wrap_errors(what: str, run: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return run(*arguments)
    except WeftError:
        raise
    except torch.OutOfMemoryError as error:
        raise WeftError(what, got="out of memory") from error
    except Exception as error:  # the file's code may raise anything
        raise WeftError(what, got=error_line(error)) from error


def error_line(error: BaseException, length: int = 300) -> str:
    """Return ``Type: message`` in one line, with at most ``length`` characters of the message."""
    return printable(f"{type(error).__name__}: {' '.join(str(error).split())[:length]}")


def _check_shapes(shapes: Sequence[Any], exact: Any) -> None:
    if not shapes or shapes != exact:
        raise WeftError(
            "the reference in float64",
            expected=f"the shapes of its native outputs, {shapes}",
            got=exact,
        )
