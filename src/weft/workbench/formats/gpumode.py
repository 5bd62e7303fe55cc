"""GPU MODE: ``reference.py`` with a generator and a reference, a submission with ``custom_kernel``.

The cases are the ``tests`` and ``benchmarks`` of ``task.yml``; a lone ``reference.py`` is judged at
the defaults of its generator's arguments. What the folder holds beside it (``utils.py``,
``task.py``) is imported as it is; what it lacks is stood in for.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from weft.core import Case, WeftError
from weft.workbench.bring import Brought, Source
from weft.workbench.formats import gpumode_names, task_yml
from weft.workbench.formats.files import execute, facts, reference_facts
from weft.workbench.formats.habits import observe
from weft.workbench.formats.in_float64 import in_float64
from weft.workbench.formats.on_cpu import NOTE, generating_on_cpu, on_cpu
from weft.workbench.formats.problem import (
    Data,
    Generator,
    Habits,
    Point,
    Problem,
    make_implementation,
    make_operator,
)

BESIDE = {"utils": gpumode_names.utils, "task": gpumode_names.task}
SPREAD = 1 << 20  # seeds are this much past the file's own: some generators scale with the seed
TAGS = {"tests": "check", "benchmarks": "bench"}


def reference_file(path: Path) -> Path:
    """The ``reference.py`` that a path means: itself, or the one in the folder."""
    return path / "reference.py" if path.is_dir() else path


def problem(path: Path, device: str, seed: int | None = None) -> Problem:
    """The problem in a folder or a ``reference.py``; raises :class:`WeftError` where there is none.

    ``seed`` has no part in it: the weights of these problems, if any, are inputs.
    """
    path = reference_file(path)
    said = reference_facts(path)
    asked = {"generate_input", "ref_kernel"} - said.names
    if asked:
        raise WeftError(
            f"{path.name} is no GPU MODE problem",
            expected="generate_input(...) and ref_kernel(data)",
            got=f"no {' and no '.join(sorted(asked))}",
        )
    file = _File(path, device, said.says_cuda)
    kernel = file.module.ref_kernel
    points, generator = file.points(), file.generator()

    def narrow(data: Data, point: Point) -> Any:
        return kernel(data)

    def exact(data: Data, point: Point) -> Any:
        with in_float64():
            return kernel(data)

    habits = observe(narrow, exact, points[0], generator, device)
    formed = [generator.formed(p, habits) for p in points]
    operator = make_operator(path.resolve().parent.name, formed, generator, habits, exact)
    baseline = make_implementation(operator, "reference", formed, generator, habits, narrow)
    check = getattr(file.module, "check_implementation", None)
    rule = "check_implementation" if check else "no check of its own: compared with ref_kernel"
    return Problem(
        kind="gpumode",
        path=path,
        operator=operator,
        baseline=baseline,
        own_check=_OwnCheck(check or gpumode_names.make_match_reference(kernel), file, formed),
        own_seed=0,
        own_rule=rule,
        extra={"device": device, "habits": asdict(habits), "elsewhere": file.elsewhere},
        notes=(NOTE,) if file.elsewhere else (),
    )


def load(source: Source) -> Brought:
    """The submission as a guest reads it; of the reference it has only the generator."""
    told = source.extra
    path, problem_path = Path(source.path), reference_file(Path(source.reference))
    said, habits = facts(path), Habits(**told["habits"])
    file = _File(problem_path, str(told["device"]), said.says_cuda or bool(told["elsewhere"]))
    generator = file.generator()
    points = [generator.formed(p, habits) for p in file.points()]
    file.forget()
    operator = make_operator(problem_path.resolve().parent.name, points, generator, habits, None)
    sys.meta_path.append(_Beside(problem_path.resolve().parent))
    with generating_on_cpu() if file.elsewhere else nullcontext():
        module = execute(path, "submission")
    kernel = getattr(module, "custom_kernel", None)
    if not callable(kernel):
        raise WeftError(f"{path.name}", expected="custom_kernel(data)", got="none")
    implementation = make_implementation(
        operator,
        path.stem,
        points,
        generator,
        habits,
        lambda data, point: kernel(data),
        backend=said.backend,
        deterministic=bool(getattr(module, "deterministic", True)),
    )
    return Brought(operators=(operator,), implementations=(implementation,))


class _Beside(MetaPathFinder, Loader):
    """Finds what a file imports from beside the problem, and stands in for what is not there."""

    def __init__(self, folder: Path, names: Sequence[str] = ("utils", "task", "reference")) -> None:
        self.folder, self.names = folder, names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in self.names:
            return None
        return ModuleSpec(name, self, origin=str(self.folder / f"{name}.py"))

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        absent = not Path(str(spec.origin)).is_file()
        return BESIDE[spec.name]() if absent and spec.name in BESIDE else None

    def exec_module(self, module: ModuleType) -> None:
        path = self.folder / f"{module.__name__}.py"
        if path.is_file():
            module.__file__ = str(path)
            exec(compile(path.read_text(), str(path), "exec"), vars(module))


@contextmanager
def _beside(folder: Path) -> Iterator[None]:
    """While entered, ``utils`` and ``task`` are the folder's; afterwards what they were before."""
    kept = {n: sys.modules.pop(n) for n in BESIDE if n in sys.modules}
    finder = _Beside(folder, tuple(BESIDE))
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in BESIDE:
            sys.modules.pop(name, None)
        sys.modules.update(kept)


