"""Solution in the JSON schema of FlashInfer-Bench and SOL-ExecBench: read, write out, load.

A solution is a set of source files and an entry point ``file::function``. The judge's process reads
the JSON and writes the files into a temporary folder; only a worker process imports or builds them.
FlashInfer-Bench names one ``language``, SOL-ExecBench a list of ``languages``.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from weft.core import WeftError
from weft.workbench.judge.definition import NotSupported
from weft.workbench.judge.json_fields import Field, read_json
from weft.workbench.judge.source_facts import SourceFacts, execute

PYTHON_LANGUAGES = ("python", "pytorch", "triton")
CPP_LANGUAGES = ("cpp", "cuda", "cuda_cpp")
GPU_LANGUAGES = ("cuda", "cuda_cpp")
OTHER_LANGUAGES = ("tilelang", "cute_dsl", "cutile", "cudnn_frontend", "cutlass", "cudnn", "cublas")
CPP_SUFFIXES = (".cu", ".cpp", ".cc", ".cxx", ".c")
HEADER_SUFFIXES = (".h", ".hpp", ".cuh")
SOL_EXECBENCH, FLASHINFER_BENCH = "SOL-ExecBench", "FlashInfer-Bench"
CUDA_FLAGS, LINK_FLAGS = ("-O3", "--use_fast_math"), ("-lcuda",)  # SOL-ExecBench's defaults


@dataclass(frozen=True, kw_only=True)
class Solution:
    """A solution's sources by path, its entry point, and how it is called and built.

    ``destination_passing``: the function gets the outputs as its last arguments and writes them;
    otherwise it returns them. ``suite`` is the suite whose dialect the file is in.
    """

    name: str
    definition: str
    author: str
    suite: str
    languages: tuple[str, ...]
    sources: Mapping[str, str]
    entry_file: str
    entry_function: str
    destination_passing: bool = True
    binding: str = ""
    cflags: tuple[str, ...] = ()
    cuda_flags: tuple[str, ...] = CUDA_FLAGS
    link_flags: tuple[str, ...] = LINK_FLAGS

    @property
    def is_cpp(self) -> bool:
        return any(language in CPP_LANGUAGES for language in self.languages)

    @property
    def needs_gpu(self) -> bool:
        return any(language in GPU_LANGUAGES for language in self.languages)

    @property
    def mentions_cuda(self) -> bool:
        return any("cuda" in text for text in self.sources.values())

    @property
    def backend(self) -> str:
        """Backend of the solution's own code, by its languages and the imports of its sources."""
        if self.is_cpp:
            return "cuda" if self.needs_gpu else "eager"
        backends = {"triton"} if "triton" in self.languages else set()
        for path, text in self.sources.items():
            try:
                backends.add(SourceFacts(Path(path), text, ast.parse(text)).backend)
            except (SyntaxError, ValueError):
                continue  # no Python, or an error that the worker process reports
        order = ("cuda", "triton", "numba", "compile")
        return next((b for b in order if b in backends), "eager")


def read_solution(path: Path, definition: str) -> Solution:
    """Read a solution of the definition of this name.

    Raises :class:`WeftError` that names the field if the file is malformed or of another definition.
    """
    file = read_json(path)
    spec = file.get("spec").object()
    solves = file.get("definition")
    if solves.string() != definition:
        raise solves.error(definition, hint="REFERENCE is another definition than the solution's")
    languages, suite = _languages(spec)
    sources = _sources(file.get("sources"))
    entry = spec.get("entry_point")
    entry_file, _, function = entry.string().partition("::")
    if not entry_file or not function.isidentifier():
        raise entry.error("file.py::function")
    if entry_file not in sources:
        raise entry.error("a file of sources: " + ", ".join(sources), entry_file)
    suffixes = (*CPP_SUFFIXES, *HEADER_SUFFIXES) if set(languages) & set(CPP_LANGUAGES) else (".py",)
    if not set(languages) & set(OTHER_LANGUAGES) and PurePosixPath(entry_file).suffix not in suffixes:
        raise entry.error(f"a file with the suffix {' or '.join(suffixes)} for {', '.join(languages)}")
    if not spec.get("target_hardware").items():
        raise spec.get("target_hardware").error("at least one device, such as LOCAL")
    spec.get("dependencies", []).strings()
    binding = spec.get("binding", None)
    options = spec.get("compile_options", None)
    flags = options if options.value is not None else Field(options.file, options.path, {})
    default_binding = "torch" if suite == SOL_EXECBENCH else "tvm-ffi"
    return Solution(
        name=file.get("name").string(),
        definition=definition,
        author=file.get("author").string(),
        suite=suite,
        languages=languages,
        sources=sources,
        entry_file=entry_file,
        entry_function=function,
        destination_passing=spec.get("destination_passing_style", True).boolean(),
        binding=default_binding if binding.value is None else binding.choice(("torch", "tvm-ffi")),
        cflags=flags.get("cflags", []).strings(),
        cuda_flags=flags.get("cuda_cflags", list(CUDA_FLAGS)).strings(),
        link_flags=flags.get("ld_flags", list(LINK_FLAGS)).strings(),
    )


