"""Atomic writes of small JSON files: a reader sees the old file or the new one, never a part."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from weft.core import WeftError


def write_json(path: Path, data: Any, *, what: str, hint: str) -> None:
    """Write ``data`` to ``path``; create the folder if it is missing.

    Raises :class:`WeftError` ("``what`` could not be stored") if it cannot be written.
    """
    text = json.dumps(data, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(text)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        got = error.strerror or str(error)
        raise WeftError(f"{what} could not be stored at {path}", got=got, hint=hint) from error
