"""Completion of names in the shell: operators, implementations, cases, demonstrations, pages.

``weft --install-completion`` installs it for bash, zsh or fish. A key press must be answered at once, so that
nothing here imports torch: operators and implementations come from the registry, and cases, which are Python
code beside the kernels, from ``case_names.json``. That file is generated:

    python -m weft.cli.completion     # writes it; `make docs` does the same
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from weft.core import registry
from weft.core.implementation import BACKENDS
from weft.core.json_files import read_json

CASE_NAMES = Path(__file__).with_name("case_names.json")


def case_names() -> str:
    """Return the text of ``case_names.json``: the names of each operator's cases. Imports torch."""
    names = {o: [c.name for c in registry.operator(o).cases] for o in registry.operator_names()}
    lines = [f"{json.dumps(operator)}: {json.dumps(cases)}" for operator, cases in names.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


@cache
def _stored_cases() -> Mapping[str, list[str]]:
    # A missing file costs completions of cases, and nothing else.
    return dict(read_json(CASE_NAMES)) if CASE_NAMES.is_file() else {}


def _operators(ctx: Any, param: Any, incomplete: str) -> list[str]:
    return _starting(registry.operator_names(), incomplete)


def _implementations(ctx: Any, param: Any, incomplete: str) -> list[str]:
    """Return the implementations of the operators typed before, or else of all operators."""
    names = (i for o in _typed_operators(ctx) for i in registry.implementation_names(o))
    return _starting(names, incomplete)


def _cases(ctx: Any, param: Any, incomplete: str) -> list[str]:
    """Return the cases of the operators typed before, or else of all operators."""
    names = (c for o in _typed_operators(ctx) for c in _stored_cases().get(o, ()))
    return _starting(names, incomplete)


def _demos(ctx: Any, param: Any, incomplete: str) -> list[str]:
    from weft.lab.demos import DEMOS

    return _starting(("all", *DEMOS), incomplete)


def _exercises(ctx: Any, param: Any, incomplete: str) -> list[str]:
    from weft.learn.exercise import path

    return _starting((e.id for e in path()), incomplete)


def _topics(ctx: Any, param: Any, incomplete: str) -> list[str]:
    from weft.workbench import pages

    topics = (*(p.topic for p in pages.pages()), *registry.operator_names())
    return _starting(topics, incomplete)


def _gpus(ctx: Any, param: Any, incomplete: str) -> list[str]:
    from weft.machine.specs import all_specs

    return _starting((spec.key for spec in all_specs()), incomplete)


def _claims(ctx: Any, param: Any, incomplete: str) -> list[str]:
    from weft.lab.claims.ledger import claim_ids

    return _starting(claim_ids(), incomplete)


def _typed_operators(ctx: Any) -> list[str]:
    """Return the known operators among the arguments that are typed already; all if there is none."""
    # Where the option's value is still missing, the parser stops and leaves the arguments in ctx.args.
    typed = [ctx.params.get("operator"), *(ctx.params.get("operators") or ()), *ctx.args]
    known = [name for name in typed if name in registry.REGISTRY]
    return known or registry.operator_names()


def _starting(names: Iterable[str], incomplete: str) -> list[str]:
    """Return the names that start with what is typed, each once, in their order."""
    return [name for name in dict.fromkeys(names) if name.startswith(incomplete)]


def _words(*words: str) -> Callable[[Any, Any, str], list[str]]:
    return lambda ctx, param, incomplete: _starting(words, incomplete)


# By the name of an option, or by an argument's name in the help. A name that means something else in one
# command has that command in front. Files are completed by the shell itself.
COMPLETERS: Mapping[str, Callable[[Any, Any, str], list[str]]] = {
    "OPERATOR": _operators,
    "--impl": _implementations,
    "--diff": _implementations,
    "--case": _cases,
    "--backend": _words(*BACKENDS),
    "selftest --operator": _operators,
    "demo NAME": _demos,
    "ops NAME": _operators,
    "ladder NAME": _operators,
    "GPU": _gpus,
    "hardware --operator": _operators,
    "claims ID": _claims,
    "TOPIC": _topics,
    "STUDY": _words("mlp", "loops", "sparsity"),
    "VERB": _words("shakespeare", "encode", "show"),
    "learn VERB": _words("next", "show", "check", "hint", "status", "page", "cards"),
    "learn ID": _exercises,
    "--preset": _words("tiny", "124M", "350M", "774M", "1.5B"),
    "--arch": _words("sm_80", "sm_90", "sm_100"),
    "--sanitize": _words("memcheck", "racecheck", "initcheck", "synccheck"),
}

if __name__ == "__main__":
    CASE_NAMES.write_text(case_names(), encoding="utf-8")
