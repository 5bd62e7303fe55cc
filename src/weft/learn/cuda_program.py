"""``Program``: a learner's CUDA C++ file compiled by g++ against ``emulator/``, and its calls on a CPU."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from weft.core.errors import WeftError
from weft.learn import cuda_hints
from weft.learn.candidate import Candidate
from weft.learn.grading import Refused
from weft.machine.ceilings import cache_folder

EMULATOR = Path(__file__).with_name("emulator")
RUNTIME = ("threads", "memory", "host")  # the first two hold the guards around shared arrays
OPTIONS = ("-std=c++17", "-fPIC", "-U_FORTIFY_SOURCE", "-fdiagnostics-color=never", "-fmax-errors=1")
# Without optimisation each access of the source is one access, and a call keeps its line. With DWARF 5,
# addr2line takes the file of a #line directive for another one.
LEARNER = ("-O0", "-g1", "-gdwarf-4", "-w", "-fsanitize=thread,bounds-strict", "-fsanitize-coverage=trace-pc")
LAUNCH = re.compile(r"\b([A-Za-z_]\w*(?:<[^<>;(){}]*>)?)\s*<<<(.*?)>>>\s*\(", re.S)
DYNAMIC = re.compile(r"\bextern\s+__shared__\s+(?:__align__\(\d+\)\s+)?([\w ]+?)\s*\b(\w+)\s*\[\s*\]\s*;")
SIGNATURE = re.compile(r"\s*([\w *]+?)\s*\b(\w+)\((.*)\)\s*")
# A local variable without a first value gets grading.UNSET_BYTE in each byte, and no 0 by luck.
# Since GCC 12.
UNSET_LOCALS = "-ftrivial-auto-var-init=pattern"
COMPILE_SECONDS = 120.0
BEYOND = re.compile(r"byte (\d+) of the dynamic shared memory, which has (\d+) bytes")
INDEX = re.compile(r"(?<![\w.])@(?![\w.])")  # stands for an element of shared memory in a fault's message


class _Fault(ctypes.Structure):
    _fields_ = (
        ("message", ctypes.c_char * 600),
        *((n, ctypes.c_int64) for n in ("pc", "other", "address", "bytes", "line", "column", "index")),
        ("type", ctypes.c_char * 80),
    )


COUNTS = (
    *("launches", "blocks", "threads", "barriers"),
    *("load_requests", "load_sectors", "load_ideal_sectors", "load_bytes"),
    *("store_requests", "store_sectors", "store_ideal_sectors", "store_bytes"),
    *("shared_requests", "shared_loads", "shared_wavefronts", "shared_ideal_wavefronts"),
    *("global_atomics", "shared_atomics", "shuffles"),
    *("lane_blocks", "warp_blocks", "timeline", "serial_time"),
    *("worst_load", "worst_store", "worst_shared", "worst_idle"),
)


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Counts of one call: see ``emulator/README.md``. ``worst_*`` are lines of the learner's file, or 0."""

    launches: int
    blocks: int
    threads: int
    barriers: int
    load_requests: int
    load_sectors: int
    load_ideal_sectors: int
    load_bytes: int
    store_requests: int
    store_sectors: int
    store_ideal_sectors: int
    store_bytes: int
    shared_requests: int
    shared_loads: int
    shared_wavefronts: int
    shared_ideal_wavefronts: int
    global_atomics: int
    shared_atomics: int
    shuffles: int
    lane_blocks: int
    warp_blocks: int
    timeline: int
    serial_time: int
    worst_load: int
    worst_store: int
    worst_shared: int
    worst_idle: int
    unfreed: str  # an array that the call took by cudaMalloc and did not free, or ""
    arrays: dict[str, tuple[int, ...]]  # requests, sectors, least sectors of loads, then of stores

    @property
    def bank_conflicts(self) -> int:
        """Wavefronts of shared memory beyond one for each request."""
        return self.shared_wavefronts - self.shared_ideal_wavefronts

    @property
    def active_lanes(self) -> float:
        """Mean share of a warp's 32 lanes that execute a basic block together with it."""
        return self.lane_blocks / (32 * self.warp_blocks) if self.warp_blocks else 1.0


