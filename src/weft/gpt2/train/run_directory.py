"""``RunDirectory``: a run's directory, which has its plan in ``run.json`` and belongs to no other run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from weft.core import WeftError
from weft.core.json_files import read_json
from weft.gpt2.model.config import ModelConfig
from weft.gpt2.train.checkpoint_files import CHECKPOINTS
from weft.gpt2.train.durable_io import replace_text, write_errors
from weft.gpt2.train.train_config import MAY_CHANGE_ON_RESUME, TrainConfig, option_name

RUN = "run.json"
LATER_OPTIONS = ("sparse", "sparse_refresh")  # of a plan; None in plans that were written without them


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """Model, settings and data of a run: everything that determines its numbers.

    ``tokeniser`` is its name. ``data`` is the path of the text, None for the standard library's source;
    ``bpe_files`` the folder of the tokeniser's files, or None; ``start`` the trained model whose weights
    it starts with, or None; ``identity`` a hash of the training and the validation tokens.
    """

    model: ModelConfig
    train: TrainConfig
    tokeniser: str
    data: str | None
    bpe_files: str | None
    start: str | None
    identity: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


class RunDirectory:
    """The directory of a run: created for a new run, checked against the plan of a resumed one.

    Args:
        path: the directory.
        plan: the run's plan.
        resume: whether the run is there already.
        log: receives lines for the user.
        writes: whether this process writes files.

    Raises:
        WeftError: without ``resume``, the directory is not empty; with it, there is no run or one of
            another plan; or the directory cannot be written.
    """

    def __init__(
        self,
        path: Path,
        plan: RunPlan,
        *,
        resume: bool,
        log: Callable[[str], None],
        writes: bool = True,
    ) -> None:
        self.path, self.plan, self.resumed, self.log = path, plan, resume, log
        self.checkpoints = path / CHECKPOINTS
        if resume:
            self.check_same_plan(read_plan(path))
        elif writes:
            require_new(path)
            with write_errors("the run", path):
                path.mkdir(parents=True, exist_ok=True)
                replace_text(path / RUN, json.dumps(plan.to_json(), indent=1) + "\n")

    def check_same_plan(self, stored: Mapping[str, Any]) -> None:
        """Raise :class:`WeftError` if a stored plan would compute something else than this one.

        Fields of ``MAY_CHANGE_ON_RESUME`` may differ.
        """
        # Through JSON, so that both plans have JSON's types.
        plan = json.loads(json.dumps(self.plan.to_json()))
        hint = "leave it out to resume, or start a new run with another --out"
        if stored["identity"] != plan["identity"]:
            old, new = (str(p["data"] or "the standard library") for p in (stored, plan))
            expected = f"the tokens that the run began with, of {old}"
            summary = f"the text of {self.path} has changed"
            raise WeftError(summary, expected=expected, got=f"others, of {new}", hint=hint)
        for section in ("train", "model"):
            for name, value in stored[section].items():
                if plan[section].get(name) != value and name not in MAY_CHANGE_ON_RESUME:
                    summary, got = f"{option_name(name)} on --resume", plan[section].get(name)
                    raise WeftError(summary, expected=value, got=got, hint=hint)
        if stored["tokeniser"] != plan["tokeniser"]:
            expected, got = stored["tokeniser"], plan["tokeniser"]
            raise WeftError("--tokeniser on --resume", expected=expected, got=got, hint=hint)


def require_new(path: Path) -> None:
    """Raise :class:`WeftError` if ``path`` is a file, or a folder that is not empty."""
    if path.exists() and not path.is_dir():
        raise WeftError("--out", expected="a folder", got=f"the file {path}")
    # A crash before run.json was complete leaves a hidden file, which does not count.
    if path.is_dir() and any(not p.name.startswith(".") for p in path.iterdir()):
        is_run = (path / RUN).is_file()
        raise WeftError(
            f"{path} is there already",
            expected="a new folder",
            got="a run" if is_run else "files that are no run's",
            hint="--resume continues it; another --out starts a new one" if is_run else "name another --out",
        )


def read_plan(path: Path) -> dict[str, Any]:
    """Read a run's plan as plain data.

    Raises :class:`WeftError` if the directory has no run, or if its plan lacks a field or has one of another
    type.
    """
    try:
        plan = read_json(path / RUN)
    except (OSError, ValueError) as error:
        hint = "without --resume a new run begins there"
        raise WeftError(f"{path} holds no run", expected=RUN, got=error, hint=hint) from error
    types: dict[str, Any] = {"model": dict, "train": dict, "identity": dict, "tokeniser": str}
    types |= dict.fromkeys(("data", "bpe_files", "start"), str | None)
    for name, expected in types.items():
        if not isinstance(plan, dict) or not isinstance(plan.get(name, ...), expected):
            got = f"{plan.get(name)!r:.60}" if isinstance(plan, dict) else type(plan).__name__
            raise WeftError(f"{path / RUN}: {name}", expected="what weft train wrote", got=got)
    # Runs that were written before an option existed had none.
    plan["train"] = {**dict.fromkeys(LATER_OPTIONS), **plan["train"]}
    for section, kind in (("model", ModelConfig), ("train", TrainConfig)):
        if missing := sorted(f.name for f in fields(kind) if f.name not in plan[section]):
            raise WeftError(f"{path / RUN}: {section}", expected=", ".join(missing), got="none")
    return dict(plan)
