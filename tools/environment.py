"""Make the virtual environment that `make` runs in, once, and mend it where it is broken.

    python tools/environment.py .venv run    what Weft needs to run
    python tools/environment.py .venv dev    and to be tested, linted and type-checked

Which torch: one that works already is kept; else the CUDA build where there is an NVIDIA GPU; else
the CPU build at the versions in constraints-cpu.txt. Standard library only; pip does the work.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = {"run": [], "dev": ["dev"]}  # what each stage adds to the base
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # PyTorch's own, for its CPU wheels
SOURCES = ("pyproject.toml", "constraints-cpu.txt", "tools/environment.py")
# What must be there for a stage to be whole; looked up and not imported, so that it is instant.
MODULES = {
    "run": ("pip", "torch", "numpy", "numba", "typer", "rich", "jinja2", "weft"),
    "dev": ("pytest", "xdist", "hypothesis", "selenium", "ruff", "mypy", "cogapp"),
}
# Run by a Python outside the environment: is there a torch that works, and what came with it?
FIND_TORCH = """
import importlib.metadata as metadata, json, re, sys
import torch
assert tuple(int(x) for x in torch.__version__.split(".")[:2]) >= (2, 11), "older than 2.11"
assert float((torch.ones(2) + 1).sum()) == 4.0
names = {"torch", "triton"} | {n for n in (d.metadata["Name"] for d in
         metadata.distributions()) if n and n.lower().startswith("nvidia-")}
pins = {}
for name in names:
    try:
        pins[name.lower()] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
nested = sys.prefix != sys.base_prefix  # this Python is itself in an environment
outer = [p for p in sys.path if nested and p.endswith("site-packages")]
print(json.dumps({"pins": pins, "cuda": torch.version.cuda, "outer": outer}))
"""


def say(text: str) -> None:
    print(f"[environment] {text}", file=sys.stderr, flush=True)


def has_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU or driver; WEFT_ACCELERATOR=cpu|cuda overrules."""
    asked = os.environ.get("WEFT_ACCELERATOR", "")
    if asked not in ("", "cpu", "cuda"):
        sys.exit(f"WEFT_ACCELERATOR: expected cpu or cuda, got {asked!r}")
    if asked:
        return asked == "cuda"
    if shutil.which("nvidia-smi") or Path("/dev/nvidia0").exists():
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def torch_already_here(gpu: bool) -> dict | None:
    """What FIND_TORCH prints if this Python has a torch worth keeping, else None."""
    found = subprocess.run([sys.executable, "-c", FIND_TORCH], capture_output=True, text=True)
    if found.returncode:
        last = found.stderr.strip().splitlines()[-1:]
        if last and "No module named 'torch'" not in last[0]:
            say(f"the torch of {sys.executable} is not used: {last[0]}")
        return None
    answer: dict = json.loads(found.stdout.splitlines()[-1])
    if gpu and not answer["cuda"]:
        say(f"the torch of {sys.executable} is not used: a CPU build, and there is a GPU here")
        return None
    return answer


