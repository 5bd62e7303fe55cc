"""A sandbox reports its worker's end in one line and in bounded time, and leaves nothing behind."""

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

from weft import machine
from weft.core import WeftError
from weft.machine import driver
from weft.workbench.calls.errors import SandboxDied, WorkerError
from weft.workbench.sandbox import fork_client, process_tree
from weft.workbench.sandbox.process import FORGED, Limits, Sandbox

HANDLERS = "helpers.sandbox_handlers:handlers"
MIB = 1 << 20


def make_sandbox(argument: dict | None = None, **limits: float) -> Sandbox:
    return Sandbox(HANDLERS, limits=Limits(**{"seconds": 20.0, **limits}), argument=argument)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with make_sandbox() as created:
        yield created


def gone(pid: int) -> bool:
    return pid not in process_tree.running_processes()


def assert_nothing_left(sandbox: Sandbox) -> None:
    assert sandbox.remaining_processes == []
    assert not os.path.lexists(sandbox._folder)
    assert list(process_tree.marked_processes(sandbox._marker)) == []
    worker = sandbox._facts["worker"]
    assert not [p for p, (_, session) in process_tree.running_processes().items() if session == worker]


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)
    return holds()


# --- isolation and resources ----------------------------------------------------------


def test_a_forked_worker_computes_on_several_threads(sandbox: Sandbox) -> None:
    reply = sandbox.request("work")
    a = torch.arange(360_000, dtype=torch.float64).reshape(600, 600).div(1e7).requires_grad_()
    out = (a @ a.T).exp().log()
    out.sum().backward()
    assert reply.payload == {"threads": 2}
    torch.testing.assert_close(reply.tensors, [out.detach(), a.grad])


def test_the_worker_is_isolated() -> None:
    with make_sandbox() as sandbox:
        view = sandbox.request("surroundings").payload
        assert view["folder"] == view["temporary"] == sandbox._folder
        assert view["mode"] == 0o700
        assert view["stdin"] == os.devnull
        assert view["session"] == view["pid"] == sandbox.pid
        assert view["core"] == 0
        assert view["home"] == os.environ.get("HOME")
        # 0, 1, 2, the channel, and the listing's own; of these only the first three are inherited.
        assert len(view["fds"]) == 5
        assert view["inherited"] == "4"
    assert_nothing_left(sandbox)


# --- handlers that raise: the worker lives on ----------------------------------------------------------


@pytest.mark.parametrize(
    ("verb", "payload", "line"),
    [
        ("raise_error", {"how": "two\nlines\x1b[31m"}, "ValueError: two lines [31m"),
        ("raise_error", {"how": "rudely"}, "BrokenMessage: (its message cannot be read)"),
        ("raise_error", {"how": "interrupt"}, "KeyboardInterrupt: not by the user"),
        ("not_serializable", {}, "TypeError: Object of type object is not JSON serializable"),
        ("no such verb", {}, "KeyError: 'no such verb'"),
    ],
)
def test_an_exception_of_a_handler_is_one_line(sandbox: Sandbox, verb: str, payload: dict, line: str) -> None:
    with pytest.raises(WorkerError) as raised:
        sandbox.request(verb, payload)
    assert str(raised.value) == line
    assert sandbox.request("echo", {"still": "here"}).payload == {"still": "here"}


def test_a_long_error_message_is_shortened(sandbox: Sandbox) -> None:
    with pytest.raises(WorkerError) as raised:
        sandbox.request("raise_error", {"how": "x" * 5000})
    assert len(str(raised.value)) == 300


@pytest.mark.parametrize(
    ("argument", "line"),
    [
        ({"raise": "no module named flash"}, "ImportError: no module named flash"),
        ({"source": "def f(:\n"}, "SyntaxError: invalid syntax (mine.py, line 1)"),
    ],
)
def test_a_file_that_does_not_load_is_reported_at_the_first_request(argument: dict, line: str) -> None:
    with make_sandbox(argument) as sandbox:
        with pytest.raises(WorkerError) as raised:
            sandbox.request("echo")
        assert str(raised.value) == line
        assert "Traceback" in sandbox.output
    assert_nothing_left(sandbox)


