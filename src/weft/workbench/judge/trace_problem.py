"""Problem read from a definition, its workloads and a solution, in the FlashInfer Trace schema.

Each workload is a case. Inputs are drawn with another seed for each call, as the schema describes them:
random values, scalars, tensors of a safetensors file, or what the definition's own generator returns.
"""

from __future__ import annotations

import linecache
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from weft.core import Case, WeftError
from weft.core.cases import ITEMSIZE
from weft.workbench.calls.buffers import tensors_of
from weft.workbench.judge.definition import (
    Definition,
    TensorSpec,
    ToleranceSpec,
    Workload,
    check_dtypes,
    plain_scalar,
    read_definition,
    read_workloads,
    workload_name,
)
from weft.workbench.judge.json_fields import read_json
from weft.workbench.judge.problem import (
    Data,
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
from weft.workbench.judge.solution import (
    FLASHINFER_BENCH,
    SOL_EXECBENCH,
    Solution,
    check_buildable,
    load_entry,
    read_solution,
    write_sources,
)
from weft.workbench.judge.source_facts import TRACE
from weft.workbench.judge.torch_modes import (
    CPU_NOTE,
    Float64Mode,
    cuda_generators_on_cpu,
)
from weft.workbench.judge.variation import seed_generators
from weft.workbench.sources.source import LoadedFile, Source

TAGS = frozenset({"check", "bench"})
INTEGER_RANGES = {"int8": (-128, 128), "bool": (0, 2)}  # as both suites draw them
INTEGER_RANGE = (-1024, 1024)
# Names after which the random values must be positive: their root or reciprocal is taken.
POSITIVE = ("var", "variance", "std", "rstd")
WORKLOAD_FILES = ("workload.jsonl", "workloads.jsonl")


# -- files ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TraceFiles:
    """Files of a problem; paths in workloads are relative to ``root``."""

    definition: Path
    workloads: Path
    root: Path


def is_trace_reference(path: Path) -> bool:
    """Return True for a .json file, a folder with definition.json, and a data set's folder."""
    if path.is_dir():
        return (path / "definitions").is_dir() or (path / "definition.json").is_file()
    return path.suffix == ".json"


def find_files(reference: Path, candidate: Path, workloads: Path | None) -> TraceFiles:
    """Return the files of the problem; raise :class:`WeftError` if one is missing.

    ``reference`` is a definition, a folder with ``definition.json`` and ``workload.jsonl``, or a data
    set: a folder with ``definitions`` and ``workloads``, where the solution names the definition.
    """
    if candidate.suffix != ".json":
        raise WeftError("CANDIDATE", expected="a solution in JSON: SOLUTION.json", got=candidate)
    if workloads is not None and not workloads.is_file():
        raise WeftError("--workloads", expected="a .jsonl file", got=f"{workloads}: no such file")
    definition = reference
    if (reference / "definition.json").is_file():
        definition = reference / "definition.json"
    elif reference.is_dir():
        definition = _find_definition(reference, read_json(candidate).get("definition").string())
    name = read_definition(definition).name  # before the workloads: it may be what is wrong
    root = _data_set_root(definition)
    return TraceFiles(
        definition=definition, workloads=workloads or _find_workloads(definition, name, root), root=root
    )


def _find_definition(folder: Path, name: str) -> Path:
    # Files are named after their definition, so that usually no other file is read.
    files = sorted((folder / "definitions").rglob("*.json"), key=lambda p: (p.stem != name, p))
    for path in files:
        if read_json(path).get("name").value == name:
            return path
    names = ", ".join(sorted(p.stem for p in files)[:8]) or "none"
    raise WeftError(f"{folder / 'definitions'}", expected=f"a definition named {name}", got=names)


def _data_set_root(definition: Path) -> Path:
    """Return the folder that contains ``definitions``, or else the definition's own folder."""
    for parent in definition.resolve().parents:
        if parent.name == "definitions":
            return parent.parent
    return definition.resolve().parent


def _find_workloads(definition: Path, name: str, root: Path) -> Path:
    beside = [definition.with_name(n) for n in (*WORKLOAD_FILES, f"{definition.stem}.jsonl", f"{name}.jsonl")]
    in_data_set = sorted((root / "workloads").rglob(f"{name}.jsonl"))
    for path in (*beside, *in_data_set):
        if path.is_file():
            return path
    raise WeftError(
        f"the workloads of {name}",
        expected=f"{WORKLOAD_FILES[0]} beside the definition, or workloads/**/{name}.jsonl",
        got="no such file",
        hint="name it with --workloads FILE.jsonl",
    )


# -- inputs --------------------------------------------------------------------------------------


class TraceInputs:
    """Input generator of a definition: one set of positional arguments for a workload and a seed.

    ``source`` is the module of the reference if it has a generator of its own.
    """

    def __init__(
        self,
        definition: Definition,
        workloads: Sequence[Workload],
        files: TraceFiles,
        device: str,
        source: ModuleType | None = None,
    ) -> None:
        self.definition, self.files, self.device = definition, files, device
        names = [workload_name(w, definition) for w in workloads]
        self.workloads = {
            n if names.count(n) == 1 else f"{n}-{w.uuid}": w for n, w in zip(names, workloads, strict=True)
        }
        self.custom = getattr(source, definition.custom_inputs) if definition.custom_inputs else None
        self._stored: dict[tuple[str, str], torch.Tensor] = {}

    def cases(self) -> list[ProblemCase]:
        return [ProblemCase(name=name, tags=TAGS) for name in self.workloads]

    def nbytes(self, workload: Workload) -> int:
        """Return the bytes of the inputs and outputs of a workload."""
        specs = (*self.definition.inputs, *self.definition.outputs)
        shapes = [self.definition.shape(s, workload.axes) for s in specs]
        return sum(math.prod(n) * ITEMSIZE[s.dtype] for n, s in zip(shapes, specs, strict=True))

    def generate(self, case: ProblemCase, seed: int) -> Data:
        """Return the arguments of ``run``."""
        workload = self.workloads[case.name]
        seed_generators(seed)
        custom = self._custom_inputs(workload)
        return tuple(self._input(spec, workload, custom) for spec in self.definition.inputs)

    def _custom_inputs(self, workload: Workload) -> Mapping[str, Any]:
        if not any(s.type == "custom" for s in workload.inputs.values()):
            return {}
        assert self.custom is not None
        scalars = {n: s.value for n, s in workload.inputs.items() if s.type == "scalar"}
        return dict(self.custom({**workload.axes, **scalars}, torch.device(self.device)))

    def _input(self, spec: TensorSpec, workload: Workload, custom: Mapping[str, Any]) -> Any:
        source = workload.inputs.get(spec.name)
        shape = self.definition.shape(spec, workload.axes)
        if source is None or source.type == "random":
            if spec.shape is None:
                return _random_scalar(spec, workload.uuid)
            return self._random(spec, shape)
        if source.type == "scalar":
            assert source.value is not None
            return plain_scalar(spec, source.value)
        if source.type == "safetensors":
            value: Any = self._load(source.path, source.tensor_key, spec)
        elif spec.name not in custom:
            raise WeftError(
                f"{self.definition.path.name}: custom_inputs_entrypoint",
                expected=f"the input {spec.name} in what {self.definition.custom_inputs} returns",
                got=", ".join(custom) or "nothing",
            )
        else:
            value = custom[spec.name]
        if isinstance(value, torch.Tensor):
            self._check(spec, shape, value)
        return value

    def _check(self, spec: TensorSpec, shape: tuple[int, ...], value: torch.Tensor) -> None:
        dtype = str(value.dtype).removeprefix("torch.")
        if (tuple(value.shape), dtype) != (shape, spec.dtype):
            raise WeftError(
                f"{self.definition.path.name}: inputs.{spec.name}",
                expected=f"{spec.dtype} {shape}",
                got=f"{dtype} {tuple(value.shape)} from its generator or file",
            )

    def _random(self, spec: TensorSpec, shape: tuple[int, ...]) -> torch.Tensor:
        dtype = getattr(torch, spec.dtype)
        if not dtype.is_floating_point:
            low, high = INTEGER_RANGES.get(spec.dtype, INTEGER_RANGE)
            return torch.randint(low, high, shape, dtype=dtype, device=self.device)
        # Drawn and changed in float32 at least, and rounded to the dtype once, at the end.
        wide = torch.promote_types(dtype, torch.float32)
        value = torch.randn(shape, dtype=wide, device=self.device)
        if self.definition.op_type == "sampling" and spec.name == "probs":
            value = torch.softmax(value, dim=-1)
        elif spec.name.rstrip("0123456789").rpartition("_")[2] in POSITIVE:
            value = value.abs() + 0.1
        elif len(shape) >= 2 and ("weight" in spec.name or "proj" in spec.name):
            value = value / math.sqrt(shape[-1])  # a product of sums stays near 1
        return value.to(dtype)

    def _load(self, path: str, key: str, spec: TensorSpec) -> torch.Tensor:
        if (path, key) not in self._stored:
            file = self._resolve(path)
            try:
                from safetensors import safe_open

                with safe_open(str(file), framework="pt") as tensors:
                    self._stored[path, key] = tensors.get_tensor(key)
            except Exception as error:
                raise WeftError(
                    f"the safetensors input {spec.name}",
                    expected=f"the tensor {key} in {file}",
                    got=error_line(error, 200),
                ) from error
        return self._stored[path, key].clone()  # a call may write into its inputs

    def _resolve(self, path: str) -> Path:
        """Return the file in the data set; leading folders of the path may be the data set's own."""
        parts = Path(path).parts
        roots = (
            self.files.root,
            self.files.definition.resolve().parent,
            self.files.workloads.resolve().parent,
        )
        candidates = [root.joinpath(*parts[n:]) for root in roots for n in range(len(parts))]
        for candidate in candidates:
            if candidate.is_file():
                return candidate
        raise WeftError(
            "a workload's safetensors input",
            expected=f"{path} in {self.files.root}",
            got="no such file",
            hint="fetch the data set's tensors (git lfs pull), or leave this workload out with --case",
        )


def _random_scalar(spec: TensorSpec, uuid: str) -> Any:
    """Draw a scalar once for a workload: plain values are the same for every seed of a case."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{uuid}/{spec.name}".encode()))
    if spec.dtype.startswith(("float", "bfloat")):
        return float(torch.randn((), generator=generator))
    low, high = INTEGER_RANGES.get(spec.dtype, INTEGER_RANGE)
    return plain_scalar(spec, int(torch.randint(low, high, (), generator=generator)))


# -- outputs -------------------------------------------------------------------------------------


def ordered_outputs(definition: Definition, result: Any, device: str) -> tuple[torch.Tensor, ...]:
    """Return what ``run`` returned as tensors in the definition's order; an output of None is left out.

    Raises ValueError if it is not one value for each output.
    """
    names = [o.name for o in definition.outputs]
    if isinstance(result, dict):
        values = [result.get(n) for n in names]
    elif isinstance(result, tuple | list):
        values = list(result)
    else:
        values = [result]
    if len(values) != len(names) or all(v is None for v in values):
        what = type(result).__name__ if len(values) == 1 else f"{len(values)} values"
        raise ValueError(f"returned {what}, expected {', '.join(names)}")
    return tuple(
        v if isinstance(v, torch.Tensor) else torch.tensor(v, dtype=getattr(torch, o.dtype), device=device)
        for v, o in zip(values, definition.outputs, strict=True)
        if v is not None
    )


class _Reference:
    """The definition's ``run`` in its own dtypes and in float64."""

    def __init__(self, definition: Definition, inputs: TraceInputs, run: Callable[..., Any]) -> None:
        self.definition, self.inputs, self.run = definition, inputs, run
        self._checked: set[str] = set()
        self.all_outputs = True  # False if it leaves some out

    def native(self, data: Data, case: ProblemCase) -> Any:
        outputs = ordered_outputs(self.definition, self.run(*data), self.inputs.device)
        if case.name not in self._checked:
            self._check_outputs(outputs, case)
            self._checked.add(case.name)
        return outputs

    def float64(self, data: Data, case: ProblemCase) -> Any:
        with Float64Mode():
            return ordered_outputs(self.definition, self.run(*data), self.inputs.device)

    def _check_outputs(self, outputs: Sequence[torch.Tensor], case: ProblemCase) -> None:
        axes = self.inputs.workloads[case.name].axes
        if len(outputs) != len(self.definition.outputs):
            self.all_outputs = False  # one of None is left out, and the rest does not show which
            return
        for spec, output in zip(self.definition.outputs, outputs, strict=True):
            expected = f"{spec.dtype} {self.definition.shape(spec, axes)}"
            got = f"{str(output.dtype).removeprefix('torch.')} {tuple(output.shape)}"
            if got != expected:
                raise WeftError(
                    f"{self.definition.path.name}: outputs.{spec.name}",
                    expected=f"{expected} at {case.name}",
                    got=f"{got} from the reference",
                )


# -- problem -------------------------------------------------------------------------------------


def read_problem(
    reference: Path, candidate: Path, workloads: Path | None, device: str, seed: int | None, folder: Path
) -> Problem:
    """Read a definition and a solution, and write the solution's sources into ``folder``.

    Raises :class:`WeftError` for a malformed file and :class:`NotSupported` for a valid one that cannot
    be judged here.
    """
    files = find_files(reference, candidate, workloads)
    definition = read_definition(files.definition)
    solution = read_solution(candidate, definition.name)
    entries, notes = read_workloads(files.workloads, definition)
    check_dtypes(definition)
    check_buildable(solution, device)
    write_sources(solution, folder)
    cuda_on_cpu = device == "cpu" and ("cuda" in definition.reference or solution.mentions_cuda)
    module = _execute_reference(definition, cuda_on_cpu)
    inputs = TraceInputs(definition, entries, files, device, module)
    run = _Reference(definition, inputs, module.run)
    cases = inputs.cases()
    generator = _generator(inputs, cuda_on_cpu)
    behavior = observe_behavior(run.native, run.float64, cases[0], generator, device)
    # Inputs are declared: one that the reference does not read is no memory for an output.
    sizes = [size for w in entries for size in w.axes.values()]
    behavior = replace(behavior, buffers=(), longest_sum=max([behavior.longest_sum, *sizes]))
    cases = [generator.with_template(c, behavior) for c in cases]
    variation = vary_inputs(run.native, cases, generator, behavior, device, given_integers=True)
    generator, behavior = variation.generator, variation.behavior
    operator = make_operator(definition.name, cases, generator, behavior, run.float64)
    if len(definition.outputs) > 1 and run.all_outputs:
        operator = replace(operator, output_names=tuple(o.name for o in definition.outputs))
    baseline = make_implementation(operator, "reference", cases, generator, behavior, run.native)
    tolerances = {n: w.tolerance or ToleranceSpec() for n, w in inputs.workloads.items()}
    own_check = _OwnCheck(operator.draw, baseline.forward, device, definition, solution.suite, tolerances)
    return Problem(
        kind=TRACE,
        path=files.definition,
        operator=operator,
        baseline=baseline,
        own_check=own_check,
        own_seed=0 if seed is None else seed,
        own_rule=own_check.rule,
        extra={
            "device": device,
            "behavior": asdict(behavior),
            "workloads": str(files.workloads.resolve()),
            "root": str(files.root),
            "folder": str(folder),
            "cuda_on_cpu": cuda_on_cpu,
        },
        notes=(*notes, *((CPU_NOTE,) if cuda_on_cpu else ()), *variation.notes),
        constant=variation.constant,
        nbytes=max(inputs.nbytes(w) for w in entries),
    )


def load(source: Source) -> LoadedFile:
    """Load the solution in a worker process, with the inputs of the definition but no reference.

    A source that ``is_reference`` is the reference itself, which is timed in a worker of its own.
    """
    extra = source.extra
    device, cuda_on_cpu = str(extra["device"]), bool(extra["cuda_on_cpu"])
    files = TraceFiles(
        definition=Path(source.reference), workloads=Path(extra["workloads"]), root=Path(extra["root"])
    )
    behavior = ReferenceBehavior(**extra["behavior"])
    definition = read_definition(files.definition)
    workloads, _ = read_workloads(files.workloads, definition)
    # The reference's code runs here only where it generates the inputs, and without its run().
    executes = definition.custom_inputs or source.is_reference
    module = _execute_reference(definition, cuda_on_cpu) if executes else None
    if module is not None and not source.is_reference:
        del module.run
    inputs = TraceInputs(definition, workloads, files, device, module)
    generator = replace(_generator(inputs, cuda_on_cpu), varied=behavior.varied)
    cases = [generator.with_template(c, behavior) for c in inputs.cases()]
    operator = make_operator(definition.name, cases, generator, behavior, None)
    if source.is_reference:
        assert module is not None
        native = _Reference(definition, inputs, module.run).native
        reference = make_implementation(operator, "reference", cases, generator, behavior, native)
        return LoadedFile(operators=(operator,), implementations=(reference,))
    solution = read_solution(Path(source.path), definition.name)
    function, deterministic = load_entry(solution, Path(extra["folder"]))
    implementation = make_implementation(
        operator,
        solution.name,
        cases,
        generator,
        behavior,
        _call(solution, function, inputs),
        backend=solution.backend,
        deterministic=deterministic,
    )
    return LoadedFile(operators=(operator,), implementations=(implementation,))


def _call(
    solution: Solution, function: Callable[..., Any], inputs: TraceInputs
) -> Callable[[Data, ProblemCase], Any]:
    """Return the solution as a function of the inputs that returns its outputs."""
    definition = inputs.definition
    if not solution.destination_passing:
        return lambda data, case: ordered_outputs(definition, function(*data), inputs.device)
    # SOL-ExecBench hands out zeroed memory, FlashInfer-Bench unwritten memory.
    allocate = torch.zeros if solution.suite == SOL_EXECBENCH else torch.empty
    device = torch.device(inputs.device)

    def write_outputs(data: Data, case: ProblemCase) -> Any:
        axes = inputs.workloads[case.name].axes
        outputs = tuple(
            allocate(definition.shape(o, axes), dtype=getattr(torch, o.dtype), device=device)
            for o in definition.outputs
        )
        function(*data, *outputs)
        return outputs

    return write_outputs


def _generator(inputs: TraceInputs, cuda_on_cpu: bool) -> Generator:
    names = [i.name for i in inputs.definition.inputs]
    return Generator(generate=inputs.generate, names=names, cuda_on_cpu=cuda_on_cpu)


def _execute_reference(definition: Definition, cuda_on_cpu: bool) -> ModuleType:
    """Run the reference's source as a module; Triton can read the source of its functions."""
    module = ModuleType("weft_reference")
    name = f"<reference of {definition.name}>"
    lines = definition.reference.splitlines(keepends=True)
    # None in place of a time: linecache then never looks for the file, which does not exist.
    linecache.cache[name] = (len(definition.reference), None, lines, name)
    try:
        with cuda_generators_on_cpu() if cuda_on_cpu else nullcontext():
            exec(compile(definition.reference, name, "exec"), vars(module))
    except Exception as error:
        raise WeftError(f"{definition.path.name}: reference", got=f"it raised {error_line(error)}") from error
    return module


@dataclass(frozen=True)
class _OwnCheck:
    """Check of the suite that the solution is written for, at its default or the workload's tolerance."""

    draw: Any
    forward: Callable[..., Any]
    device: str
    definition: Definition
    suite: str
    tolerances: Mapping[str, ToleranceSpec]

    @cached_property
    def rule(self) -> str:
        if self.suite == FLASHINFER_BENCH:
            return f"{self.suite}: an error within 1e-2, absolute or relative, at every element"
        first = next(iter(self.tolerances.values()))
        return (
            f"{self.suite}: an error within {first.max_atol:g} + {first.max_rtol:g} |reference| at "
            f"{first.required_matched_ratio:.0%} of the elements"
        )

    def __call__(self, case: Case, seed: int, output: Any) -> tuple[bool, str]:
        expected = tensors_of(self.forward(*self.draw(case, seed, self.device), **case.params))
        outputs = tensors_of(output)
        worst = 0.0
        for got, want in zip(outputs, expected, strict=True):
            if (got.shape, got.dtype) != (want.shape, want.dtype):
                return False, f"{got.dtype} {tuple(got.shape)} for {want.dtype} {tuple(want.shape)}"
            accepted, error = self._compare(got.float(), want.float(), self.tolerances[case.name])
            worst = max(worst, error)
            if not accepted:
                return False, f"largest difference {error:.3g}"
        return True, f"largest difference {worst:.3g}"

    def _compare(self, got: torch.Tensor, want: torch.Tensor, tolerance: ToleranceSpec) -> tuple[bool, float]:
        if not got.numel():
            return True, 0.0
        error = (got - want).abs()
        if self.suite == FLASHINFER_BENCH:
            exceeds = (error > 1e-2) & (error / (want.abs() + 1e-8) > 1e-2)
            return bool(got.isfinite().all()) and not bool(exceeds.any()), float(error.max())
        if tolerance.allow_negative_inf:
            both = (got == -math.inf) & (want == -math.inf)
            # The difference of two -inf is NaN, which would fail where the outputs agree.
            got, want, error = got[~both], want[~both], error[~both]
        if not bool(got.isfinite().all() and want.isfinite().all()):
            return False, math.inf
        if bool(want.any()) and not bool(got.any()):
            return False, float(error.max())  # all zeros where the reference is not
        within = error <= tolerance.max_atol + tolerance.max_rtol * want.abs()
        largest = float(error.max()) if error.numel() else 0.0
        capped = tolerance.max_error_cap is not None and largest > tolerance.max_error_cap
        share = float(within.double().mean()) if error.numel() else 1.0
        return share >= tolerance.required_matched_ratio and not capped, largest
