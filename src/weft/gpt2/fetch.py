"""A file from its public home, whole and with the right hash, or not there at all."""

from __future__ import annotations

import hashlib
import http.client
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

from weft.core import WeftError


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a file is, and what it is: its size in bytes and its SHA-256."""

    name: str
    url: str
    size: int
    sha256: str


SHAKESPEARE = Source(
    name="tinyshakespeare.txt",
    url="https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    size=1_115_394,
    sha256="86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
)


def fetch(source: Source, folder: Path, *, seconds: float = 30.0) -> tuple[Path, bool]:
    """Fetch it into ``folder``, unless it is there already; its path, and whether it was fetched.

    Nothing is written before its hash is right, and it takes its name once it is on the disk; it
    is held in memory, so it is to be small. ``seconds`` is how long the other side may keep silent.

    Raises :class:`WeftError` with no network, for other content (there or fetched), and where the
    folder cannot be written.
    """
    path = folder / source.name
    if path.exists():
        if not path.is_file() or _hash(path) != source.sha256:
            hint = "remove it, or name another folder with --output"
            raise WeftError(f"{path} is there, and is not {source.url}", hint=hint)
        return path, False
    content = _download(source, seconds)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, part = tempfile.mkstemp(dir=folder, prefix=f".{source.name}", suffix=".part")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(part, 0o644)  # mkstemp's is for its owner alone
            os.replace(part, path)
        except BaseException:
            os.unlink(part)
            raise
    except OSError as error:
        raise WeftError(f"{path} cannot be written", got=error.strerror or str(error)) from error
    return path, True


def _download(source: Source, seconds: float) -> bytes:
    """Its bytes, a few more at most than it should have; raises :class:`WeftError`."""
    try:
        with urlopen(source.url, timeout=seconds) as answer:
            content = bytes(answer.read(source.size + 1))
    except (OSError, http.client.HTTPException) as error:  # URLError and timeouts are OSErrors
        hint = "is there a network? The file can be brought by hand: --data takes any text"
        reason = getattr(error, "reason", None) or str(error) or type(error).__name__
        raise WeftError(f"{source.url} could not be fetched", got=reason, hint=hint) from error
    found = hashlib.sha256(content).hexdigest()
    if found != source.sha256:
        got = f"{found} of {len(content)} bytes"
        hint = "nothing was kept; it was cut off on its way, or is another text now"
        raise WeftError(f"{source.url}: SHA-256", expected=source.sha256, got=got, hint=hint)
    return content


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
