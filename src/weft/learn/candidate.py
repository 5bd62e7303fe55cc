"""``Candidate``: the learner's file as a grade module sees it, in the worker process."""

from __future__ import annotations

import importlib.util
import traceback
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from weft.learn.grading import Refused


class Candidate:
    """The learner's file: a Python module for triton, numba and python, a CUDA C++ source for cuda."""

    def __init__(self, file: Path) -> None:
        self.file = file

    @property
    def text(self) -> str:
        return self.file.read_text(encoding="utf-8")

    @cached_property
    def module(self) -> ModuleType:
        """The imported Python file; raises :class:`Refused` if its import raises."""
        specification = importlib.util.spec_from_file_location("solution", self.file)
        assert specification is not None and specification.loader is not None
        module = importlib.util.module_from_spec(specification)
        try:
            specification.loader.exec_module(module)
        except Exception as error:
            raise Refused("import", self._explain(error)) from error
        return module

    def function(self, name: str) -> Callable[..., Any]:
        """Return a function of the file that raises :class:`Refused` where the learner's code raises."""
        function = getattr(self.module, name, None)
        if function is None:
            raise Refused("import", f"the file has no {name}; keep the name of the starting file")

        def call(*arguments: Any, **keywords: Any) -> Any:
            try:
                return function(*arguments, **keywords)
            except Refused:
                raise
            except Exception as error:
                raise Refused(f"call {name}", self._explain(error)) from error

        return call

    def _explain(self, error: Exception) -> str:
        """Return the error with the last line of the learner's file that led to it."""
        if isinstance(error, SyntaxError):
            return f"line {error.lineno}: {error.msg}"
        cause: BaseException = error
        while cause.__cause__ is not None:  # Triton's interpreter wraps what a kernel raises
            cause = cause.__cause__
        lines = []
        for exception in (error, cause):
            frames = traceback.extract_tb(exception.__traceback__)
            lines += [frame.lineno for frame in frames if frame.filename == str(self.file)]
        position = f"line {lines[-1]}: " if lines else ""
        return f"{position}{type(cause).__name__}: {cause}"
