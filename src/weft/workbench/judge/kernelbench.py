"""KernelBench problems: ``Model``, ``get_inputs``, ``get_init_inputs``; ``ModelNew`` to judge.

Weights belong to a case. The second case loads other weights into the *same* instance of the
candidate (``load_state_dict``), so a candidate that keeps weights packed for the first case fails in
the second. A candidate that packs its weights defines ``setup()``, which is called again after each
change, or takes part in ``load_state_dict``. If its parameters do not match the reference's by name
and shape, it is created anew for each case from the case's seed, as KernelBench creates both.
"""

from __future__ import annotations

import gc
import inspect
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from weft.core import Case, WeftError
from weft.workbench.calls.buffers import tensors_of
from weft.workbench.calls.guarded_memory import digest
from weft.workbench.calls.seeds import fresh_seeds
from weft.workbench.judge.backward import (
    Differentiable,
    GradientFamily,
    GradientSpec,
    gradient_problem,
    match_parameters,
)
from weft.workbench.judge.data_template import output_tensors
from weft.workbench.judge.problem import (
    Data,
    Digest,
    Generator,
    Problem,
    ProblemCase,
    ReferenceBehavior,
    error_line,
    make_implementation,
    make_operator,
    observe_behavior,
    vary_inputs,
)
from weft.workbench.judge.source_facts import execute, reference_facts, source_facts
from weft.workbench.judge.torch_modes import CPU_NOTE, Float64Mode, cuda_generators_on_cpu
from weft.workbench.judge.variation import (
    constant_weights,
    count_special,
    is_taken,
    preserved_rng,
    seed_generators,
    vary_weights,
)
from weft.workbench.sources.source import LoadedFile, Source

WEIGHT_SETS = 2  # sets of weights that a candidate with parameters is judged at
REQUIRED = ("Model", "get_inputs")
# KernelBench's own tolerance, absolute and relative, by the output's dtype.
OWN_TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 1e-2}
OWN_DEFAULT = 1e-4
COMPARED_AT_ONCE = 1 << 22  # elements of an output that the format's own check compares at once
WEIGHTS_IN_MEMORY = 1 << 26  # bytes of a set of weights above which a worker keeps it in a file


def read_problem(
    path: Path,
    device: str,
    seed: int | None = None,
    backward: bool = False,
    without: Collection[str] = (),
) -> Problem:
    """Read the problem in a reference file; raise :class:`WeftError` if it is none.

    ``seed`` fixes the seeds of the weights, which otherwise come from the operating system.
    ``backward`` makes it the problem of the gradients of its inputs and parameters. ``without`` leaves
    constant "weights", or inputs that are "constants", as they are.
    """
    facts = reference_facts(path)
    missing = [n for n in REQUIRED if n not in facts.names]
    if missing:
        raise WeftError(
            f"{path.name} is not a KernelBench problem",
            expected="class Model, get_inputs() and get_init_inputs()",
            got=f"no {' and no '.join(missing)}",
        )
    file = _ReferenceFile(path, "weft_reference", device, facts.mentions_cuda)
    # From the operating system: a candidate that could predict the weights could store the answer.
    seeds = fresh_seeds(WEIGHT_SETS) if seed is None else range(seed, seed + WEIGHT_SETS)
    reference = _Reference(file)
    weights = list(reference.model(seeds[0], float64=False).state_dict().values())
    with_weights = bool(weights)
    # Without weights a second case would be the first again.
    cases = _cases(seeds if with_weights else seeds[:1], with_weights)
    generator = file.generator()
    if device == "cuda":
        generator = generator.on_gpu(cases[0])
    behavior = observe_behavior(reference.native, reference.float64, cases[0], generator, device, weights)
    cases = _with_template(cases, generator, behavior)
    variation = vary_inputs(
        reference.native, cases, generator, behavior, device, same_data=True, without=without
    )
    generator, behavior = variation.generator, variation.behavior
    notes = ((CPU_NOTE,) if file.cuda_on_cpu else ()) + variation.notes
    if "weights" not in without:
        notes += _vary_weights(reference, cases, generator, behavior, device)
    nbytes = sum(w.nbytes for w in weights)
    del weights  # of the model that is kept, or of none
    operator = make_operator(problem_name(path), cases, generator, behavior, reference.float64, nbytes)
    baseline = make_implementation(operator, "reference", cases, generator, behavior, reference.native)
    problem = Problem(
        kind="kernelbench",
        path=path,
        operator=operator,
        baseline=baseline,
        own_check=_OwnCheck(operator.draw, baseline.forward, device),
        own_seed=fresh_seeds(1)[0] if seed is None else seed,
        own_rule=f"allclose to {OWN_DEFAULT:g}, in a half type 1e-2, at one set of weights",
        extra={
            "device": device,
            "weights": [c.weights_seed for c in cases],
            "behavior": asdict(behavior),
            "with_weights": with_weights,
            "generates_on": generator.device,
            "cuda_on_cpu": file.cuda_on_cpu,
            "varied_weights": file.varied_weights,
        },
        notes=notes,
        constant=variation.constant,
        nbytes=nbytes + behavior.output_bytes + sum(i.nbytes for i in operator.cases[0].inputs),
    )
    if not backward:
        return problem
    native = Differentiable(compute=reference.native, parameters=partial(reference.parameters, False))
    float64 = Differentiable(compute=reference.float64, parameters=partial(reference.parameters, True))
    return gradient_problem(problem, cases, generator, behavior, native, float64)


