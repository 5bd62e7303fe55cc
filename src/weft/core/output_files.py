"""Files that a command writes after long work: tried before it, and never left half written."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

from weft.core.errors import WeftError


def require_writable(path: Path, option: str) -> None:
    """Raise :class:`WeftError` unless ``path`` is a regular file that can be written, or can become one.

    Creates the folder if it is missing. The file is left as it was.
    """
    expected = "a file that can be written"
    try:
        if path.exists():
            # A device such as /dev/full can be opened, and fails or loses everything later.
            if not stat.S_ISREG(path.stat().st_mode):
                kind = "the folder" if path.is_dir() else "no regular file:"
                raise WeftError(option, expected=expected, got=f"{kind} {path}")
            os.close(os.open(path, os.O_WRONLY | os.O_APPEND))
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        # Tried under another name: the result's own must not exist before the result.
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:32]}.")
        os.close(handle)
        os.unlink(name)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        if isinstance(error, WeftError):
            raise
        got = f"{path}: {getattr(error, 'strerror', None) or error}"
        raise WeftError(option, expected=expected, got=got) from error


def require_folder(path: Path, option: str) -> None:
    """Create a folder; raise :class:`WeftError` if that fails or nothing can be written in it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except (OSError, ValueError) as error:
        got = f"{path}: {getattr(error, 'strerror', None) or error}"
        raise WeftError(option, expected="a folder that can be written", got=got) from error


def sync(path: Path) -> None:
    """Put a file, or a folder's list of names, onto the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class ResultFile:
    """JSON file for one result, created empty and exclusively before untrusted code runs.

    Until :meth:`write` the file is empty, and an empty file is no result. Code with the user's rights can
    write to it nevertheless: :meth:`is_untouched` tells, and :meth:`write` replaces whatever stands there.
    Such code can also end this process first. A reader therefore asks for the exit code and for a nonce
    that the code could not know.
    """

    def __init__(self, path: Path, option: str = "--out") -> None:
        """Create ``path``; raise :class:`WeftError` if it exists or cannot be created."""
        self.path, self._is_written = path, False
        # A link of this name must not lead the result to another file.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
        try:
            self._handle = os.open(path, flags, 0o600)
        except FileExistsError as error:
            hint = "each result gets a new file, so that an older one is never taken for it"
            raise WeftError(option, expected="a file that does not exist", got=path, hint=hint) from error
        except (OSError, ValueError) as error:
            got = f"{path}: {getattr(error, 'strerror', None) or error}"
            raise WeftError(option, expected="a file that can be created", got=got) from error

    def is_untouched(self) -> bool:
        """Return True if the path still names the empty file that was created."""
        own = os.fstat(self._handle)
        try:
            there = os.stat(self.path, follow_symlinks=False)
        except OSError:
            return False
        return (there.st_dev, there.st_ino, there.st_size) == (own.st_dev, own.st_ino, 0)

    def write(self, result: dict[str, Any]) -> None:
        """Write the result, on the disk when this returns. Raises OSError, then nothing is written."""
        # A new file takes the name: a handle that somebody else has open cannot change it.
        handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name[:32]}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, self.path)
        except BaseException:
            os.unlink(name)
            raise
        self._is_written = True

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the file if no result was written: a second try finds the name free."""
        if not self._is_written and self.is_untouched():
            self.path.unlink()
        os.close(self._handle)
