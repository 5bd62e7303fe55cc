"""A run's folder: what the run is, in ``run.json``, and that no other run writes over it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from weft.core import WeftError
from weft.gpt2 import checkpoint
from weft.gpt2.config import ModelConfig
from weft.gpt2.files import replace, writing
from weft.gpt2.settings import LOOSE, TrainConfig, option

RUN = "run.json"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is trained, on what, and how: all that decides a run's numbers.

    ``tokeniser`` is its name; ``data`` where the text comes from, or None for the standard
    library's source; ``bpe_files`` the tokeniser's own, or None; ``start`` the trained model whose
    weights it begins with, or None; ``identity`` a hash of each part of the tokens.
    """

    model: ModelConfig
    train: TrainConfig
    tokeniser: str
    data: str | None
    bpe_files: str | None
    start: str | None
    identity: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


class Folder:
    """The folder ``path``, made and claimed for ``plan``.

    Args:
        resume: whether a run of this plan is there already, and goes on.
        say: takes lines for the user.
        writes: whether this process is the one that writes.

    Raises:
        WeftError: there is something already, without ``resume``; with it there is no run, or one
            of another plan; or the folder cannot be written.
    """

    def __init__(
        self,
        path: Path,
        plan: Plan,
        *,
        resume: bool,
        say: Callable[[str], None],
        writes: bool = True,
    ) -> None:
        self.path, self.plan, self.resumed, self.say = path, plan, resume, say
        self.checkpoints = path / checkpoint.FOLDER
        if resume:
            self.agree(read(path))
        elif writes:
            self._claim()

    def _claim(self) -> None:
        refuse_taken(self.path)
        with writing("the run", self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            replace(self.path / RUN, json.dumps(self.plan.to_json(), indent=1) + "\n")

    def agree(self, stored: Mapping[str, Any]) -> None:
        """Raise :class:`WeftError` where a stored plan would compute something else than ours.

        Where checkpoints are written, what is shown on the way, and into how many parts a step is
        split may differ.
        """
        mine = json.loads(json.dumps(self.plan.to_json()))
        hint = "leave it out to go on, or begin a new run with another --out"
        if stored["identity"] != mine["identity"]:
            was, now = (str(p["data"] or "the standard library") for p in (stored, mine))
            expected = f"the tokens that the run began with, of {was}"
            what = f"the text of {self.path} has changed"
            raise WeftError(what, expected=expected, got=f"others, of {now}", hint=hint)
        for part in ("train", "model"):
            for name, value in stored[part].items():
                if mine[part].get(name) != value and name not in LOOSE:
                    got = mine[part].get(name)
                    what = f"{option(name)} on --resume"
                    raise WeftError(what, expected=value, got=got, hint=hint)
        if stored["tokeniser"] != mine["tokeniser"]:
            expected, got = stored["tokeniser"], mine["tokeniser"]
            raise WeftError("--tokeniser on --resume", expected=expected, got=got, hint=hint)


def refuse_taken(path: Path) -> None:
    """Raise :class:`WeftError` where ``path`` is a file, or a folder that is not empty."""
    if path.exists() and not path.is_dir():
        raise WeftError("--out", expected="a folder", got=f"the file {path}")
    # A hidden file is what a crash left before there was a run.
    if path.is_dir() and any(not p.name.startswith(".") for p in path.iterdir()):
        is_run = (path / RUN).is_file()
        got = "a run" if is_run else "files that are no run's"
        hint = "--resume goes on with it; another --out begins a new one"
        raise WeftError(
            f"{path} is there already",
            expected="a new folder",
            got=got,
            hint=hint if is_run else "name another --out",
        )


def read(path: Path) -> dict[str, Any]:
    """A run's plan as plain data; raises :class:`WeftError` where the folder holds no run."""
    try:
        found = json.loads((path / RUN).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        hint = "without --resume a new run begins there"
        raise WeftError(f"{path} holds no run", expected=RUN, got=error, hint=hint) from error
    assert isinstance(found, dict)
    return found
