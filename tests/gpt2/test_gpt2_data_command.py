"""``weft data``: encode, show, and download from a local server; nothing is left half-written."""

from __future__ import annotations

import dataclasses
import hashlib
import http.server
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.gpt2_toys import bpe, weft
from weft.gpt2.data import fetch as fetching


def test_encode_and_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two, files = tmp_path / "1.txt", tmp_path / "2.txt", bpe(tmp_path / "bpe")
    one.write_text("hello world")
    two.write_text("hello")
    out = ("--output", tmp_path / "out")
    assert weft("encode", one, two, *out, "--bpe-files", files, "--json") == 0
    (summary,) = json.loads(capsys.readouterr().out)
    path = tmp_path / "out" / "train_000000.bin"
    assert summary == {
        "path": str(path),
        "bytes": 1034,
        "tokens": 5,
        "head": [270, 259, 264, 270, 259],
    }
    assert weft("encode", one, *out) == 2
    assert "train_000000.bin is there already\nhint: --force" in capsys.readouterr().err
    assert weft("show", path, "--bpe-files", files) == 0
    shown = capsys.readouterr().out
    assert "5 tokens, 1,034 bytes" in shown and "first tokens: 270 259 264 270 259" in shown
    assert "'<|endoftext|>hello world<|endoftext|>hello'" in shown
    assert "all IDs are valid for gpt2 (271 tokens)" in shown
    assert weft("show", path, "--tokeniser", "bytes", "--json") == 1
    assert json.loads(capsys.readouterr().out)[0]["outside"] == {"place": 0, "id": 270}
    assert weft("encode", one, *out, "--force") == 0
    assert weft("show", path, "--tokeniser", "bytes") == 0
    assert "'hello world'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fetch"], "expected shakespeare, encode, show, got fetch"),
        (["encode"], "weft data encode: expected a file, got none"),
        (["shakespeare", "x"], "expected no file, got x"),
        (["show", "x", "--name", "y"], "weft data show: options: expected"),
        (["encode", "gone.txt"], "gone.txt: expected a text file, got none"),
        (["encode", "empty.txt"], "empty.txt is empty"),
        (["encode", "full.txt", "--name", "a/b"], "--name: expected"),
        (["encode", "full.txt", "--shard-tokens", 0], "tokens of a shard: expected 1 to"),
        (["show", "full.txt"], "full.txt: expected 1024 bytes of header, got 4"),
        (["encode", "full.txt", "--output", "full.txt"], "cannot be written"),
    ],
)
def test_invalid_calls(
    arguments: list[object],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").write_text("")
    Path("full.txt").write_text("text")
    assert weft(*arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err and not captured.out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty.txt", "full.txt"]


@pytest.fixture
def text_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A local server in place of the text's public address; the dictionary sets its response."""
    server_state: dict[str, Any] = {"content": b"First Citizen:\n" * 9, "status": 200, "asked": 0}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            server_state["asked"] += 1
            self.send_response(server_state["status"])
            self.send_header("Content-Length", str(server_state.get("length", len(server_state["content"]))))
            self.end_headers()
            self.wfile.write(server_state["content"])

        def log_message(self, *_: Any) -> None:
            """Write nothing to stderr, since the tests read it."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    right = dataclasses.replace(
        fetching.SHAKESPEARE,
        url=f"http://127.0.0.1:{server.server_port}/input.txt",
        size=len(server_state["content"]),
        sha256=hashlib.sha256(server_state["content"]).hexdigest(),
    )
    monkeypatch.setattr(fetching, "SHAKESPEARE", right)
    monkeypatch.setenv("no_proxy", "*")
    yield server_state
    server.shutdown()
    server.server_close()


def test_shakespeare_is_fetched_once_and_encoded(
    text_server: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new" / "data"
    assert weft("shakespeare", "--output", folder) == 0
    path = folder / "tinyshakespeare.txt"
    assert capsys.readouterr().out == f"{path}\n" and path.read_bytes() == text_server["content"]
    assert weft("shakespeare", "--output", folder, "--tokeniser", "bytes", "--json") == 0
    captured = capsys.readouterr()
    assert "there already" in captured.err and text_server["asked"] == 1
    assert [s["bytes"] for s in json.loads(captured.out)] == [135, 1024 + 270]
    assert sorted(p.name for p in folder.iterdir()) == [
        "tinyshakespeare.txt",
        "tinyshakespeare_000000.bin",
    ]
    path.write_text("another")
    assert weft("shakespeare", "--output", folder) == 2
    assert "is there, and is not" in capsys.readouterr().err
    assert path.read_text() == "another" and text_server["asked"] == 1


@pytest.mark.parametrize("fault", ["other", "longer", "cut off", "silent", "status", "offline"])
def test_failed_download_leaves_nothing(
    fault: str,
    text_server: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    right, message = text_server["content"], "SHA-256: expected "
    if fault == "other":
        text_server["content"] = right.replace(b"First", b"Worst")
    elif fault == "longer":
        text_server["content"] = right * 1000
    elif fault == "cut off":
        text_server["content"], text_server["length"] = right[:50], len(right)
    elif fault == "silent":
        text_server["content"] = b""
    elif fault == "status":
        text_server["status"], message = 404, "could not be fetched: got Not Found"
    else:
        with socket.socket() as free:  # nothing listens on a port that was just released
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        source = dataclasses.replace(fetching.SHAKESPEARE, url=f"http://127.0.0.1:{port}/input.txt")
        monkeypatch.setattr(fetching, "SHAKESPEARE", source)
        message = "could not be fetched: got [Errno 111] Connection refused"
    assert weft("shakespeare", "--output", tmp_path / "data") == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\nhint: ") == 1 and not captured.out
    assert not list(tmp_path.iterdir())
