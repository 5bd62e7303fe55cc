"""A cell tells how its guest ended in one line and bounded time, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from weft.core import WeftError
from weft.workbench import cell_processes, cell_start
from weft.workbench.cell import FORGED, Cell, CellDied, GuestError, Limits

TOYS = "cell_toys:handlers"
MIB = 1 << 20


def a_cell(argument: dict | None = None, **limits: float) -> Cell:
    return Cell(TOYS, limits=Limits(**{"seconds": 20.0, **limits}), argument=argument)


@pytest.fixture(scope="module")
def cell() -> Iterator[Cell]:
    with a_cell() as made:
        yield made


def gone(pid: int) -> bool:
    return pid not in cell_processes.alive()


def assert_nothing_left(cell: Cell) -> None:
    assert cell.left == []
    assert not os.path.lexists(cell._folder)
    assert list(cell_processes.marked(cell._marker)) == []
    guest = cell._facts["guest"]
    assert not [p for p, (_, session) in cell_processes.alive().items() if session == guest]


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)
    return holds()


# --- what a guest is, and what it may ----------------------------------------------------------


def test_a_forked_guest_computes_on_several_threads(cell: Cell) -> None:
    reply = cell.ask("work")
    a = torch.arange(360_000, dtype=torch.float64).reshape(600, 600).div(1e7).requires_grad_()
    out = (a @ a.T).exp().log()
    out.sum().backward()
    assert reply.payload == {"threads": 2}
    torch.testing.assert_close(reply.tensors, [out.detach(), a.grad])


def test_the_guest_is_shut_in() -> None:
    with a_cell() as cell:
        seen = cell.ask("around").payload
        assert seen["folder"] == seen["temporary"] == cell._folder
        assert seen["mode"] == 0o700
        assert seen["stdin"] == os.devnull
        assert seen["session"] == seen["pid"] == cell.pid
        assert seen["core"] == 0
        assert seen["home"] == os.environ.get("HOME")
        # 0, 1, 2, the channel, and the listing's own; of these only the first three are inherited.
        assert len(seen["fds"]) == 5
        assert seen["inherited"] == "4"
    assert_nothing_left(cell)


# --- what raises: the guest lives on ----------------------------------------------------------


@pytest.mark.parametrize(
    ("verb", "payload", "line"),
    [
        ("complain", {"how": "two\nlines\x1b[31m"}, "ValueError: two lines [31m"),
        ("complain", {"how": "rudely"}, "Rude: (its message cannot be read)"),
        ("complain", {"how": "interrupt"}, "KeyboardInterrupt: not by the user"),
        ("unspeakable", {}, "TypeError: Object of type object is not JSON serializable"),
        ("no such verb", {}, "KeyError: 'no such verb'"),
    ],
)
def test_what_a_handler_raises_is_one_line(cell: Cell, verb: str, payload: dict, line: str) -> None:
    with pytest.raises(GuestError) as raised:
        cell.ask(verb, payload)
    assert str(raised.value) == line
    assert cell.ask("echo", {"still": "here"}).payload == {"still": "here"}


def test_a_long_complaint_is_cut(cell: Cell) -> None:
    with pytest.raises(GuestError) as raised:
        cell.ask("complain", {"how": "x" * 5000})
    assert len(str(raised.value)) == 300


@pytest.mark.parametrize(
    ("argument", "line"),
    [
        ({"raise": "no module named flash"}, "ImportError: no module named flash"),
        ({"source": "def f(:\n"}, "SyntaxError: invalid syntax (mine.py, line 1)"),
    ],
)
def test_a_file_that_does_not_load_is_reported_at_the_first_ask(argument: dict, line: str) -> None:
    with a_cell(argument) as cell:
        with pytest.raises(GuestError) as raised:
            cell.ask("echo")
        assert str(raised.value) == line
        assert "Traceback" in cell.output
    assert_nothing_left(cell)


# --- what ends the guest ----------------------------------------------------------------------

SEGFAULT = "killed by SIGSEGV (segmentation fault)"
OF_ITSELF = "ended itself (os._exit or sys.exit, code {}) without an answer"
DEATHS = [
    ("hang", {}, "ran longer than 1 s"),
    ("chatter_for_ever", {}, "ran longer than 1 s"),
    ("segfault", {}, SEGFAULT),
    ("abort", {}, "killed by SIGABRT (aborted)"),
    ("exit_at_once", {"code": 0}, OF_ITSELF.format(0)),
    ("exit_at_once", {"code": 3}, OF_ITSELF.format(3)),
    ("exit_politely", {"code": None}, OF_ITSELF.format(0)),
    ("exit_politely", {"code": "sorry"}, OF_ITSELF.format(1)),
    ("garbage", {}, FORGED),
    ("forge", {}, FORGED),
    ("forge", {"nonce": None}, FORGED),
    ("forge", {"error": "ValueError: it was not me"}, FORGED),
    ("raw", {"text": "[1, 2]"}, FORGED),
    ("raw", {"text": "[" * 100_000}, FORGED),
    ("raw", {"text": '{"tensors": [["float32", [1099511627776]]]}'}, FORGED),
    ("raw", {"text": '{"tensors": [["float32", [-1]]]}'}, FORGED),
    ("raw", {"text": '{"tensors": [["load", [1]]]}'}, FORGED),
    ("raw", {"text": '{"tensors": 3}'}, FORGED),
    ("shut", {}, "closed its channel without an answer"),
    ("kill_the_keeper", {}, "ended the process that keeps it"),
]


@pytest.mark.parametrize(
    ("verb", "payload", "reason"), DEATHS, ids=[f"{v}-{i}" for i, (v, *_) in enumerate(DEATHS)]
)
def test_how_a_guest_ended(verb: str, payload: dict, reason: str) -> None:
    start = time.monotonic()
    with a_cell() as cell:
        assert cell.ask("echo").payload == {}
        with pytest.raises(CellDied) as died:
            cell.ask(verb, payload, seconds=1)
        assert died.value.reason == str(died.value) == reason
        assert_nothing_left(cell)  # at once, without waiting for close
        with pytest.raises(CellDied, match="^" + reason[:10]):
            cell.ask("echo")
    assert time.monotonic() - start < 20
    with a_cell() as another:
        assert another.ask("echo", {"a": 1}).payload == {"a": 1}


@pytest.mark.parametrize("verb", ["eat", "eat_in_a_child"])
def test_memory_is_bounded(verb: str) -> None:
    reason = r"^used more than 1 GiB of memory$"
    with a_cell(memory_bytes=1 << 30) as cell, pytest.raises(CellDied, match=reason):
        cell.ask(verb)
    assert_nothing_left(cell)


def test_memory_that_processes_share_is_counted_once() -> None:
    with a_cell(memory_bytes=1200 * MIB) as cell:
        assert cell.ask("share").payload["resident"] > 2400 * MIB
    assert_nothing_left(cell)


def test_an_answer_given_before_the_end_counts_and_the_next_ask_says_how_it_ended() -> None:
    with a_cell() as cell:
        assert cell.ask("exit_after_the_answer").payload == {}
        time.sleep(0.5)
        with pytest.raises(CellDied, match="code 3"):
            cell.ask("echo")
    assert_nothing_left(cell)


def test_a_word_too_many_is_a_forgery() -> None:
    with a_cell() as cell:
        cell.ask("say_more")
        time.sleep(0.5)
        with pytest.raises(CellDied, match=FORGED):
            cell.ask("echo")
    assert_nothing_left(cell)


def test_output_is_kept_up_to_a_limit() -> None:
    with a_cell(output_bytes=4096) as cell:
        cell.ask("chatter", {"mib": 50})
        text = cell.output
        assert text.startswith("the first line\nxxx")
        assert text.endswith("xxx\nthe last line\n")
        assert "bytes left out" in text
        assert len(text) < 4096 + 100
    assert cell.output == text


def test_what_was_printed_before_the_end_is_there() -> None:
    with a_cell() as cell:
        with pytest.raises(CellDied):
            cell.ask("exit_at_once", {"code": 0})
        assert cell.output == "PASS\n"


# --- what is left behind ----------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["leave_a_child", "leave_daemons"])
def test_processes_left_behind_are_ended(verb: str) -> None:
    with a_cell() as cell:
        pids = cell.ask(verb).payload["pids"]
        assert pids
        assert not any(gone(p) for p in pids)
    assert all(gone(p) for p in pids)
    assert_nothing_left(cell)


def test_a_daemon_is_ended_though_the_keeper_is(tmp_path: Path) -> None:
    note = tmp_path / "pids"
    with a_cell() as cell, pytest.raises(CellDied):
        cell.ask("leave_and_kill_the_keeper", {"note": str(note)})
    assert all(gone(p) for p in json.loads(note.read_text()))
    assert_nothing_left(cell)


def test_files_left_behind_are_removed_and_no_others(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("mine")
    with a_cell() as cell:
        made = cell.ask("litter", {"outside": str(tmp_path)}).payload["made"]
        assert made.startswith(cell._folder)
    assert_nothing_left(cell)
    assert (tmp_path / "kept").read_text() == "mine"


SCRIPT = """
import json, signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
from weft.workbench import cell_start
from weft.workbench.cell import Cell
cell_start.HEAVY = cell_start.OURS = ()  # for the sake of time
if __name__ == "__main__":
    cell = Cell("cell_toys:handlers")
    pids = cell.ask("leave_daemons").payload["pids"]
    print(json.dumps([cell._folder, cell.pid, *pids]), flush=True)
    {then}