def _vary_weights(
    reference: _Reference,
    cases: Sequence[ProblemCase],
    generator: Generator,
    behavior: ReferenceBehavior,
    device: str,
) -> tuple[str, ...]:
    """Let the constant weights of the second set vary, if the reference takes it; return the notes."""
    first, last = cases[0], cases[-1]
    assert first.weights_seed is not None
    model = reference.model(first.weights_seed, float64=False)
    if len(cases) < WEIGHT_SETS or not any(True for _ in constant_weights(model)):
        return ()
    del model

    def run(case: ProblemCase) -> list[torch.Tensor]:
        assert case.template is not None
        inputs = generator.inputs(first, 0, device)
        with preserved_rng(), torch.no_grad(), generator.call_context(behavior):
            data, buffers = case.template.build(inputs)
            return list(tensors_of(output_tensors(reference.native(data, case), buffers)))

    usual = count_special(run(first))
    reference.file.varied_weights = last.weights_seed
    if is_taken(lambda: run(last), usual):
        return (f"constant weights have other values in {last.name}",)
    reference.file.varied_weights = None
    reference.drop_models()
    return ("the reference does not take other values of its constant weights",)


def estimate_bytes(path: Path) -> int:
    """Return the bytes of a problem's inputs, outputs and weights, without allocating them; 0 if unknown.

    The file runs on the meta device, which has shapes and no memory.
    """
    try:
        with preserved_rng(), torch.no_grad(), torch.device("meta"):
            module = execute(path, "weft_estimate")
            inputs = tensors_of(output_tensors(tuple(module.get_inputs())))
            arguments = module.get_init_inputs() if hasattr(module, "get_init_inputs") else []
            model = module.Model(**arguments) if isinstance(arguments, dict) else module.Model(*arguments)
            outputs = tensors_of(output_tensors(model(*inputs)))
        tensors = [*inputs, *outputs, *model.state_dict().values()]
        return sum(t.nbytes for t in tensors)
    except Exception:  # noqa: BLE001 - the file may do what has no meaning without memory
        return 0


def _with_template(
    cases: Sequence[ProblemCase], generator: Generator, behavior: ReferenceBehavior
) -> list[ProblemCase]:
    """Return the cases with the template of their data: it is the same, since only weights differ."""
    first = generator.with_template(cases[0], behavior)
    return [replace(c, template=first.template) for c in cases]