class _File:
    """A ``reference.py`` that has been run, with the cases beside it."""

    def __init__(self, path: Path, device: str, says_cuda: bool) -> None:
        self.path, self.device = path, device
        self.elsewhere = says_cuda and device == "cpu"
        where = generating_on_cpu() if self.elsewhere else nullcontext()
        try:
            with _beside(path.resolve().parent), where:
                self.module = execute(path, "weft_reference")
        except Exception as error:
            text = " ".join(str(error).split())[:300]
            got = f"{type(error).__name__}: {text}"
            raise WeftError(f"{path.name} raised as it was read", got=got) from error
        self.arguments = inspect.signature(self.module.generate_input).parameters
        self.make: Callable[..., Any] = self.module.generate_input

    def points(self) -> list[Point]:
        """The cases of ``task.yml``; the generator's own defaults where there is none."""
        beside = self.path.parent / "task.yml"
        if not beside.is_file():
            return [Point(name="default", arguments=self._checked({}), tags=frozenset({"check"}))]
        found: dict[str, Point] = {}
        for section, specs in task_yml.read(beside).items():
            for spec in specs:
                shown = {k: v for k, v in spec.items() if k != "seed"}
                name = "-".join(f"{k}{v}" for k, v in shown.items()) or "default"
                tags = {TAGS[section]} | (found[name].tags if name in found else set())
                arguments = self._checked(spec)
                found[name] = Point(name=name, arguments=arguments, tags=frozenset(tags))
        if not found:
            raise WeftError(f"{beside}", expected="tests or benchmarks", got="neither")
        return sorted(found.values(), key=lambda p: "check" not in p.tags)

    def _checked(self, spec: Mapping[str, Any]) -> dict[str, Any]:
        takes = self.arguments
        open_ended = any(p.kind is p.VAR_KEYWORD for p in takes.values())
        unknown = [] if open_ended else [k for k in spec if k not in takes]
        due = [
            n
            for n, p in takes.items()
            if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        ]
        missing = [n for n in due if n not in spec and n != "seed"]
        if unknown or missing:
            raise WeftError(
                "a case of task.yml and generate_input do not fit",
                expected=f"generate_input({', '.join(takes)})",
                got=f"{dict(spec)}",
                hint="a lone reference.py needs a default for each argument but the seed",
            )
        return dict(spec)

    def generator(self) -> Generator:
        make, takes_seed = self.make, "seed" in self.arguments

        def draw(point: Point, seed: int) -> Data:
            arguments = dict(point.arguments)
            torch.manual_seed(seed)
            if takes_seed:
                arguments["seed"] = int(arguments.get("seed", 42)) + seed % SPREAD
            return make(**arguments)

        return Generator(draw=draw, elsewhere=self.elsewhere)

    def forget(self) -> None:
        """Let go of the reference: its generator is all that a guest has of it."""
        for name in ("ref_kernel", "check_implementation"):
            vars(self.module).pop(name, None)
        sys.modules.pop("weft_reference", None)


class _OwnCheck:
    """What the file's own ``check_implementation`` says, at the file's own seeds."""

    def __init__(self, check: Callable[..., Any], file: _File, points: Sequence[Point]) -> None:
        self.check, self.file = check, file
        self.points = {p.name: p for p in points}

    def __call__(self, case: Case, seed: int, output: Any) -> tuple[bool, str]:
        point, device = self.points[case.name], self.file.device
        form, tensors = self.file.generator().data(point, seed)
        data, _ = form.build([t.to(device) for t in tensors])
        with torch.no_grad(), on_cpu() if self.file.elsewhere else nullcontext():
            said = self.check(data, output)
        if isinstance(said, tuple):
            return bool(said[0]), " ".join(str(said[1]).split())[:300]
        return not said, " ".join(str(said).split())[:300]