# --- the end of a worker ----------------------------------------------------------------------

SEGFAULT = "killed by SIGSEGV (segmentation fault)"
OF_ITSELF = "ended itself (os._exit or sys.exit, code {}) without an answer"
DEATHS = [
    ("hang", {}, "ran longer than 1 s"),
    ("print_for_ever", {}, "ran longer than 1 s"),
    ("segfault", {}, SEGFAULT),
    ("abort", {}, "killed by SIGABRT (aborted)"),
    ("exit_at_once", {"code": 0}, OF_ITSELF.format(0)),
    ("exit_at_once", {"code": 3}, OF_ITSELF.format(3)),
    ("exit_politely", {"code": None}, OF_ITSELF.format(0)),
    ("exit_politely", {"code": "sorry"}, OF_ITSELF.format(1)),
    (
        "fail_to_send",
        {},
        "failed outside of a call: OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB",
    ),
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
    ("raw", {"text": '{"tensors": [["float32", [1], "00", 0]]}'}, FORGED),
    ("close_channel", {}, "closed its channel without an answer"),
    ("kill_the_supervisor", {}, "ended the process that keeps it"),
]


@pytest.mark.sampled(2, each=lambda verb, payload, reason: reason)
@pytest.mark.parametrize(
    ("verb", "payload", "reason"), DEATHS, ids=[f"{v}-{i}" for i, (v, *_) in enumerate(DEATHS)]
)
def test_the_end_of_a_worker_is_described(verb: str, payload: dict, reason: str) -> None:
    with make_sandbox() as sandbox:
        assert sandbox.request("echo").payload == {}
        with pytest.raises(SandboxDied) as died:
            sandbox.request(verb, payload, seconds=1)
        assert died.value.reason == str(died.value) == reason
        assert_nothing_left(sandbox)  # at once, without waiting for close
        with pytest.raises(SandboxDied, match="^" + reason[:10]):
            sandbox.request("echo")
    with make_sandbox() as another:
        assert another.request("echo", {"a": 1}).payload == {"a": 1}


@pytest.mark.parametrize("verb", ["allocate", "allocate_in_a_child"])
def test_memory_is_bounded(verb: str) -> None:
    reason = r"^used more than 1 GiB of memory$"
    with make_sandbox(memory_bytes=1 << 30) as sandbox, pytest.raises(SandboxDied, match=reason):
        sandbox.request(verb)
    assert_nothing_left(sandbox)


def test_memory_that_processes_share_is_counted_once() -> None:
    with make_sandbox(memory_bytes=1200 * MIB) as sandbox:
        assert sandbox.request("share").payload["resident"] > 2400 * MIB
    assert_nothing_left(sandbox)


def test_a_reply_before_the_end_counts_and_the_next_request_describes_the_end() -> None:
    with make_sandbox() as sandbox:
        assert sandbox.request("exit_after_the_reply").payload == {}
        time.sleep(0.5)
        with pytest.raises(SandboxDied, match="code 3"):
            sandbox.request("echo")
    assert_nothing_left(sandbox)


def test_an_unrequested_reply_is_a_forgery() -> None:
    with make_sandbox() as sandbox:
        sandbox.request("reply_twice")
        time.sleep(0.5)
        with pytest.raises(SandboxDied, match=FORGED):
            sandbox.request("echo")
    assert_nothing_left(sandbox)


def test_output_is_kept_up_to_a_limit() -> None:
    with make_sandbox(output_bytes=4096) as sandbox:
        sandbox.request("print_much", {"mib": 50})
        text = sandbox.output
        assert text.startswith("the first line\nxxx")
        assert text.endswith("xxx\nthe last line\n")
        assert "bytes left out" in text
        assert len(text) < 4096 + 100
    assert sandbox.output == text


def test_output_before_the_end_is_available() -> None:
    with make_sandbox() as sandbox:
        with pytest.raises(SandboxDied):
            sandbox.request("exit_at_once", {"code": 0})
        assert sandbox.output == "PASS\n"


# --- remaining processes and files ----------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["leave_a_child", "leave_daemons"])
def test_processes_left_behind_are_ended(verb: str) -> None:
    with make_sandbox() as sandbox:
        pids = sandbox.request(verb).payload["pids"]
        assert pids
        assert not any(gone(p) for p in pids)
    assert all(gone(p) for p in pids)
    assert_nothing_left(sandbox)