"""


@pytest.mark.parametrize(
    ("then", "send", "code"),
    [
        ("time.sleep(1000)", signal.SIGKILL, -signal.SIGKILL),
        ("cell.ask('hang')", signal.SIGINT, -signal.SIGINT),
        pytest.param("time.sleep(9)", signal.SIGTERM, -signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("pass", None, 0, marks=pytest.mark.slow),
        pytest.param("1 / 0", None, 1, marks=pytest.mark.slow),
    ],
    ids=["killed", "interrupted", "terminated", "not-closed", "raised"],
)
def test_a_judge_that_ends_leaves_nothing(
    then: str, send: signal.Signals | None, code: int, tmp_path: Path
) -> None:
    script = tmp_path / "judge.py"
    script.write_text(SCRIPT.format(then=then))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    ) as judge:
        assert judge.stdout is not None
        folder, *pids = json.loads(judge.stdout.readline())
        if send is not None:
            time.sleep(0.2)
            judge.send_signal(send)
        assert judge.wait(20) == code
    assert within(10, lambda: not os.path.exists(folder) and all(gone(p) for p in pids))


# --- many at once -----------------------------------------------------------------------------


def test_cells_of_several_threads_do_not_disturb_each_other() -> None:
    verbs = ["echo", "segfault", "echo", "exit_at_once", "complain", "echo"]
    ends: dict[int, str] = {}

    def judge(index: int, verb: str) -> None:
        with a_cell() as cell:
            try:
                cell.ask("echo", {"index": index})
                ends[index] = str(cell.ask(verb, {"code": index, "how": "x"}).payload["code"])
            except (CellDied, GuestError) as error:
                ends[index] = str(error)

    threads = [threading.Thread(target=judge, args=pair) for pair in enumerate(verbs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert ends == {
        **{index: str(index) for index in (0, 2, 5)},
        1: SEGFAULT,
        3: OF_ITSELF.format(3),
        4: "ValueError: x",
    }


def test_a_fork_server_that_was_killed_is_started_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cell_start, "HEAVY", ())  # another than that of the tests beside this
    monkeypatch.setattr(cell_start, "OURS", ())
    with a_cell() as cell:
        cell.ask("echo")
        os.kill(cell._server.process.pid, signal.SIGKILL)
        assert cell.ask("echo", {"a": 1}).payload == {"a": 1}  # its guests do not depend on it
        with a_cell() as another:
            assert another.ask("echo", {"b": 2}).payload == {"b": 2}
    assert_nothing_left(cell)


def test_a_start_that_fails_is_not_a_candidates_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cell_start, "HEAVY", ("no server has this yet",))
    monkeypatch.setattr(cell_start, "COMMAND", "raise SystemExit('no torch here')")
    with pytest.raises(RuntimeError, match=r"no process can be started .* no torch here"):
        a_cell()


def test_a_guest_starts_soon() -> None:
    took = []
    for _ in range(5):
        start = time.monotonic()
        with a_cell() as cell:
            cell.ask("echo")
            took.append(time.monotonic() - start)
    assert min(took) < 1.0, took  # 0.03 s where nothing else runs; an import of torch takes 3 s


def test_limits_are_checked_where_they_are_made() -> None:
    with pytest.raises(WeftError, match="seconds must be positive"):
        Limits(seconds=0)


@pytest.mark.gpu
def test_cuda_starts_in_each_guest_and_its_memory_is_bounded() -> None:
    torch.zeros(1, device="cuda")  # the judge has CUDA open as well
    with a_cell(device_fraction=0.01) as cell:
        assert cell.ask("on_cuda", {"mib": 16}, [torch.arange(5.0)]).tensors[0].tolist() == [
            *(0.0, 2.0, 4.0, 6.0, 8.0)
        ]
        with pytest.raises(GuestError, match="OutOfMemoryError"):
            cell.ask("on_cuda", {"mib": 16384}, [torch.arange(5.0)])
    assert_nothing_left(cell)


@pytest.mark.gpu
def test_after_an_illegal_access_the_next_cell_has_a_healthy_context() -> None:
    with a_cell() as cell, pytest.raises(GuestError, match="CUDA"):
        cell.ask("break_cuda")
    assert_nothing_left(cell)
    with a_cell() as cell:
        assert cell.ask("on_cuda", {"mib": 1}, [torch.ones(3)]).tensors[0].tolist() == [2.0] * 3
