"""External candidates: a user's files with implementations, each loaded by a worker process.

A file may define its own operator. That operator is also loaded in the parent process, after the
worker has shown that the file can be loaded: its reference is the oracle, and there is no other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.core import Implementation, Operator, WeftError, registry
from weft.workbench.calls.call import CallerFactory, make_local_caller
from weft.workbench.calls.errors import SandboxDied, WorkerError
from weft.workbench.calls.selection import BenchPoint, is_builtin
from weft.workbench.sandbox import fork_client
from weft.workbench.sandbox.caller import WorkerProcess
from weft.workbench.sandbox.process import Limits
from weft.workbench.sources.source import Source, load


class UnreadableFile(Exception):
    """Raised if a candidate's file cannot be loaded: a verdict on it, not a mistake in the request."""


class ExternalCandidates:
    """The declarations of some files, ready to be judged. Leaving the context ends the workers.

    Raises :class:`WeftError` for a missing file, and :class:`UnreadableFile` for one that cannot be
    loaded, with the worker's message.
    """

    def __init__(self, files: Sequence[str], limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.workers: dict[tuple[str, str], WorkerProcess] = {}
        self.operators: dict[str, Operator] = {}
        self.implementations: list[Implementation] = []
        self._baselines: dict[str, Implementation] = {}
        self._open_workers = ExitStack()
        if files:
            fork_client.prepare()  # its imports run while this process imports its own
        try:
            for file in files:
                self._load(file)
        except BaseException:
            self._open_workers.close()
            raise

    def __enter__(self) -> ExternalCandidates:
        return self

    def __exit__(self, *_: object) -> None:
        self._open_workers.close()

    def _load(self, file: str) -> None:
        if not Path(file).is_file():
            raise WeftError("--with", expected="a .py or .cu file", got=file)
        source = Source(kind="file", path=str(Path(file).resolve()))
        try:
            worker = self._open_workers.enter_context(WorkerProcess(source, self.limits))
        except (SandboxDied, WorkerError) as error:
            why = error.reason if isinstance(error, SandboxDied) else str(error)
            raise UnreadableFile(f"{file} could not be read: {why}") from error
        if worker.operators:
            # Loaded here only for its reference; the implementations still run in the worker alone.
            loaded = load(source)
            self.operators |= {o.name: o for o in loaded.operators}
            for implementation in loaded.implementations:
                operator = self.operators.get(implementation.operator)
                if operator is not None and implementation.name == operator.tolerance.baseline:
                    self._baselines[operator.name] = implementation
        for implementation in worker.implementations:
            key = implementation.operator, implementation.name
            if key in self.workers:
                raise WeftError(f"two files declare {key[0]} {key[1]}", got=file)
            self.workers[key] = worker
            self.implementations.append(implementation)

    def operator(self, name: str) -> Operator:
        """Return an operator of a file or of the registry; raise :class:`WeftError`."""
        return self.operators[name] if name in self.operators else registry.operator(name)

    @property
    def operator_names(self) -> list[str]:
        """Operators that the files' implementations compute, in their order."""
        return list(dict.fromkeys(i.operator for i in self.implementations))

    def baseline(self, operator: str) -> Implementation | None:
        """Return the implementation that sets the tolerance of a file's operator, else None."""
        return self._baselines.get(operator)

    def worker(self, implementation: Implementation) -> WorkerProcess | None:
        """Return the worker that has loaded an implementation; None for one of Weft's own."""
        return self.workers.get((implementation.operator, implementation.name))

    def caller_factory(self, implementation: Implementation) -> CallerFactory:
        """Return the factory of an implementation's callers: its worker's, or this process's."""
        worker = self.worker(implementation)
        return worker.make_caller if worker else make_local_caller

    def bench_arguments(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Add the files' implementations to the arguments of a bench.

        Without names, the operators are the files', and the implementations are the files' and
        Weft's own without the steps of ladders.
        """
        if not self.workers:
            return dict(arguments)
        operators = [self.operator(n) for n in arguments["operators"] or self.operator_names]
        external_names = {i.name for i in self.implementations}
        impls: list[str | Implementation] = [n for n in arguments["impls"] or () if n not in external_names]
        if not arguments["impls"]:
            ours = [i for o in operators if is_builtin(o) for i in registry.implementations(o.name)]
            impls += dict.fromkeys(i.name for i in ours if not i.is_step)
        operator_names = {o.name for o in operators}
        external = [i for i in self.implementations if i.operator in operator_names]
        if not external:
            raise WeftError(
                "--with: nothing of this operator",
                expected=f"one of {', '.join(self.operator_names)}, which the files declare",
                got=", ".join(operator_names),
            )
        workers = {i.name: w for i in self.implementations if (w := self.worker(i))}
        return {
            **arguments,
            "operators": operators,
            "impls": impls + external,
            "workers": workers,
            "baselines": self._baselines,
        }


def without_external_baseline(
    point: BenchPoint,
    workers: Mapping[str, WorkerProcess],
    local_baselines: Mapping[str, Implementation],
) -> BenchPoint:
    """Return the point without a baseline that is an external implementation of the same name.

    An external implementation must not set its own tolerance. ``local_baselines`` are those that
    the parent process may call.
    """
    baseline = point.baseline
    if baseline is None or baseline.name not in workers or baseline in local_baselines.values():
        return point
    return replace(point, baseline=None)


def restart_workers(point: BenchPoint, workers: Mapping[str, WorkerProcess]) -> dict[str, str]:
    """Restart the workers of a point, each once; return the failures by implementation."""
    failures: dict[str, str] = {}
    restarted: dict[int, str] = {}  # a worker may hold several implementations
    for name in (i.name for i in point.implementations if i.name in workers):
        worker = workers[name]
        if id(worker) not in restarted:
            restarted[id(worker)] = ""
            try:
                worker.restart()
            except (SandboxDied, WorkerError) as error:
                restarted[id(worker)] = str(error)
        if restarted[id(worker)]:
            failures[name] = restarted[id(worker)]
    return failures