class Array:
    """An array in the emulated device's memory; ``read`` copies it to the host."""

    def __init__(self, program: Program, name: str, address: int, shape: tuple[int, ...], dtype: Any) -> None:
        self.program, self.name, self.address, self.shape = program, name, address, shape
        self.dtype = np.dtype(dtype)

    def read(self, *, case: str = "", partial: bool = False) -> np.ndarray:
        """Return a copy; raise :class:`Refused` for an element that was never written, unless ``partial``."""
        if not partial:
            index = self.program.library.weft_unwritten(ctypes.c_void_p(self.address))
            if index >= 0:
                position = tuple(int(i) for i in np.unravel_index(index, self.shape))
                element = position[0] if len(position) == 1 else position
                raise Refused(
                    case or self.program.case, f"element {element} of {self.name} was never written"
                )
        size = int(np.prod(self.shape)) * self.dtype.itemsize
        data = ctypes.string_at(self.address, size)
        return np.frombuffer(data, self.dtype).reshape(self.shape).copy()


class Program:
    """A compiled CUDA C++ file. ``signatures`` are the host functions to call, as C++ declares them.

    ``extra`` is more source behind the learner's, for exercises about a kernel alone. Raises :class:`Refused`
    if the file does not compile, :class:`WeftError` without a g++.
    """

    def __init__(
        self, candidate: Candidate, *signatures: str, extra: str = "", text: str | None = None
    ) -> None:
        self.file_name = candidate.file.name
        self.case = "compile"
        entries = "".join(map(_entry, signatures))
        source = candidate.text if text is None else text
        self.lines = source.splitlines()
        dynamic = DYNAMIC.search(source)
        self.dynamic = dynamic[2] if dynamic else "dynamic shared memory"
        if slip := cuda_hints.find_slip(source):
            raise Refused("compile", slip)
        program = (
            f'#line 1 "{self.file_name}"\n{rewrite(source)}\n#line 1 "grader"\n{rewrite(extra)}\n{entries}'
        )
        self.file = self._compile(program)
        self.library = ctypes.CDLL(str(self.file))
        self.library.weft_allocate.restype = ctypes.c_void_p
        self.library.weft_unwritten.restype = ctypes.c_int64
        self.library.weft_unfreed.restype = ctypes.c_char_p
        self.library.weft_array_counts.restype = ctypes.c_char_p
        self.library.weft_fault.restype = ctypes.POINTER(_Fault)
        self.library.weft_counts.restype = ctypes.POINTER(ctypes.c_int64 * len(COUNTS))
        self._host: list[np.ndarray] = []

    def array(self, name: str, data: np.ndarray) -> Array:
        """Copy an array to the device. ``name`` is what reasons call it."""
        contiguous = np.ascontiguousarray(data)
        return self._allocate(name, contiguous.shape, contiguous.dtype, contiguous.ctypes.data)

    def empty(self, name: str, shape: int | tuple[int, ...], dtype: Any = np.float32) -> Array:
        """Allocate an array on the device in which no element is written."""
        return self._allocate(name, (shape,) if isinstance(shape, int) else shape, np.dtype(dtype), None)

    def pin(self, data: np.ndarray) -> np.ndarray:
        """Mark a host array as page-locked for the next call."""
        self.library.weft_pin(ctypes.c_void_p(data.ctypes.data), ctypes.c_size_t(data.nbytes))
        return data

    def call(self, name: str, *arguments: Any, case: str, on_race: str = "") -> Counts:
        """Call a host function, return its counts; raise :class:`Refused` for what the emulator refuses.

        ``case`` names the input in the reason, and ``on_race`` is the likely mistake behind a race.
        """
        self.case = case
        bits = (ctypes.c_longlong * max(1, len(arguments)))(*map(_bits, arguments))
        entry = ctypes.cast(getattr(self.library, f"weft_entry_{name}"), ctypes.c_void_p)
        if self.library.weft_call(entry, bits):
            fault = self.library.weft_fault().contents
            reason = self._explain(fault)
            raise Refused(case, f"{reason}. {on_race}" if on_race and "race: " in reason else reason)
        values = [int(v) for v in self.library.weft_counts().contents]
        lines = [self.line(pc) for pc in values[-4:]]
        unfreed = self.library.weft_unfreed().decode()
        counted = dict(zip(COUNTS, [*values[:-4], *lines], strict=True))
        return Counts(**counted, unfreed=unfreed, arrays=self._array_counts())

    def result(self) -> float:
        """Return what the last called function returned."""
        return float(ctypes.c_double.in_dll(self.library, "weft_result").value)

    def line(self, pc: int) -> int:
        """Return the line of the learner's file that an address of the library belongs to, 0 if unknown."""
        tool = shutil.which("addr2line")
        if not pc or tool is None:
            return 0
        command = [tool, "-i", "-e", str(self.file), hex(pc)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS)
        match = re.search(rf"{re.escape(self.file_name)}:(\d+)", done.stdout)
        return int(match[1]) if match else 0

    def _array_counts(self) -> dict[str, tuple[int, ...]]:
        values = (ctypes.c_int64 * 6)()
        arrays, i = {}, 0
        while (name := self.library.weft_array_counts(ctypes.c_size_t(i), values)) is not None:
            if any(values):
                arrays[name.decode()] = tuple(values)
            i += 1
        return arrays

    def _allocate(self, name: str, shape: tuple[int, ...], dtype: np.dtype, data: int | None) -> Array:
        count = int(np.prod(shape))
        address = self.library.weft_allocate(
            name.encode(), ctypes.c_size_t(count), ctypes.c_size_t(dtype.itemsize), ctypes.c_void_p(data)
        )
        return Array(self, name, int(address), shape, dtype)

    def _explain(self, fault: _Fault) -> str:
        message = fault.message.decode(errors="replace")
        line, other = fault.line or self.line(fault.pc), self.line(fault.other)
        text = self.lines[line - 1] if 0 < line <= len(self.lines) else ""
        if fault.line:
            outside = cuda_hints.outside(text, fault.column, fault.index, fault.type.decode(errors="replace"))
            message = INDEX.sub(lambda _: outside, message)
        elif beyond := BEYOND.search(message):
            element, name = fault.bytes, self.dynamic
            got = f"the launch gives {beyond[2]} bytes of shared memory, {int(beyond[2]) // element} elements"
            message = BEYOND.sub(f"{name}[{int(beyond[1]) // element}], outside of {name}: {got}", message)
        elif INDEX.search(message):
            message = self._name_element(message, fault)
        if other and other != line:
            message += f" (line {other})"
        return f"line {line}: {message}" if line else message

    def _name_element(self, message: str, fault: _Fault) -> str:
        """Put the shared array and its element into a fault's message."""
        name, start, size = self._shared_array(fault.address)
        if not name:
            return INDEX.sub("an element of shared memory", message)
        element = fault.bytes
        index, count = (fault.address - start) // element, size // element
        if not 0 <= index < count:
            return INDEX.sub(f"{name}[{index}], {cuda_hints.extent(name, count)}", message)
        message = INDEX.sub(f"element {index} of {name}", message)
        if message.endswith("no thread of the block writes it"):
            values = (ctypes.c_int64 * 3)()
            self.library.weft_shared_written(*map(ctypes.c_int64, (start, size, element)), values)
            written, first, last = values
            message += (
                f"; it writes {written} elements, {first} to {last}" if written else ", nor any other one"
            )
        return message

    def _shared_array(self, address: int) -> tuple[str, int, int]:
        """Return the name, start and bytes of the shared array nearest to an address of the library."""
        best, distance = ("", 0, 0), 4096
        tool = shutil.which("nm")
        if tool is not None:
            command = [tool, "-S", "-C", str(self.file)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS)
            for line in done.stdout.splitlines():
                fields = line.split(maxsplit=3)
                if len(fields) == 4 and re.fullmatch("[0-9a-f]{16}", fields[1]):
                    start, size = int(fields[0], 16), int(fields[1], 16)
                    away = max(start - address, address - (start + size - 1), 0)
                    name = fields[3].rpartition("::")[2]
                    name = self.dynamic if name == "weft_dynamic_shared" else name
                    if away < distance and not name.startswith("weft_"):
                        best, distance = (name, start, size), away
        return best

    def _compile(self, program: str) -> Path:
        compiler = require_compiler()
        folder = _folder(compiler)
        library = folder / f"{hashlib.sha256(program.encode()).hexdigest()[:24]}.so"
        if library.exists():
            return library
        runtime = [_runtime(compiler, folder, name) for name in RUNTIME]
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            source, built = Path(temporary, "learner.cpp"), Path(temporary, "learner.o")
            source.write_text(program, encoding="utf-8")
            for header in ("cuda_runtime.h", "cuda.h"):  # what a CUDA file may include
                Path(temporary, header).touch()
            includes = [f"-I{temporary}", "-include", str(EMULATOR / "cuda.hpp")]
            command = [
                compiler,
                *OPTIONS,
                *_learner_options(compiler),
                *includes,
                "-c",
                str(source),
                "-o",
                str(built),
            ]
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS)
            if done.returncode:
                raise Refused("compile", cuda_hints.first_error(done.stderr, self.file_name, self.lines))
            shared = Path(temporary, "learner.so")
            parts = [str(runtime[0]), str(built), *map(str, runtime[1:])]  # the guards around the file
            _checked([compiler, "-shared", "-Wl,-Bsymbolic", "-o", str(shared), *parts])
            os.replace(shared, library)
        return library