def load(source: Source) -> LoadedFile:
    """Load the candidate in a worker process, with the reference's generator but no reference.

    A source that ``is_reference`` is the reference itself, which is timed in a worker of its own.
    """
    extra = source.extra
    device, behavior = str(extra["device"]), ReferenceBehavior(**extra["behavior"])
    path = Path(source.path)
    facts = source_facts(path)
    mentions_cuda = facts.mentions_cuda or bool(extra["cuda_on_cpu"])
    file = _ReferenceFile(Path(source.reference), "weft_problem", device, mentions_cuda)
    file.varied_weights = extra["varied_weights"]
    with_weights = bool(extra["with_weights"])
    # Before the reference is deleted: the weights come from its constructor.
    states = _Weights(file, extra["weights"] if with_weights and not source.is_reference else ())
    if not source.is_reference:
        file.delete_reference()
    generator = replace(file.generator(), device=str(extra["generates_on"]), varied=behavior.varied)
    cases = _with_template(_cases(extra["weights"], with_weights), generator, behavior)
    name = problem_name(Path(source.reference))
    if source.is_reference:
        return _load_reference(source, file, name, cases, generator, behavior)
    # After the reference is deleted: executing the candidate's file already runs its code.
    module = execute(path, "candidate")
    model_new = getattr(module, "ModelNew", None)
    if not isinstance(model_new, type):
        raise WeftError(f"{path.name}", expected="class ModelNew", got="none")
    # A candidate claims the same bits in every run unless it declares otherwise.
    deterministic = bool(getattr(model_new, "deterministic", getattr(module, "deterministic", True)))
    if "gradients" in extra:
        spec = GradientSpec(**extra["gradients"])
        candidate = _Candidate(model_new, file, states, spec.parameters)
        function = Differentiable(compute=candidate.compute, parameters=candidate.parameters)
        names = candidate.parameters(cases[0])
        spec = replace(spec, parameters={n: spec.parameters[n] for n in names})
        family = GradientFamily(name=name, cases=cases, generator=generator, behavior=behavior, spec=spec)
        operator = family.operator(None)
        implementation = family.implementation(operator, path.stem, function, facts.backend, deterministic)
        return LoadedFile(operators=(operator,), implementations=(implementation,), parameters=tuple(names))
    operator = make_operator(name, cases, generator, behavior, None)
    implementation = make_implementation(
        operator,
        path.stem,
        cases,
        generator,
        behavior,
        _Candidate(model_new, file, states).compute,
        backend=facts.backend,
        deterministic=deterministic,
    )
    return LoadedFile(operators=(operator,), implementations=(implementation,))


def _load_reference(
    source: Source,
    file: _ReferenceFile,
    name: str,
    cases: Sequence[ProblemCase],
    generator: Generator,
    behavior: ReferenceBehavior,
) -> LoadedFile:
    """Return the reference as an implementation; its gradients are those that the candidate has too."""
    reference = _Reference(file)
    if "gradients" in source.extra:
        spec = GradientSpec(**source.extra["gradients"])
        names = [n for n in spec.parameters if n in source.extra["parameters"]]
        spec = replace(spec, parameters={n: spec.parameters[n] for n in names})
        function = Differentiable(compute=reference.native, parameters=partial(reference.parameters, False))
        family = GradientFamily(name=name, cases=cases, generator=generator, behavior=behavior, spec=spec)
        operator = family.operator(None)
        return LoadedFile(
            operators=(operator,), implementations=(family.implementation(operator, "reference", function),)
        )
    operator = make_operator(name, cases, generator, behavior, None)
    implementation = make_implementation(operator, "reference", cases, generator, behavior, reference.native)
    return LoadedFile(operators=(operator,), implementations=(implementation,))


def problem_name(path: Path) -> str:
    """Return the file's stem, or its folder's name for a file called ``reference.py``."""
    return path.resolve().parent.name if path.stem == "reference" else path.stem


def _cases(seeds: Sequence[int], with_weights: bool) -> list[ProblemCase]:
    if not with_weights:
        return [ProblemCase(name="inputs", weights_seed=seeds[0])]
    return [ProblemCase(name=f"weights-{n}", weights_seed=s) for n, s in enumerate(seeds, 1)]