class Environment:
    def __init__(self, folder: Path, stage: str) -> None:
        self.folder, self.stage = folder, stage
        self.python = folder / "bin" / "python"
        self.stamp = folder / "weft-environment.json"  # written last: what is installed here
        self.unfinished = folder / "weft-unfinished"  # stands while pip works
        digest = hashlib.sha256()
        for name in SOURCES:
            digest.update((ROOT / name).read_bytes())
        self.gpu = has_gpu()
        self.want = {"root": str(ROOT), "gpu": self.gpu, "sources": digest.hexdigest()}

    def runs(self) -> bool:
        """Whether the environment's Python starts and has pip."""
        try:
            found = subprocess.run([self.python, "-c", "import pip"], capture_output=True)
        except OSError:
            return False
        return found.returncode == 0

    def is_whole(self) -> bool:
        """Whether the stamp is right and everything it speaks of is still there. About 0.1 s."""
        try:
            stamp = json.loads(self.stamp.read_text())
        except (OSError, ValueError):
            return False
        if stamp.get("want") != self.want or self.stage not in stamp.get("stages", ()):
            return False
        return self.has_modules(stamp["stages"])

    def has_modules(self, stages: list[str]) -> bool:
        names = [m for s in stages for m in MODULES[s]]
        code = (
            "import importlib.util as u, sys; "
            "sys.exit(not all(getattr(u.find_spec(n), 'origin', None) for n in sys.argv[1:]))"
        )
        try:
            command = [str(self.python), "-c", code, *names]
            return subprocess.run(command, capture_output=True).returncode == 0
        except OSError:
            return False

    def must_start_anew(self) -> str:
        """Why what stands in the folder cannot be mended in place; empty if it can."""
        if self.unfinished.exists():
            return "an earlier run was cut off half-way"
        if not self.runs():
            return "its Python does not start"
        try:
            stamp = json.loads(self.stamp.read_text())
            had, stages = stamp["want"], stamp["stages"]
        except (OSError, ValueError, KeyError):
            return ""
        if had.get("root") != str(ROOT):
            return f"it was made for {had.get('root')}"
        if had.get("gpu", self.gpu) != self.gpu:
            return "it was made " + ("without" if self.gpu else "with") + " a GPU"
        if not self.has_modules(stages):  # pip believes them installed and would leave them so
            return "something that was installed in it is gone"
        return ""

    def create(self, kept: dict | None) -> None:
        say(f"making {self.folder} with Python {sys.version.split()[0]} ({sys.executable})")
        options = ["--system-site-packages"] if kept else []
        make = [sys.executable, "-m", "venv", *options, str(self.folder)]
        made = subprocess.run(make, capture_output=True, text=True)
        if made.returncode:  # Debian's python3 without python3-venv has no ensurepip
            shutil.rmtree(self.folder, ignore_errors=True)
            into = ["--python", str(self.python), "install", "pip"]
            ok = not subprocess.run([*make, "--without-pip"], capture_output=True).returncode and (
                not subprocess.run([sys.executable, "-m", "pip", *into]).returncode
            )
            if not ok:
                shutil.rmtree(self.folder, ignore_errors=True)
                say((made.stderr or made.stdout).strip())
                sys.exit("hint: apt-get install python3-venv, or make PYTHON=/path/to/another")
        if kept and kept["outer"]:
            lib = next((self.folder / "lib").glob("python3.*")) / "site-packages"
            (lib / "outer.pth").write_text("\n".join(kept["outer"]) + "\n")
        if kept:  # Python 3.11 puts an old setuptools here, in front of the one that torch came with
            drop = [str(self.python), "-m", "pip", "uninstall", "-qq", "-y", "setuptools"]
            subprocess.run(drop, capture_output=True)

    def pip(self, *args: str, optional: bool = False) -> bool:
        """Run pip; leave with a hint where it fails, unless ``optional``."""
        # Byte code is written where a module is first imported: of most, that is never.
        options = ["--disable-pip-version-check", "install", "-qq", "--no-compile"]
        command = [str(self.python), "-m", "pip", *options]
        done = subprocess.run([*command, *args], capture_output=optional)
        if done.returncode and not optional:
            self.unfinished.unlink(missing_ok=True)  # pip cleaned up behind itself
            say(f"pip could not install: {' '.join(args)}")
            sys.exit("hint: see pip's message above, then run make again; it goes on from here")
        return not done.returncode

    def install_torch(self) -> None:
        index = os.environ.get("TORCH_INDEX_URL", "")
        where = ["--index-url", index] if index else []
        if self.gpu:
            say("installing torch for CUDA (some 3 GB the first time)")
            self.pip("torch>=2.11", *where)
            return
        pins = (ROOT / "constraints-cpu.txt").read_text()
        torch = next(x for x in pins.splitlines() if x.startswith("torch=="))
        say(f"installing {torch} for the CPU")
        if index or sys.platform != "linux":
            self.pip(torch, *where)
        elif not self.pip(f"{torch}+cpu", optional=True):
            # On Linux PyPI's own wheel of this version is the CUDA build, which is not wanted here.
            self.pip(f"{torch}+cpu", "--extra-index-url", PYTORCH_CPU_INDEX)

    def constraints(self, kept: dict | None) -> Path:
        """What pip may not change: the kept torch and what came with it, and on a CPU our pins."""
        pins = dict(kept["pins"]) if kept else {}
        lines = [f"{name}=={version}" for name, version in sorted(pins.items())]
        if not self.gpu:
            for line in (ROOT / "constraints-cpu.txt").read_text().splitlines():
                if line and re.split(r"[=<>]", line)[0].strip().lower() not in pins:
                    lines.append(line)
        if (self.ask_torch("torch.version.cuda") or "").startswith("12."):
            lines.append("cuda-bindings<13")  # they load the NVRTC of their own CUDA release
        path = self.folder / "weft-constraints.txt"
        path.write_text("\n".join(lines) + "\n")
        return path

    def ask_torch(self, what: str) -> str | None:
        """What the environment's torch answers; None where there is none that can be imported."""
        command = [str(self.python), "-c", f"import torch; print({what})"]
        done = subprocess.run(command, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else None

    def make(self) -> None:
        """Create or mend, install, prove by importing, and only then write the stamp."""
        reason = self.must_start_anew() if self.folder.exists() else ""
        if reason:
            say(f"{self.folder} is made anew: {reason}")
            shutil.rmtree(self.folder)
        kept = torch_already_here(self.gpu)
        if not self.folder.exists():
            self.create(kept)
        self.unfinished.touch()
        if kept:
            say(f"keeping torch {kept['pins']['torch']} of {sys.executable}")
        elif self.ask_torch("torch.ones(2) + 1") is None:
            self.install_torch()
        say("installing Weft and what it needs")
        pins = ["-c", str(self.constraints(kept))]
        # setuptools first and no isolation: a machine that has it builds with no network.
        self.pip("setuptools>=77", *pins)
        # With no GPU torch's wheel brings no NVRTC; where there is one, torch came with its own.
        extras = ",".join(EXTRAS[self.stage] + ([] if self.gpu else ["nvrtc"]))
        self.pip("--no-build-isolation", "-e", f"{ROOT}[{extras}]" if extras else str(ROOT), *pins)
        self.prove()
        stages = ["run", "dev"] if self.stage == "dev" else ["run"]
        self.stamp.write_text(json.dumps({"want": self.want, "stages": stages}, indent=1))
        self.unfinished.unlink()

    def prove(self) -> None:
        names = ", ".join(MODULES["run"])
        proof = subprocess.run([self.python, "-c", f"import {names}"], cwd=self.folder)
        if proof.returncode:
            sys.exit(f"hint: the environment is still broken; rm -rf {self.folder} and run again")


def main() -> None:
    if not (3, 11) <= sys.version_info[:2] < (3, 14):
        sys.exit(f"Weft needs Python 3.11, 3.12 or 3.13; this is {sys.version.split()[0]}")
    folder, stage = Path(sys.argv[1]).absolute(), sys.argv[2]
    environment = Environment(folder, stage)
    if environment.is_whole():
        return
    with open(f"{folder}.lock", "w") as lock:  # two makes at once: the second waits, then is done
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not environment.is_whole():
            environment.make()
            say("ready")


if __name__ == "__main__":
    main()