def prepare() -> None:
    """Compile the emulator's own part, once for each version; raise :class:`WeftError` without a g++."""
    compiler = require_compiler()
    for name in RUNTIME:
        _runtime(compiler, _folder(compiler), name)


def require_compiler() -> str:
    """Return the path of g++; raise :class:`WeftError` if there is none."""
    compiler = shutil.which("g++")
    if compiler is None:
        hint = "install it, on Debian and Ubuntu by: apt install g++"
        raise WeftError("CUDA C++ exercises need a C++ compiler", expected="g++", got="none", hint=hint)
    return compiler


def rewrite(source: str) -> str:
    """Return CUDA C++ source that g++ can parse, with the same lines.

    >>> rewrite("add<<<grid, 64>>>(x, n);")
    'weft_launch(add, grid, 64)(x, n);'
    """
    source = LAUNCH.sub(lambda m: f"weft_launch({m[1]}, {m[2]})(", source)
    return DYNAMIC.sub(r"\1* const \2 = (\1*)weft_dynamic_shared;", source)


def _entry(signature: str) -> str:
    """Return a C function that calls a host function with arguments of 64 bits each.

    >>> print(_entry("int f(const float* x, int n)"), end="")
    extern "C" void weft_entry_f(const long long* a) { weft_result = f(WeftArgument<const float*>::of(a[0]), \
WeftArgument<int>::of(a[1])); }
    """
    match = SIGNATURE.fullmatch(signature)
    assert match is not None, signature
    result, name, parameters = match.groups()
    types = [re.sub(r"\w+\s*$", "", p).strip() for p in parameters.split(",") if p.strip()]
    arguments = ", ".join(f"WeftArgument<{t}>::of(a[{i}])" for i, t in enumerate(types))
    keeps = "" if result == "void" else "weft_result = "
    return f'extern "C" void weft_entry_{name}(const long long* a) {{ {keeps}{name}({arguments}); }}\n'


