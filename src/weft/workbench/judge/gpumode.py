"""GPU MODE problems: ``reference.py`` with a generator and a reference; ``custom_kernel`` to judge.

The cases are the ``tests`` and ``benchmarks`` of ``task.yml``; a ``reference.py`` without one is
judged at the default arguments of its generator. The folder's own ``utils.py`` and ``task.py`` are
imported unchanged; missing ones are substituted (:mod:`gpumode_modules`).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import yaml

from weft.core import Case, WeftError
from weft.core.json_files import read_text
from weft.workbench.judge import gpumode_modules
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
from weft.workbench.judge.source_facts import execute, reference_facts, source_facts
from weft.workbench.judge.torch_modes import (
    CPU_NOTE,
    Float64Mode,
    cuda_generators_on_cpu,
    cuda_on_cpu,
)
from weft.workbench.judge.variation import seed_generators
from weft.workbench.sources.source import LoadedFile, Source

SUBSTITUTES = {"utils": gpumode_modules.make_utils, "task": gpumode_modules.make_task}
SEED_RANGE = 1 << 20  # limits the offset to the file's seed: some generators scale with the seed
TAGS = {"tests": "check", "benchmarks": "bench"}


def reference_file(path: Path) -> Path:
    """Return the ``reference.py`` of a folder, or the path itself if it is a file."""
    return path / "reference.py" if path.is_dir() else path


def read_problem(path: Path, device: str, seed: int | None = None, without: Collection[str] = ()) -> Problem:
    """Read the problem in a folder or a ``reference.py``; raise :class:`WeftError` if it is none.

    ``seed`` is not used: these problems have no weights apart from their inputs. ``without``
    "constants" leaves inputs that never vary as they are.
    """
    path = reference_file(path)
    facts = reference_facts(path)
    missing = {"generate_input", "ref_kernel"} - facts.names
    if missing:
        raise WeftError(
            f"{path.name} is not a GPU MODE problem",
            expected="generate_input(...) and ref_kernel(data)",
            got=f"no {' and no '.join(sorted(missing))}",
        )
    file = _ReferenceFile(path, device, facts.mentions_cuda)
    ref_kernel = file.module.ref_kernel
    cases, generator = file.cases(), file.generator()

    def native(data: Data, case: ProblemCase) -> Any:
        return ref_kernel(data)

    def float64(data: Data, case: ProblemCase) -> Any:
        with Float64Mode():
            return ref_kernel(data)

    behavior = observe_behavior(native, float64, cases[0], generator, device)
    cases = [generator.with_template(c, behavior) for c in cases]
    variation = vary_inputs(native, cases, generator, behavior, device, without=without)
    generator, behavior = variation.generator, variation.behavior
    operator = make_operator(path.resolve().parent.name, cases, generator, behavior, float64)
    check = getattr(file.module, "check_implementation", None)
    return Problem(
        kind="gpumode",
        path=path,
        operator=operator,
        baseline=make_implementation(operator, "reference", cases, generator, behavior, native),
        own_check=_OwnCheck(
            check or gpumode_modules.make_match_reference(ref_kernel), generator, cases, device
        ),
        own_seed=0,
        own_rule="check_implementation" if check else "no check of its own: compared with ref_kernel",
        extra={"device": device, "behavior": asdict(behavior), "cuda_on_cpu": file.cuda_on_cpu},
        notes=((CPU_NOTE,) if file.cuda_on_cpu else ()) + variation.notes,
        constant=variation.constant,
        nbytes=behavior.output_bytes + max(sum(i.nbytes for i in c.inputs) for c in operator.cases),
    )


def load(source: Source) -> LoadedFile:
    """Load the submission in a worker process, with the reference's generator but no reference.

    A source that ``is_reference`` is the reference itself, which is timed in a worker of its own.
    """
    extra = source.extra
    path, problem_path = Path(source.path), reference_file(Path(source.reference))
    facts, behavior = source_facts(path), ReferenceBehavior(**extra["behavior"])
    mentions_cuda = facts.mentions_cuda or bool(extra["cuda_on_cpu"])
    file = _ReferenceFile(problem_path, str(extra["device"]), mentions_cuda)
    generator = replace(file.generator(), varied=behavior.varied)
    cases = [generator.with_template(c, behavior) for c in file.cases()]
    operator = make_operator(problem_path.resolve().parent.name, cases, generator, behavior, None)
    if source.is_reference:
        ref_kernel = file.module.ref_kernel
        reference = make_implementation(
            operator, "reference", cases, generator, behavior, lambda data, case: ref_kernel(data)
        )
        return LoadedFile(operators=(operator,), implementations=(reference,))
    file.delete_reference()
    sys.meta_path.append(_FolderImporter(problem_path.resolve().parent))
    with cuda_generators_on_cpu() if file.cuda_on_cpu else nullcontext():
        module = execute(path, "submission")
    kernel = getattr(module, "custom_kernel", None)
    if not callable(kernel):
        raise WeftError(f"{path.name}", expected="custom_kernel(data)", got="none")
    implementation = make_implementation(
        operator,
        path.stem,
        cases,
        generator,
        behavior,
        lambda data, case: kernel(data),
        backend=facts.backend,
        deterministic=bool(getattr(module, "deterministic", True)),
    )
    return LoadedFile(operators=(operator,), implementations=(implementation,))


class _FolderImporter(MetaPathFinder, Loader):
    """Import hook for the modules in the problem's folder and for substitutes of missing ones."""

    def __init__(self, folder: Path, names: Sequence[str] = ("utils", "task", "reference")) -> None:
        self.folder, self.names = folder, names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in self.names:
            return None
        return ModuleSpec(name, self, origin=str(self.folder / f"{name}.py"))

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        missing = not Path(str(spec.origin)).is_file()
        return SUBSTITUTES[spec.name]() if missing and spec.name in SUBSTITUTES else None

    def exec_module(self, module: ModuleType) -> None:
        path = self.folder / f"{module.__name__}.py"
        if path.is_file():
            module.__file__ = str(path)
            exec(compile(path.read_text(), str(path), "exec"), vars(module))


@contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    """Within the context, ``utils`` and ``task`` are the folder's; later they are what they were."""
    # Another problem's modules may be loaded under these names.
    previous = {n: sys.modules.pop(n) for n in SUBSTITUTES if n in sys.modules}
    importer = _FolderImporter(folder, tuple(SUBSTITUTES))
    # First, since an installed package may be called utils.
    sys.meta_path.insert(0, importer)
    try:
        yield
    finally:
        sys.meta_path.remove(importer)
        for name in SUBSTITUTES:
            sys.modules.pop(name, None)
        sys.modules.update(previous)


class _ReferenceFile:
    """An executed ``reference.py``, and the cases in its folder."""

    def __init__(self, path: Path, device: str, mentions_cuda: bool) -> None:
        self.path, self.device = path, device
        self.cuda_on_cpu = mentions_cuda and device == "cpu"
        context = cuda_generators_on_cpu() if self.cuda_on_cpu else nullcontext()
        try:
            with _importing_from(path.resolve().parent), context:
                self.module = execute(path, "weft_reference")
        except Exception as error:
            raise WeftError(f"{path.name} raised while it was loaded", got=error_line(error)) from error
        self.parameters = inspect.signature(self.module.generate_input).parameters
        self.generate_input: Callable[..., Any] = self.module.generate_input

    def cases(self) -> list[ProblemCase]:
        """Return the cases of ``task.yml``, or the generator's default arguments without one."""
        task_yml = self.path.parent / "task.yml"
        if not task_yml.is_file():
            arguments = self._check_arguments({})
            return [ProblemCase(name="default", arguments=arguments, tags=frozenset({"check"}))]
        cases: dict[str, ProblemCase] = {}
        for section, specs in read_task_yml(task_yml).items():
            for spec in specs:
                name = "-".join(f"{k}{v}" for k, v in spec.items() if k != "seed") or "default"
                # A case of both lists has both tags; the later entry gives the seed.
                tags = {TAGS[section]} | (cases[name].tags if name in cases else set())
                arguments = self._check_arguments(spec)
                cases[name] = ProblemCase(name=name, arguments=arguments, tags=frozenset(tags))
        if not cases:
            raise WeftError(f"{task_yml}", expected="tests or benchmarks", got="neither")
        # The checked ones first: the reference's behavior is observed at the first case.
        return sorted(cases.values(), key=lambda c: "check" not in c.tags)

    def _check_arguments(self, spec: Mapping[str, Any]) -> dict[str, Any]:
        variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        takes_any = any(p.kind is p.VAR_KEYWORD for p in self.parameters.values())
        unknown = [] if takes_any else [k for k in spec if k not in self.parameters]
        required = [n for n, p in self.parameters.items() if p.default is p.empty and p.kind not in variadic]
        missing = [n for n in required if n not in spec and n != "seed"]
        if unknown or missing:
            raise WeftError(
                "a case of task.yml does not match generate_input",
                expected=f"generate_input({', '.join(self.parameters)})",
                got=f"{dict(spec)}",
                hint="a lone reference.py needs a default for each argument but the seed",
            )
        return dict(spec)

    def generator(self) -> Generator:
        generate_input, takes_seed = self.generate_input, "seed" in self.parameters

        def generate(case: ProblemCase, seed: int) -> Data:
            arguments = dict(case.arguments)
            seed_generators(seed)
            # Added to the file's own seed: the sizes stay, the values differ from seed to seed.
            if takes_seed:
                arguments["seed"] = int(arguments.get("seed", 42)) + seed % SEED_RANGE
            return generate_input(**arguments)

        return Generator(generate=generate, cuda_on_cpu=self.cuda_on_cpu)

    def delete_reference(self) -> None:
        """Remove the reference: the candidate in this process must not be able to call it."""
        for name in ("ref_kernel", "check_implementation"):
            vars(self.module).pop(name, None)
        sys.modules.pop("weft_reference", None)