class _ReferenceFile:
    """An executed reference file; it creates models and inputs."""

    def __init__(self, path: Path, name: str, device: str, mentions_cuda: bool) -> None:
        self.cuda_on_cpu = mentions_cuda and device == "cpu"
        self.device = device
        self.varied_weights: int | None = None  # the seed at which constant weights get other values
        try:
            with self._device_context():
                self.module = execute(path, name)
        except Exception as error:
            raise WeftError(f"{path.name} raised while it was loaded", got=error_line(error)) from error
        self.input_names = _parameter_names(getattr(self.module.Model, "forward", None))

    def _device_context(self) -> Any:
        return cuda_generators_on_cpu() if self.cuda_on_cpu else nullcontext()

    def create(self, model_class: Callable[..., Any], seed: int) -> torch.nn.Module:
        """Create a model; the seed determines its initial arguments and its weights.

        At the seed ``varied_weights`` those that are constant get other values.
        """
        with preserved_rng(), torch.no_grad(), self._device_context():
            seed_generators(seed)
            get_init_inputs = getattr(self.module, "get_init_inputs", None)
            arguments: Any = get_init_inputs() if get_init_inputs else []
            seed_generators(seed)  # as KernelBench: the weights do not depend on the arguments' draws
            by_name = isinstance(arguments, dict)
            model = model_class(**arguments) if by_name else model_class(*arguments)
            if seed == self.varied_weights and isinstance(model, torch.nn.Module):
                vary_weights(model, seed)
            on_device: torch.nn.Module = model.to(self.device)
            return on_device

    def state_dict(self, seed: int) -> dict[str, torch.Tensor]:
        """Return the reference's weights for a seed."""
        return dict(self.create(self.module.Model, seed).state_dict())

    def delete_reference(self) -> None:
        """Remove the reference: the candidate in this process must not be able to call it."""
        for name, value in list(vars(self.module).items()):
            if isinstance(value, type) and issubclass(value, torch.nn.Module):
                delattr(self.module, name)
        gc.collect()

    def generator(self) -> Generator:
        module = self.module

        def generate(case: ProblemCase, seed: int) -> Data:
            seed_generators(seed)
            return tuple(module.get_inputs())

        return Generator(generate=generate, names=self.input_names, cuda_on_cpu=self.cuda_on_cpu)


def _parameter_names(forward: Any) -> list[str]:
    """Return the names of a forward's parameters after ``self``; verdicts name inputs by them."""
    if not callable(forward):
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in inspect.signature(forward).parameters.values() if p.kind in kinds]
    return names[1:]


class _Reference:
    """The reference's model at the weights of a case, in its own dtype and in float64."""

    def __init__(self, file: _ReferenceFile) -> None:
        self.file = file
        self.models: dict[bool, tuple[int, torch.nn.Module]] = {}  # one of each dtype is cached
        self._parameters: dict[bool, dict[str, torch.Tensor]] = {}  # of these models
        self._digests: dict[int, dict[str, Digest] | None] = {}  # by seed; None where two were equal

    def model(self, weights_seed: int, float64: bool) -> torch.nn.Module:
        seed, model = self.models.get(float64, (None, None))
        if seed != weights_seed or model is None:
            model = self.file.create(self.file.module.Model, weights_seed)
            # Before the model is widened: the digests of both precisions' models must agree.
            self._compare_weights(weights_seed, model)
            model = model.double() if float64 else model
            self.models[float64] = weights_seed, model
            self._parameters[float64] = dict(model.named_parameters())
        return model

    def _compare_weights(self, seed: int, model: torch.nn.Module) -> None:
        """Raise :class:`WeftError` if the second model of a seed has other weights than the first."""
        if self._digests.get(seed, ()) is None:
            return
        digests = {name: digest(w) for name, w in model.state_dict().items()}
        first = self._digests.get(seed)
        self._digests[seed] = digests if first is None else None
        if first is not None and first != digests:
            names = [n for n in digests if digests[n] != first.get(n)]
            raise WeftError(
                "the reference's weights",
                expected="the same values for the same seed",
                got=f"others in the second model: {', '.join(names[:8])}",
                hint="torch, numpy and random are seeded before a model is created",
            )

    def drop_models(self) -> None:
        """Drop the models: their weights have changed."""
        self.models.clear()
        self._digests.clear()

    def parameters(self, float64: bool, case: ProblemCase) -> dict[str, torch.Tensor]:
        """Return the parameters at the weights of a case, by name."""
        assert case.weights_seed is not None
        self.model(case.weights_seed, float64)
        return self._parameters[float64]

    def native(self, data: Data, case: ProblemCase) -> Any:
        assert case.weights_seed is not None
        return self.model(case.weights_seed, float64=False)(*data)

    def float64(self, data: Data, case: ProblemCase) -> Any:
        # Created outside Float64Mode: the weights must be the native ones, widened.
        assert case.weights_seed is not None
        model = self.model(case.weights_seed, float64=True)
        with Float64Mode():
            return model(*data)