def _bits(argument: Any) -> int:
    if isinstance(argument, Array):
        return argument.address
    if isinstance(argument, np.ndarray):  # host memory, as it is
        return int(argument.ctypes.data)
    if isinstance(argument, float | np.floating):
        return int(struct.unpack("<q", struct.pack("<d", float(argument)))[0])
    return int(argument)


@cache
def _version(compiler: str) -> str:
    command = [compiler, "-dumpfullversion"]
    return subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS).stdout.strip()


def _learner_options(compiler: str) -> tuple[str, ...]:
    major = _version(compiler).partition(".")[0]
    return (*LEARNER, UNSET_LOCALS) if major.isdigit() and int(major) >= 12 else LEARNER


@cache
def _folder(compiler: str) -> Path:
    """Return the cache folder of this emulator and this compiler; compiled files are named by content."""
    contents = [path.read_bytes() for path in sorted(EMULATOR.glob("*.?pp"))]
    options = repr((OPTIONS, _learner_options(compiler))).encode()
    key = hashlib.sha256(b"\0".join([_version(compiler).encode(), options, *contents])).hexdigest()[:16]
    folder = cache_folder() / "learn" / key
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _runtime(compiler: str, folder: Path, name: str) -> Path:
    """Return the compiled file of the emulator's own part ``name``."""
    built = folder / f"{name}.o"
    if not built.exists():
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            output = Path(temporary, built.name)
            _checked([compiler, *OPTIONS, "-O2", "-c", str(EMULATOR / f"{name}.cpp"), "-o", str(output)])
            os.replace(output, built)
    return built


def _checked(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS)
    if done.returncode:
        raise WeftError(
            "g++ does not compile the emulator", got=done.stderr.strip()[-600:], hint="use a GCC from 9 on"
        )