class _OwnCheck:
    """The file's own ``check_implementation``, applied at the file's own seeds."""

    def __init__(
        self, check: Callable[..., Any], generator: Generator, cases: Sequence[ProblemCase], device: str
    ) -> None:
        self.check, self.generator, self.device = check, generator, device
        self.cases = {c.name: c for c in cases}

    def __call__(self, case: Case, seed: int, output: Any) -> tuple[bool, str]:
        template, tensors = self.generator.split(self.cases[case.name], seed)
        data, _ = template.build([t.to(self.device) for t in tensors])
        with torch.no_grad(), cuda_on_cpu() if self.generator.cuda_on_cpu else nullcontext():
            result = self.check(data, output)
        # A check returns (passed, message), or a message that is empty for a pass.
        passed, message = result if isinstance(result, tuple) else (not result, result)
        return bool(passed), " ".join(str(message).split())[:300]


def read_task_yml(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the lists ``tests`` and ``benchmarks`` of a ``task.yml``, empty if the file has none.

    Raises :class:`WeftError` if the file is no YAML, or if an item of these lists is no mapping.
    """
    expected = "YAML with lists tests and benchmarks"
    try:
        task = yaml.safe_load(read_text(path, limit=1 << 20))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        line = " ".join(str(error).split()) or type(error).__name__
        raise WeftError(path.name, expected=expected, got=line) from error
    if not isinstance(task, dict):
        raise WeftError(path.name, expected=expected, got=type(task).__name__)
    sections = {name: task.get(name) or [] for name in ("tests", "benchmarks")}
    for name, items in sections.items():
        if not isinstance(items, list):
            raise WeftError(f"{path.name}: {name}", expected="a list", got=items)
        for item in items:
            if not isinstance(item, dict) or not all(isinstance(key, str) for key in item):
                example = 'an item such as - {"size": 127, "seed": 42}'
                raise WeftError(f"{path.name}: {name}", expected=example, got=item)
    return sections
