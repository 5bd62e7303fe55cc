"""Print the tables of the commands without running a kernel, on a pseudo-terminal or into a pipe.

``python screens.py`` prints all screens, each after a line with its name. The numbers come from committed
records and from verdicts in this file.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

TESTS = Path(__file__).resolve().parent.parent
ROOT = TESTS.parent
H200, EPYC = ROOT / "results" / "nvidia-h200", ROOT / "results" / "amd-epyc" / "bench.jsonl"
MARK = "#### "  # begins the line with a screen's name
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
SECONDS = re.compile(r"\(\d[\d.]* (s|min)\)")  # duration of a command, in its last line
PIPE = None  # width of a pipe


def screens_at(columns: int | None) -> dict[str, str]:
    """Print all screens on a pseudo-terminal of that width, or into a pipe; return each by name.

    The duration of a command is replaced by zero seconds."""
    with tempfile.TemporaryDirectory() as cache:
        paths = os.pathsep.join([str(ROOT / "src"), str(TESTS)])
        unset = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE")
        env = {k: v for k, v in os.environ.items() if k not in unset}
        env |= {"PYTHONPATH": paths, "WEFT_CACHE_DIR": cache, "TERM": "xterm-256color"}
        text = _output([sys.executable, __file__], columns, env)
    text = SECONDS.sub("(0.0 s)", ESCAPE.sub("", text).replace("\r\n", "\n"))
    parts = text.split(MARK)[1:]
    return dict(part.split("\n", 1) for part in parts)


def _output(command: list[str], columns: int | None, env: dict[str, str]) -> str:
    """Return what a command prints to stdout, which is a terminal of that width or a pipe."""
    log = subprocess.PIPE
    if columns is PIPE:
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=log, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, env=env, stdin=slave, stdout=slave, stderr=errors)
        os.close(slave)
        chunks = list(iter(lambda: _read(master), b""))
        os.close(master)
        status = process.wait(timeout=300)
        errors.seek(0)
        assert status == 0, errors.read().decode()
    return b"".join(chunks).decode()


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # Linux reports the end of a terminal as an error
        return b""


def _bench() -> None:
    from weft.cli import bench
    from weft.core.record import read

    records, _ = read(H200 / "softmax.jsonl")
    records = [r for r in records if r.case == "bf16-32768x4096" and r.direction == "forward"]
    wrong = replace(records[0].verdict, status="fail", reason="off by 3.25 at [0, 17] (seed 2040441431)")
    records[0] = replace(records[0], verdict=wrong, timing=None, efficiency=None)
    records[1] = replace(records[1], flags=("noisy",))
    cpu, _ = read(EPYC)
    groups = [records, [r for r in cpu if r.operator == "matmul"]]
    list(bench.save_and_show(iter(groups), None, False, lambda: None))


def verdicts() -> list[Any]:
    """Return verdicts of softmax on a machine without a GPU, as weft check has them, and one failure."""
    from weft.core.record import Verdict

    simulated = "not timed (no GPU): checked in Triton's interpreter, and compiled"
    ladder = ["cuda", *(f"cuda/0{n}-a-step-of-the-ladder" for n in range(1, 6))]
    rows: list[Any] = []

    def add(name: str, direction: str, status: str, reason: str = "", used: float | None = None) -> None:
        point = {"operator": "softmax", "case": "fp16-2x70000", "direction": direction, "seeds": (7,)}
        rows.append(Verdict(implementation=name, status=status, reason=reason, tolerance_used=used, **point))

    for direction in ("forward", "backward"):
        for n in range(58):
            add("eager", direction, "pass", used=0.28)
            add("triton", direction, "pass", simulated, 0.05)
            elements = f"{1560 + n} elements need a GPU: an interpreter takes at most 1024"
            add("numba", direction, "unsupported", elements)
            for step in ladder:
                only = direction == "backward" and step != "cuda"
                reason = f"{step} computes only the forward" if only else "CUDA C++ needs a GPU to run"
                add(step, direction, "unsupported", reason)
    add("naive", "forward", "fail", "NaN stands where the reference is not: at [0, 0] (seed 2040441431)")
    return rows


def _check() -> None:
    from weft.cli import check

    check.show(verdicts(), SimpleNamespace(workers={}))


def _weft(*arguments: str) -> Callable[[], None]:
    """Return a function that runs a command in this process, whatever its exit code."""

    def run() -> None:
        from weft.cli import app

        try:
            app([*arguments], standalone_mode=True)
        except SystemExit:
            return

    return run


def _compare_slower() -> None:
    """Compare records with ones of which every third takes 1.5 times as long."""
    from weft.core.record import append, read

    records, _ = read(H200 / "softmax.jsonl")
    slower = []
    for i, r in enumerate(records):
        factor = 1.5 if i % 3 == 0 else 1.0
        timing = r.timing and replace(
            r.timing,
            cold=r.timing.cold * factor,
            interval=(r.timing.interval[0] * factor, r.timing.interval[1] * factor),
            samples=tuple(s * factor for s in r.timing.samples),
        )
        slower.append(replace(r, timing=timing))
    with tempfile.TemporaryDirectory() as folder:
        before, after = Path(folder) / "before.jsonl", Path(folder) / "after.jsonl"
        append(before, records)
        append(after, slower)
        _weft("compare", str(before), str(after))()


def kernels(count: int) -> list[Any]:
    """Return kernels with registers, accesses and names like those that NVRTC compiles."""
    from weft.backends.aot import Program
    from weft.backends.cubin import Code
    from weft.workbench.explain.inspect.counts import Counts
    from weft.workbench.explain.inspect.kernel import Kernel

    accesses = {"global loads": {"128": 4, "32": 1}, "global stores": {"128": 4}}
    kernel_list = []
    for n in range(count):
        name = f"softmax_backward_shared_{n}"
        code = Code(name=name, text=b"", registers=30 + 7 * n, stack=0, shared=256 << n, threads=256)
        program = Program(
            label=f"softmax_backward_shared-bfloat16-{256 << n}x1-32-{n}-5-8",
            target="sm_90",
            by="NVRTC 13.0",
            cubin=b"",
            kernels=(code,),
            ptx="",
            file=Path("softmax.cu"),
        )
        counts = Counts(instructions=321 + n, branches=n, memory=accesses, fast_math={"MUFU.EX2": 16})
        kernel_list.append(
            Kernel(
                operator="softmax", implementation="cuda", arch=90, program=program, code=code, counts=counts
            )
        )
    return kernel_list


def _inspect(count: int) -> Callable[[], None]:
    def show() -> None:
        from weft.cli import inspect

        inspect._show(kernels(count), (), "sm_90", as_json=False)

    return show


def _device() -> None:
    from weft.cli import device
    from weft.core import Ceilings, Support
    from weft.machine import Device
    from weft.machine.datasheet import look_up

    saved = json.loads((H200 / "device.json").read_text())
    facts = Device(**{**saved["device"], "vectors": tuple(saved["device"]["vectors"])})
    known = {k: v for k, v in saved["ceilings"].items() if k in Ceilings.__dataclass_fields__}
    support = {
        b["name"]: Support(ok=b["supported"], timed=b["timed"], reason=b["reason"]) for b in saved["backends"]
    }
    device.show(facts, Ceilings(**known), look_up(facts.name), support, saved["machine"], "")


def _tune() -> None:
    from weft.cli import output, tune

    entry = {"choice": "triton", "us": 33.896, "base_us": 56.344}
    rows = [
        {
            "operator": "softmax",
            "case": f"bf16-{32768 >> n}x{1024 << n}",
            "inference": entry,
            "training": entry,
        }
        for n in range(3)
    ]
    rows[0]["training"] = None
    output.show_table(tune.choice_table(rows), options=("csv", "json"))


def _selftest() -> None:
    from weft.cli import selftest

    selftest.show(json.loads((H200 / "selftest.json").read_text()))


def _study() -> None:
    from weft.cli import study_mlp

    study_mlp.show(json.loads((H200 / "study-mlp.json").read_text()))


def _prune() -> None:
    from weft.cli import prune

    record = ROOT / "results" / "intel-r-xeon-r-processor" / "prune.json"
    prune._show(json.loads(record.read_text()))


def _profile() -> None:
    from weft.cli import profile

    for line in (H200 / "profile.ndjson").read_text().splitlines():
        profile.show(json.loads(line), Path("profile-folder"))


def _demo() -> None:
    from weft.cli import demo

    for result in json.loads((H200 / "demos.json").read_text())["demos"]:
        demo._show(result, whole_files=False, with_code=False)


SCREENS: dict[str, Callable[[], None]] = {
    "bench": _bench,
    "check": _check,
    "compare": _weft("compare", str(EPYC), str(EPYC)),
    "compare-all": _weft("compare", str(EPYC), str(EPYC), "--all"),
    "compare-slower": _compare_slower,
    "inspect": _inspect(2),
    "inspect-many": _inspect(5),
    "device": _device,
    "tune": _tune,
    "selftest": _selftest,
    "study": _study,
    "prune": _prune,
    "profile": _profile,
    "demo": _demo,
    "demo-list": _weft("demo"),
    "hardware": _weft("hardware"),
    "hardware-roof": _weft("hardware", "--operator", "matmul", "--direction", "backward"),
    "claim": _weft("claim", "attention bf16 causal 4x16x4096x128 in 200 us on h200"),
    "claims": _weft("claims", "float4-helps-relu"),
}


def tables() -> Iterator[tuple[str, Any]]:
    """Yield each table of the screens with the name of its screen."""
    from weft.cli import output

    show_table = output.show_table
    for name, show in SCREENS.items():
        shown: list[Any] = []
        output.show_table = lambda table, shown=shown, **_: shown.append(table)  # type: ignore[assignment]
        try:
            show()
        finally:
            output.show_table = show_table
        yield from ((name, table) for table in shown)


def main() -> None:
    for name, show in SCREENS.items():
        print(f"{MARK}{name}", flush=True)
        show()
        sys.stdout.flush()


if __name__ == "__main__":
    main()
