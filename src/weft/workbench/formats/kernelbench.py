"""KernelBench: ``Model``, ``get_inputs``, ``get_init_inputs`` in a file, ``ModelNew`` in another.

Weights belong to a case: a case is judged at weights of its own, and the next case puts other
weights into the *same* instance of the candidate (``load_state_dict``), so that one that was packed
for the first case and kept is a wrong answer in the second. A candidate that packs its weights says
so with a method ``setup()``, called again after each change, or by taking part in
``load_state_dict``. Where its parameters are not the reference's by name and shape, it is made anew
for each case, from the case's seed, as KernelBench makes both.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from weft.core import Case, WeftError
from weft.workbench.bring import Brought, Source
from weft.workbench.formats.data import results
from weft.workbench.formats.files import execute, facts, reference_facts
from weft.workbench.formats.habits import observe
from weft.workbench.formats.in_float64 import in_float64
from weft.workbench.formats.on_cpu import NOTE, generating_on_cpu
from weft.workbench.formats.problem import (
    Data,
    Generator,
    Habits,
    Point,
    Problem,
    make_implementation,
    make_operator,
    own_random,
)
from weft.workbench.oracle import fresh_seeds
from weft.workbench.slots import tensors_of

WEIGHTS = 2  # sets of weights that a candidate with parameters is judged at
NEEDED = ("Model", "get_inputs")
# What KernelBench's own comparison allows, absolute and relative, by the answer's dtype.
OWN_TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 1e-2}
OWN_DEFAULT = 1e-4


def problem(path: Path, device: str, seed: int | None = None) -> Problem:
    """The problem in a reference file; raises :class:`WeftError` where there is none.

    ``seed`` fixes the weights' seeds, which else come from the operating system.
    """
    said = reference_facts(path)
    missing = [n for n in NEEDED if n not in said.names]
    if missing:
        raise WeftError(
            f"{path.name} is no KernelBench problem",
            expected="class Model, get_inputs() and get_init_inputs()",
            got=f"no {' and no '.join(missing)}",
        )
    file = _File(path, "weft_reference", device, said.says_cuda)
    seeds = fresh_seeds(WEIGHTS) if seed is None else range(seed, seed + WEIGHTS)
    reference = _Reference(file, device)
    with_weights = bool(reference.at(seeds[0], wide=False).state_dict())
    points = _points(seeds if with_weights else seeds[:1], with_weights)
    generator = file.generator()
    weights = list(reference.at(seeds[0], wide=False).state_dict().values())
    habits = observe(reference.narrow, reference.exact, points[0], generator, device, weights)
    points = [generator.formed(p, habits) for p in points]
    nbytes = sum(w.nbytes for w in weights)
    operator = make_operator(problem_name(path), points, generator, habits, reference.exact, nbytes)
    baseline = make_implementation(
        operator, "reference", points, generator, habits, reference.narrow
    )
    extra = {"device": device, "weights": [p.weights for p in points], "habits": asdict(habits)}
    return Problem(
        kind="kernelbench",
        path=path,
        operator=operator,
        baseline=baseline,
        own_check=_OwnCheck(operator.draw, baseline.forward, device),
        own_seed=fresh_seeds(1)[0] if seed is None else seed,
        own_rule=f"allclose to {OWN_DEFAULT:g}, in a half type 1e-2, at one set of weights",
        extra=extra | {"with_weights": with_weights, "elsewhere": file.elsewhere},
        notes=(NOTE,) if file.elsewhere else (),
    )


def load(source: Source) -> Brought:
    """The candidate as a guest reads it; of the reference it has only the generator."""
    told = source.extra
    device, habits = str(told["device"]), Habits(**told["habits"])
    path = Path(source.path)
    said = facts(path)
    names_cuda = said.says_cuda or bool(told["elsewhere"])
    file = _File(Path(source.reference), "weft_problem", device, names_cuda)
    with_weights = bool(told["with_weights"])
    states = {s: file.state(s) for s in told["weights"]} if with_weights else {}
    file.forget()
    generator = file.generator()
    points = [generator.formed(p, habits) for p in _points(told["weights"], with_weights)]
    operator = make_operator(problem_name(Path(source.reference)), points, generator, habits, None)
    module = execute(path, "candidate")
    new = getattr(module, "ModelNew", None)
    if not isinstance(new, type):
        raise WeftError(f"{path.name}", expected="class ModelNew", got="none")
    candidate = _Candidate(new, file, states, device)
    implementation = make_implementation(
        operator,
        path.stem,
        points,
        generator,
        habits,
        candidate.compute,
        backend=said.backend,
        deterministic=_declared(new, module),
    )
    return Brought(operators=(operator,), implementations=(implementation,))


def problem_name(path: Path) -> str:
    """The file's name, or its folder's where the file is only called what it is."""
    return path.resolve().parent.name if path.stem == "reference" else path.stem


def _declared(new: type, module: ModuleType) -> bool:
    """Whether the candidate claims the same bits each time, as it does where it says nothing."""
    return bool(getattr(new, "deterministic", getattr(module, "deterministic", True)))


def _points(seeds: Sequence[int], with_weights: bool) -> list[Point]:
    if not with_weights:
        return [Point(name="inputs", weights=seeds[0])]
    return [Point(name=f"weights-{n}", weights=s) for n, s in enumerate(seeds, 1)]


class _File:
    """A reference file that has been run: how models and inputs are made from it."""

    def __init__(self, path: Path, name: str, device: str, says_cuda: bool) -> None:
        self.elsewhere = says_cuda and device == "cpu"
        self.device = device
        try:
            with self.where():
                self.module = execute(path, name)
        except Exception as error:
            text = " ".join(str(error).split())[:300]
            got = f"{type(error).__name__}: {text}"
            raise WeftError(f"{path.name} raised as it was read", got=got) from error
        self.names = _parameters(getattr(self.module.Model, "forward", None))

    def where(self) -> Any:
        return generating_on_cpu() if self.elsewhere else nullcontext()

    def make(self, kind: Callable[..., Any], seed: int) -> torch.nn.Module:
        """An instance from a seed: the initial arguments and the weights are drawn from it."""
        with own_random(), torch.no_grad(), self.where():
            torch.manual_seed(seed)
            own = getattr(self.module, "get_init_inputs", None)
            arguments = own() if own else []
            torch.manual_seed(seed)
            made = kind(**arguments) if isinstance(arguments, dict) else kind(*arguments)
            moved: torch.nn.Module = made.to(self.device)
            return moved

    def state(self, seed: int) -> dict[str, torch.Tensor]:
        """The reference's weights for a seed."""
        return dict(self.make(self.module.Model, seed).state_dict())

    def forget(self) -> None:
        """Let go of the reference: its generator is all that a guest has of it."""
        for name, value in list(vars(self.module).items()):
            if isinstance(value, type) and issubclass(value, torch.nn.Module):
                delattr(self.module, name)
        gc.collect()

    def generator(self) -> Generator:
        module = self.module

        def draw(point: Point, seed: int) -> Data:
            torch.manual_seed(seed)
            return tuple(module.get_inputs())

        return Generator(draw=draw, names=self.names, elsewhere=self.elsewhere)