class _Weights:
    """The reference's weights for some seeds. Large ones lie in files of the worker's folder."""

    def __init__(self, file: _ReferenceFile, seeds: Sequence[int]) -> None:
        self.states: dict[int, dict[str, torch.Tensor] | Path] = {}
        for seed in seeds:
            state = file.state_dict(seed)
            if sum(t.nbytes for t in state.values()) <= WEIGHTS_IN_MEMORY:
                self.states[seed] = state
                continue
            # Two sets beside the candidate's own would be the largest part of the problem's memory.
            path = Path(tempfile.gettempdir()) / f"weights-{seed}.pt"
            torch.save(state, path)
            self.states[seed] = path
            del state

    def get(self, seed: int) -> dict[str, torch.Tensor]:
        """Return the weights of a seed, on the host if they come from a file; empty without any."""
        state = self.states.get(seed, {})
        if isinstance(state, Path):
            # Mapped, not read: `load_state_dict` copies from it, and the system can drop the pages again.
            loaded: dict[str, torch.Tensor] = torch.load(state, map_location="cpu", mmap=True)
            return loaded
        return state


class _Candidate:
    """Instance of ``ModelNew`` that loads a case's weights before its first call there.

    ``shapes`` are the shapes of the reference's parameters whose gradients are judged.
    """

    def __init__(
        self,
        model_new: type,
        file: _ReferenceFile,
        states: _Weights,
        shapes: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self.model_new, self.file, self.states = model_new, file, states
        self.shapes = shapes or {}
        self._parameters: dict[str, torch.Tensor] = {}
        self.weights_seed: int | None = None
        self.model: Any = None

    def compute(self, data: Data, case: ProblemCase) -> Any:
        if case.weights_seed != self.weights_seed:
            assert case.weights_seed is not None
            self._load_weights(case.weights_seed)
        return self.model(*data)

    def parameters(self, case: ProblemCase) -> dict[str, torch.Tensor]:
        """Return the candidate's parameters that match the reference's, by the reference's names."""
        if case.weights_seed != self.weights_seed:
            assert case.weights_seed is not None
            self._load_weights(case.weights_seed)
        return self._parameters

    def _load_weights(self, seed: int) -> None:
        state = self.states.get(seed)
        if self.model is None or not self._matches(state):
            self.model = self.file.create(self.model_new, seed)
            packs = callable(getattr(self.model, "setup", None))
            if seed == self.file.varied_weights and packs and not self._matches(state):
                self.model.setup()  # what it packed in its constructor is out of date
        if state and self._matches(state):
            self.model.load_state_dict(state)
            # After `load_state_dict`, since setup() packs the weights that it finds.
            if callable(setup := getattr(self.model, "setup", None)):
                setup()
        if self.shapes:
            self._parameters = match_parameters(dict(self.model.named_parameters()), self.shapes)
        self.weights_seed = seed

    def _matches(self, state: dict[str, torch.Tensor]) -> bool:
        """Return True if the candidate's parameters and buffers have these names and shapes."""
        own_state = self.model.state_dict()
        return {k: v.shape for k, v in own_state.items()} == {k: v.shape for k, v in state.items()}


class _OwnCheck:
    """KernelBench's own check: equal shapes, and ``allclose`` to a constant of the dtype."""

    def __init__(self, draw: Any, forward: Callable[..., Any], device: str) -> None:
        self.draw, self.forward, self.device = draw, forward, device

    def __call__(self, case: Case, seed: int, output: Any) -> tuple[bool, str]:
        expected = tensors_of(self.forward(*self.draw(case, seed, self.device), **case.params))
        outputs = tensors_of(output_tensors(output))
        if [o.shape for o in outputs] != [e.shape for e in expected]:
            return False, f"shapes {[tuple(o.shape) for o in outputs]}"
        worst = 0.0
        for got, want in zip(outputs, expected, strict=True):
            limit = OWN_TOLERANCE.get(want.dtype, OWN_DEFAULT)
            if got.dtype != want.dtype:
                return False, f"{got.dtype} cannot be compared with {want.dtype}"
            if nans := int(got.isnan().count_nonzero()):
                return False, f"{nans} of {got.numel()} elements are NaN"
            close = True
            # In pieces: the temporaries of one comparison are several times its operands.
            pieces = (t.reshape(-1).split(COMPARED_AT_ONCE) for t in (got, want))
            for got_piece, want_piece in zip(*pieces, strict=True):
                if got_piece.numel():
                    worst = max(worst, float((got_piece.double() - want_piece.double()).abs().max()))
                # KernelBench's order of the arguments: the relative part is a share of the candidate's value.
                close &= torch.allclose(want_piece, got_piece, atol=limit, rtol=limit)
            if not close:
                return False, f"not within {limit:g}; largest difference {worst:.3g}"
        return True, f"largest difference {worst:.3g}"