def test_a_daemon_is_ended_although_the_supervisor_was_killed(tmp_path: Path) -> None:
    note = tmp_path / "pids"
    with make_sandbox() as sandbox, pytest.raises(SandboxDied):
        sandbox.request("leave_and_kill_the_supervisor", {"note": str(note)})
    assert all(gone(p) for p in json.loads(note.read_text()))
    assert_nothing_left(sandbox)


def test_files_left_behind_are_removed_and_no_others(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("mine")
    with make_sandbox() as sandbox:
        created = sandbox.request("litter", {"outside": str(tmp_path)}).payload["created"]
        assert created.startswith(sandbox._folder)
    assert_nothing_left(sandbox)
    assert (tmp_path / "own").read_text() == "mine"


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_paused_sandbox_stands_still_and_can_be_used_and_closed() -> None:
    def states(pids: list[int]) -> set[str]:
        stats = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2] for pid in pids)
        return {stat.split()[0] for stat in stats}

    with make_sandbox() as sandbox:
        sandbox.pause()  # before the worker is known: nothing to stop
        pids = [sandbox.pid, *sandbox.request("leave_daemons").payload["pids"]]
        sandbox.pause()
        assert states(pids) == {"T"} and sandbox.paused_cpu_seconds == 0.0
        assert sandbox.request("echo", {"a": 1}).payload == {"a": 1}
        assert "T" not in states(pids)
        with pytest.raises(SandboxDied, match="ran longer than 1 s"):
            sandbox.request("hang", seconds=1)
    with make_sandbox() as sandbox:
        pids = [sandbox.pid, *sandbox.request("leave_daemons").payload["pids"]]
        sandbox.pause()
    assert all(gone(p) for p in pids)
    assert_nothing_left(sandbox)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_process_that_continues_itself_is_noticed() -> None:
    with make_sandbox() as sandbox:
        (pid,) = sandbox.request("leave_a_running_child").payload["pids"]
        assert within(20, lambda: process_tree.cpu_seconds([pid]) > 0.05)  # its timer is set
        sandbox.pause()
        assert within(20, lambda: sandbox.paused_cpu_seconds > 0.02)
        sandbox.request("echo")  # continues all; what was used before is still known
        assert sandbox.paused_cpu_seconds > 0.02