def _parameters(forward: Any) -> list[str]:
    """The names of a forward's arguments, for the reader of a verdict."""
    if not callable(forward):
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    found = [p.name for p in inspect.signature(forward).parameters.values() if p.kind in kinds]
    return found[1:]


class _Reference:
    """The file's model at a case's weights, in its own dtype and in float64."""

    def __init__(self, file: _File, device: str) -> None:
        self.file, self.device = file, device
        self.made: dict[bool, tuple[int, torch.nn.Module]] = {}

    def at(self, weights: int, wide: bool) -> torch.nn.Module:
        seed, model = self.made.get(wide, (None, None))
        if seed != weights or model is None:
            model = self.file.make(self.file.module.Model, weights)
            model = model.double() if wide else model
            self.made[wide] = weights, model
        return model

    def narrow(self, data: Data, point: Point) -> Any:
        assert point.weights is not None
        return self.at(point.weights, wide=False)(*data)

    def exact(self, data: Data, point: Point) -> Any:
        # Made before float64 is entered: its weights are to be the very ones, widened.
        assert point.weights is not None
        model = self.at(point.weights, wide=True)
        with in_float64():
            return model(*data)


class _Candidate:
    """One instance of ``ModelNew``, given a case's weights before its first call there."""

    def __init__(
        self, new: type, file: _File, states: dict[int, dict[str, torch.Tensor]], device: str
    ) -> None:
        self.new, self.file, self.states, self.device = new, file, states, device
        self.now: int | None = None
        self.model: Any = None

    def compute(self, data: Data, point: Point) -> Any:
        if point.weights != self.now:
            assert point.weights is not None
            self._put(point.weights)
        return self.model(*data)

    def _put(self, seed: int) -> None:
        state = self.states.get(seed, {})
        if self.model is None or not self._alike(state):
            self.model = self.file.make(self.new, seed)
        if state and self._alike(state):
            self.model.load_state_dict(state)
            if callable(setup := getattr(self.model, "setup", None)):
                setup()
        self.now = seed

    def _alike(self, state: dict[str, torch.Tensor]) -> bool:
        """Whether the candidate's parameters and buffers are the reference's, by name and shape."""
        own = self.model.state_dict()
        return {k: v.shape for k, v in own.items()} == {k: v.shape for k, v in state.items()}


class _OwnCheck:
    """What KernelBench would say: shapes alike, and ``allclose`` to a constant of the dtype."""

    def __init__(self, draw: Any, forward: Callable[..., Any], device: str) -> None:
        self.draw, self.forward, self.device = draw, forward, device

    def __call__(self, case: Case, seed: int, output: Any) -> tuple[bool, str]:
        due = tensors_of(self.forward(*self.draw(case, seed, self.device), **case.params))
        got = tensors_of(results(output))
        if [g.shape for g in got] != [d.shape for d in due]:
            return False, f"shapes {[tuple(g.shape) for g in got]}"
        worst = 0.0
        for one, other in zip(got, due, strict=True):
            limit = OWN_TOLERANCE.get(other.dtype, OWN_DEFAULT)
            if one.dtype != other.dtype:
                return False, f"{one.dtype} cannot be compared with {other.dtype}"
            if one.isnan().any():
                return False, f"{int(one.isnan().sum())} of {one.numel()} elements are NaN"
            worst = max(worst, float((one.double() - other.double()).abs().max()))
            if not torch.allclose(other, one, atol=limit, rtol=limit):
                return False, f"not within {limit:g}; largest difference {worst:.3g}"
        return True, f"largest difference {worst:.3g}"
