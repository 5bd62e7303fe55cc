"""Download a data set's file: complete and with the right hash, or not at all."""

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
    """A public file: its name here, its address, its size in bytes and its SHA-256."""

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
    """Download ``source`` into ``folder`` unless it is there; return its path, and True if downloaded.

    Nothing is written before the hash is checked, and the file gets its name once it is on the disk.
    It is read into memory, so it must be small. ``seconds`` is the timeout of the connection.

    Raises :class:`WeftError` without a network, if the content differs (on disk or downloaded), and if
    the folder cannot be written.
    """
    path = folder / source.name
    if path.exists():
        if not path.is_file() or _sha256(path) != source.sha256:
            hint = "remove it, or name another folder with --output"
            raise WeftError(f"{path} is there, and is not {source.url}", hint=hint)
        return path, False
    content = _download(source, seconds)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=f".{source.name}", suffix=".part")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o644)  # mkstemp's files are readable by their owner alone
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise WeftError(f"{path} cannot be written", got=error.strerror or str(error)) from error
    return path, True


def _download(source: Source, seconds: float) -> bytes:
    """Return the content after checking its hash; raises :class:`WeftError`."""
    try:
        with urlopen(source.url, timeout=seconds) as response:
            content = bytes(response.read(source.size + 1))  # one more, to notice a longer file
    except (OSError, http.client.HTTPException) as error:  # URLError and timeouts are OSErrors
        hint = "check the network, or copy the file here by hand: --data takes any text"
        reason = getattr(error, "reason", None) or str(error) or type(error).__name__
        raise WeftError(f"{source.url} could not be fetched", got=reason, hint=hint) from error
    digest = hashlib.sha256(content).hexdigest()
    if digest != source.sha256:
        got = f"{digest} of {len(content)} bytes"
        hint = "nothing was written; the download was cut off, or the file has changed"
        raise WeftError(f"{source.url}: SHA-256", expected=source.sha256, got=got, hint=hint)
    return content


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