def _languages(spec: Field) -> tuple[tuple[str, ...], str]:
    known = (*PYTHON_LANGUAGES, *CPP_LANGUAGES, *OTHER_LANGUAGES)
    if "languages" not in spec.object().value:
        return (spec.get("language").choice(known),), FLASHINFER_BENCH
    field = spec.get("languages")
    languages = tuple(item.choice(known) for item in field.items())
    if not languages:
        raise field.error("at least one language")
    if set(languages) & set(PYTHON_LANGUAGES) and set(languages) & set(CPP_LANGUAGES):
        raise field.error("languages of Python or of C++, not of both")
    return languages, SOL_EXECBENCH


def _sources(field: Field) -> dict[str, str]:
    sources: dict[str, str] = {}
    for item in field.items():
        path = item.get("path")
        parts = PurePosixPath(path.string())
        # The file names the paths: no source may be written outside the folder.
        if parts.is_absolute() or ".." in parts.parts or "\\" in path.string():
            raise path.error("a relative path without ..")
        if path.string() in sources:
            raise path.error("another path for each source")
        sources[path.string()] = item.get("content").string()
    if not sources:
        raise field.error("at least one source file")
    return sources


def check_buildable(solution: Solution, device: str) -> None:
    """Raise :class:`NotSupported` if Weft has no builder for the solution, or it needs a GPU on a CPU."""
    others = [language for language in solution.languages if language in OTHER_LANGUAGES]
    if others:
        known = ", ".join((*PYTHON_LANGUAGES, *CPP_LANGUAGES))
        raise NotSupported(f"the candidate is in {', '.join(others)}; Weft loads {known}")
    if solution.is_cpp and solution.binding != "torch":
        raise NotSupported(
            f"the candidate's binding is {solution.binding}; "
            "Weft builds C++ and CUDA C++ with the binding torch"
        )
    language = {"cuda": "CUDA C++", "numba": "numba.cuda"}.get(solution.backend)
    if device == "cpu" and language:
        raise NotSupported(f"needs a GPU: the candidate is in {language}")


def write_sources(solution: Solution, folder: Path) -> None:
    """Write the source files into a folder."""
    for path, text in solution.sources.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)


# -- in the worker process -----------------------------------------------------------------------


def load_entry(solution: Solution, folder: Path) -> tuple[Callable[..., Any], bool]:
    """Import or build the solution in ``folder``; return its function and whether it is deterministic.

    Raises :class:`WeftError` if the entry file has no such function, and whatever the sources raise.
    """
    entry = folder / solution.entry_file
    if solution.is_cpp:
        module = _build(solution, folder)
    else:
        # The solution's own modules come first, as when its entry file is run as a script.
        sys.path[:0] = list(dict.fromkeys([str(entry.parent), str(folder)]))
        module = execute(entry, "solution")
    function = getattr(module, solution.entry_function, None)
    if not callable(function):
        raise WeftError(
            solution.entry_file,
            expected=f"{solution.entry_function}(...), the entry point",
            got="no function of this name",
        )
    return function, bool(getattr(module, "deterministic", True))


def _build(solution: Solution, folder: Path) -> Any:
    """Build C++ and CUDA C++ sources as a PyTorch extension; a restarted worker finds it built."""
    from torch.utils.cpp_extension import load

    build = folder / "build"
    build.mkdir(exist_ok=True)
    files = [p for p in solution.sources if PurePosixPath(p).suffix in CPP_SUFFIXES]
    uses_cuda = solution.needs_gpu or any(p.endswith(".cu") for p in files)
    return load(
        name="weft_solution",
        sources=[str(folder / p) for p in files],
        extra_cflags=["-O3", *solution.cflags],
        extra_cuda_cflags=list(solution.cuda_flags) if uses_cuda else None,
        extra_ldflags=list(solution.link_flags) if uses_cuda else None,
        extra_include_paths=[str(folder)],
        build_directory=str(build),
        with_cuda=uses_cuda,
    )