SCRIPT = """
import json, signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
from weft.workbench.sandbox import fork_client
from weft.workbench.sandbox.process import Sandbox
fork_client.LIBRARY_MODULES = fork_client.WEFT_MODULES = fork_client.CPU_MODULES = ()  # for the sake of time
if __name__ == "__main__":
    sandbox = Sandbox("helpers.sandbox_handlers:handlers")
    pids = sandbox.request("leave_daemons").payload["pids"]
    print(json.dumps([sandbox._folder, sandbox.pid, *pids]), flush=True)
    {then}
"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("then", "send", "code"),
    [
        ("sandbox.pause(); time.sleep(1000)", signal.SIGKILL, -signal.SIGKILL),
        ("sandbox.request('hang')", signal.SIGINT, -signal.SIGINT),
        pytest.param("time.sleep(9)", signal.SIGTERM, -signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("pass", None, 0, marks=pytest.mark.slow),
        pytest.param("1 / 0", None, 1, marks=pytest.mark.slow),
    ],
    ids=["killed", "interrupted", "terminated", "not-closed", "raised"],
)
def test_a_parent_process_that_ends_leaves_nothing(
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


def test_sandboxes_of_several_threads_do_not_disturb_each_other() -> None:
    verbs = ["echo", "segfault", "echo", "exit_at_once", "raise_error", "echo"]
    ends: dict[int, str] = {}

    def judge(index: int, verb: str) -> None:
        with make_sandbox() as sandbox:
            try:
                sandbox.request("echo", {"index": index})
                ends[index] = str(sandbox.request(verb, {"code": index, "how": "x"}).payload["code"])
            except (SandboxDied, WorkerError) as error:
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


def test_a_fork_server_that_was_killed_is_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_client, "LIBRARY_MODULES", ())  # another than that of the tests beside this
    monkeypatch.setattr(fork_client, "WEFT_MODULES", ())
    monkeypatch.setattr(fork_client, "CPU_MODULES", ())
    with make_sandbox() as sandbox:
        sandbox.request("echo")
        os.kill(sandbox._server.process.pid, signal.SIGKILL)
        assert sandbox.request("echo", {"a": 1}).payload == {"a": 1}  # its guests do not depend on it
        with make_sandbox() as another:
            assert another.request("echo", {"b": 2}).payload == {"b": 2}
    assert_nothing_left(sandbox)


def test_a_failed_start_is_not_a_verdict_on_the_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_client, "LIBRARY_MODULES", ("no server has this yet",))
    monkeypatch.setattr(fork_client, "COMMAND", "raise SystemExit('no torch here')")
    with pytest.raises(RuntimeError, match=r"no process can be started .* no torch here"):
        make_sandbox()


def test_a_worker_is_forked_from_the_server_that_has_imported_torch() -> None:
    with make_sandbox() as sandbox:
        sandbox.request("echo")
        supervisor = sandbox._facts["supervisor"]
        assert process_tree.running_processes()[supervisor][0] == sandbox._server.process.pid
        assert process_tree.running_processes()[sandbox.pid][0] == supervisor
        assert "torch" in fork_client.LIBRARY_MODULES


@pytest.mark.parametrize("opens_gpu", [False, True])
def test_a_server_does_not_open_the_gpu_or_goes_on_without_what_opens_it(
    opens_gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = driver.DriverInfo(count=1, name="Testcard")
    weft_module = f"a_weft_module_{opens_gpu}"  # a server of its own
    (tmp_path / "nvidia0").touch()
    for name, opens in (("a_library", False), (weft_module, opens_gpu)):
        lines = f"file = open({str(tmp_path / 'nvidia0')!r})" if opens else "pass"
        (tmp_path / f"{name}.py").write_text(
            "from weft.machine import driver\n"
            "assert driver.find().name == 'Testcard'  # the answer of the process that asked\n" + lines
        )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(fork_client, "LIBRARY_MODULES", ("a_library",))
    monkeypatch.setattr(fork_client, "WEFT_MODULES", (weft_module,))
    monkeypatch.setattr(fork_client, "_opened_gpu", [])
    monkeypatch.setattr(machine, "has_gpu", lambda: True)
    monkeypatch.setattr(driver, "find", lambda: info)
    with make_sandbox() as sandbox:
        facts = sandbox.request("modules_and_driver", {"names": ["a_library", weft_module]}).payload
    loaded = ["a_library"] if opens_gpu else ["a_library", weft_module]
    # A worker asks the driver itself.
    assert facts == {"loaded": loaded, "reason": "no NVIDIA driver is installed here"}
    assert bool(fork_client._opened_gpu) == opens_gpu


def test_limits_are_validated() -> None:
    with pytest.raises(WeftError, match="seconds must be positive"):
        Limits(seconds=0)


@pytest.mark.gpu
def test_cuda_starts_in_each_worker_and_its_memory_is_bounded() -> None:
    torch.zeros(1, device="cuda")  # the judge has CUDA open as well
    with make_sandbox(device_fraction=0.01) as sandbox:
        assert sandbox.request("on_cuda", {"mib": 16}, [torch.arange(5.0)]).tensors[0].tolist() == [
            *(0.0, 2.0, 4.0, 6.0, 8.0)
        ]
        with pytest.raises(WorkerError, match="OutOfMemoryError"):
            sandbox.request("on_cuda", {"mib": 16384}, [torch.arange(5.0)])
    assert_nothing_left(sandbox)


@pytest.mark.gpu
def test_after_an_illegal_access_the_next_sandbox_has_a_healthy_context() -> None:
    with make_sandbox() as sandbox, pytest.raises(WorkerError, match="CUDA"):
        sandbox.request("break_cuda")
    assert_nothing_left(sandbox)
    with make_sandbox() as sandbox:
        assert sandbox.request("on_cuda", {"mib": 1}, [torch.ones(3)]).tensors[0].tolist() == [2.0] * 3
