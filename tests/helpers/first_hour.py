"""Replay a newcomer's first hour: plain pip in a new environment, no GPU, a terminal of 80 columns.

Run it by hand from the ``tests`` folder: ``python -m helpers.first_hour``. It copies the checkout,
installs it with pip, runs the commands that README and the start pages name, each on a pseudo-terminal,
and prints a table: seconds, exit code, the last line. It ends with 1 if an exit code is not the expected
one.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import re
import select
import shlex
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

from helpers.paths import ROOT

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")
COLUMNS = 80
WRONG_KERNEL = """import weft


@weft.implementation("softmax", backend="eager", name="naive")
def naive(x):
    e = x.exp()
    return e / e.sum(-1, keepdim=True)
"""
PROBLEM = "examples/judge/kernelbench/softmax"
# Each with the exit code that it must have: 1 is a verdict against a kernel, 2 a wrong call.
COMMANDS: tuple[tuple[str, int], ...] = (
    ("weft --help", 0),
    ("weft device", 0),
    ("weft ops", 0),
    ("weft ops softmax", 0),
    ("weft ops sofmax", 2),
    ("weft help", 0),
    ("weft help kernel", 0),
    ("weft check softmax --with naive.py --case fp32-3x129 --case fp32-5x257-large", 1),
    ("weft check gelu", 0),
    ("weft bench softmax --quick --save first.jsonl", 0),
    ("weft compare first.jsonl first.jsonl", 0),
    ("weft report first.jsonl -o page.html", 0),
    ("weft inspect softmax --impl cuda", 0),
    ("weft inspect softmax --impl triton --arch sm_90", 0),
    ("weft new softmax --backend triton", 0),
    ("weft check softmax --with softmax_triton.py", 0),
    (f"weft judge {PROBLEM}/reference.py {PROBLEM}/right.py", 0),
    ("weft demo coalescing --source", 0),
    ("weft train --out run", 0),
    ("weft generate run", 0),
    ("weft bench softmax --case nothing", 2),
)


def on_a_terminal(command: list[str], folder: Path, environment: dict[str, str]) -> tuple[int, str]:
    """Run a command on a pseudo-terminal of 80 columns; return its exit code and what it printed."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    process = subprocess.Popen(command, cwd=folder, env=environment, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    printed = bytearray()
    while True:
        ready, _, _ = select.select([master], [], [], 0.5)
        try:
            data = os.read(master, 1 << 16) if ready else b""
        except OSError:  # every process has closed the terminal
            break
        printed += data
        if not data and process.poll() is not None:
            break
    os.close(master)
    return process.wait(), ESCAPE.sub("", printed.decode(errors="replace"))


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def install(folder: Path, python: str) -> Path:
    """Install the checkout in a new environment as the start page says; return its folder of programs."""
    checkout, environment = folder / "weft", folder / "environment"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(checkout)], check=True)
    subprocess.run([python, "-m", "venv", str(environment)], check=True)
    pip = [str(environment / "bin" / "pip"), "install", "-q"]
    versions = (checkout / "constraints-cpu.txt").read_text().splitlines()
    torch = next(v for v in versions if v.startswith("torch=="))
    # By default from pip's own configuration, which must then have torch's CPU build.
    index = os.environ.get("TORCH_INDEX_URL")
    subprocess.run([*pip, torch, *(("--index-url", index) if index else ())], check=True)
    subprocess.run([*pip, f"{checkout}[nvrtc]", "numpy<2.4"], check=True)
    return environment / "bin"


def main() -> int:
    """Run the commands in turn; return 1 if an exit code is not the expected one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=Path, help="folder of an installed weft; default: install one")
    parser.add_argument("--python", default=sys.executable, help="Python of the new environment")
    options = parser.parse_args()
    unset = ("COLUMNS", "LINES", "PYTHONPATH", "VIRTUAL_ENV", "WEFT_CACHE_DIR")
    environment = {k: v for k, v in os.environ.items() if k not in unset} | {"TERM": "xterm-256color"}
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="first-hour-") as name:
        folder = Path(name)
        began = time.monotonic()
        programs = options.programs or install(folder, options.python)
        print(f"| {time.monotonic() - began:.0f} s | 0 | `pip install .` | |", flush=True)
        environment["PATH"] = f"{programs}{os.pathsep}{environment['PATH']}"
        environment["PAGER"] = "cat"  # no key would be pressed to leave a pager
        environment["WEFT_CACHE_DIR"] = str(folder / "cache")  # a first hour begins with nothing compiled
        desk = folder / "desk"
        desk.mkdir()
        (desk / "naive.py").write_text(WRONG_KERNEL)
        (desk / "examples").symlink_to(ROOT / "examples")
        for command, expected in COMMANDS:
            began = time.monotonic()
            code, printed = on_a_terminal(shlex.split(command), desk, environment)
            seconds = time.monotonic() - began
            wide = [line for line in printed.splitlines() if len(line.rstrip()) > COLUMNS]
            notes = [f"exit {code}, expected {expected}"] * (code != expected)
            notes += [f"{len(wide)} lines over {COLUMNS} columns"] * bool(wide)
            wrong += code != expected
            row = (f"{seconds:.1f} s", str(code), f"`{command}`", last_line(printed), *notes)
            print(f"| {' | '.join(row)} |", flush=True)
            if code != expected:
                print(printed[-1500:], file=sys.stderr, flush=True)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
