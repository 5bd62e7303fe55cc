"""Run a numba.cuda kernel with one thread at a time, so that a missing barrier shows in every run.

On a GPU, and in numba's simulator, the threads of a block run in an order that nobody controls: without a
barrier the result is often right by chance. Here a thread runs alone until it waits at a barrier or ends, and
then the next one runs, in ascending or in descending order. A value that another thread should have written
before is then missing every time.
"""

from __future__ import annotations

import itertools
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy

from weft.learn.candidate import Candidate
from weft.learn.grading import Refused, require


class _Dim3:
    def __init__(self, x: int = 1, y: int = 1, z: int = 1) -> None:
        self.x, self.y, self.z = x, y, z


class _Stopped(BaseException):
    """Ends the other threads of a block after one has failed."""


class _Thread:
    """One thread of a block, on a thread of Python that runs when it is resumed."""

    def __init__(self, block: _Block, index: _Dim3) -> None:
        self.block, self.index = block, index
        self.resumed, self.paused = threading.Semaphore(0), threading.Semaphore(0)
        self.ended, self.stopping = False, False
        self.error: BaseException | None = None
        self._shared = 0  # number of shared arrays declared so far
        self._os_thread = threading.Thread(target=self._run, daemon=True)
        self._os_thread.start()

    def _run(self) -> None:
        self.resumed.acquire()
        try:
            if not self.stopping:
                self.block.body(_Cuda(self))
        except _Stopped:
            self.error = None
        except Exception as error:  # noqa: BLE001 - whatever the learner's kernel raises
            self.error = error
        finally:
            self.ended = True
            self.paused.release()

    def resume(self) -> None:
        """Run until the next barrier or the end."""
        self.resumed.release()
        self.paused.acquire()

    def wait(self) -> None:
        self.paused.release()
        self.resumed.acquire()
        if self.stopping:
            raise _Stopped

    def stop(self) -> None:
        if not self.ended:
            self.stopping = True
            self.resume()
        self._os_thread.join()


class _Shared:
    def __init__(self, thread: _Thread) -> None:
        self._thread = thread

    def array(self, shape: Any, dtype: Any) -> numpy.ndarray:
        """Return the block's array; size 0 is the dynamic shared memory, which starts at one address."""
        block, number = self._thread.block, self._thread._shared
        self._thread._shared += 1
        size = int(numpy.prod(shape))
        if size == 0:
            return block.dynamic.view(numpy.dtype(getattr(dtype, "name", dtype)))
        if number not in block.static:
            # Shared memory is not cleared. NaN shows a read of what no thread has written.
            block.static[number] = numpy.full(shape, numpy.nan, numpy.dtype(getattr(dtype, "name", dtype)))
        return block.static[number]


class _Cuda:
    """The names of ``numba.cuda`` that a kernel uses, for one thread."""

    def __init__(self, thread: _Thread) -> None:
        block = thread.block
        self.threadIdx, self.blockIdx = thread.index, block.index
        self.blockDim, self.gridDim = block.dim, block.grid_dim
        self.shared = _Shared(thread)
        self.syncthreads = thread.wait

    def grid(self, dimensions: int) -> Any:
        t, b, d = self.threadIdx, self.blockIdx, self.blockDim
        position = (b.x * d.x + t.x, b.y * d.y + t.y, b.z * d.z + t.z)
        return position[0] if dimensions == 1 else position[:dimensions]

    def gridsize(self, dimensions: int) -> Any:
        d, g = self.blockDim, self.gridDim
        size = (d.x * g.x, d.y * g.y, d.z * g.z)
        return size[0] if dimensions == 1 else size[:dimensions]


class _Block:
    def __init__(
        self, function: Any, index: _Dim3, dim: _Dim3, grid_dim: _Dim3, shared_bytes: int, arguments: Any
    ) -> None:
        self.function, self.arguments = function, arguments
        self.index, self.dim, self.grid_dim = index, dim, grid_dim
        self.static: dict[int, numpy.ndarray] = {}
        self.dynamic = numpy.full(shared_bytes, 0xFF, numpy.uint8)  # each float32 is NaN

    def body(self, fake: _Cuda) -> None:
        namespace = {**self.function.__globals__, "cuda": fake}
        types.FunctionType(self.function.__code__, namespace)(*self.arguments)

    def run(self, case: str, *, descending: bool, hint: str) -> None:
        positions = itertools.product(range(self.dim.z), range(self.dim.y), range(self.dim.x))
        threads = [_Thread(self, _Dim3(x, y, z)) for z, y, x in positions]
        order = threads[::-1] if descending else threads
        try:
            while not all(t.ended for t in threads):
                at_barrier = [t for t in order if not t.ended]
                if len(at_barrier) < len(threads):
                    missing = next(t for t in threads if t.ended)
                    raise Refused(
                        case,
                        f"thread {missing.index.x} of a block ended while others wait at a barrier: "
                        "every thread of a block must reach each barrier",
                    )
                for thread in at_barrier:
                    thread.resume()
                    if thread.error is not None:
                        name, error = type(thread.error).__name__, thread.error
                        position = f"thread {thread.index.x} of block {self.index.x}"
                        raise Refused(case, f"{position}: {name}: {error}{hint and '. '}{hint}") from error
        finally:
            for thread in threads:
                thread.stop()


def run_in_lockstep(
    kernel: Any,
    grid: tuple[int, ...],
    block: tuple[int, ...],
    arguments: tuple[Any, ...],
    case: str,
    *,
    shared_bytes: int = 0,
    descending: bool = False,
    hint: str = "",
) -> None:
    """Run ``kernel[grid, block, 0, shared_bytes](*arguments)`` one thread at a time.

    The kernel uses ``cuda.grid``, ``cuda.gridsize``, the four indices, ``cuda.shared.array`` and
    ``cuda.syncthreads``. Raises :class:`Refused` for an index outside an array, with the grader's ``hint``,
    and for a barrier that a thread of the block never reaches.
    """
    function = python_function(kernel)
    grid_dim, block_dim = _Dim3(*grid), _Dim3(*block)
    for z, y, x in itertools.product(range(grid_dim.z), range(grid_dim.y), range(grid_dim.x)):
        one = _Block(function, _Dim3(x, y, z), block_dim, grid_dim, shared_bytes, arguments)
        one.run(case, descending=descending, hint=hint)


def kernel_of(candidate: Candidate, name: str) -> Any:
    """Return the kernel ``name`` of the learner's file."""
    kernel = getattr(candidate.module, name, None)
    require(kernel is not None, "import", f"the file has no {name}; keep the name of the starting file")
    return kernel


def python_function(kernel: Any) -> Callable[..., None]:
    """Return the Python function beneath ``@cuda.jit``, of the compiler or of the simulator."""
    for name in ("py_func", "fn"):
        function = getattr(kernel, name, None)
        if isinstance(function, types.FunctionType):
            return function
    raise Refused("import", "the kernel has no @cuda.jit above it")


def run_in_simulator(
    kernel: Any,
    grid: tuple[int, ...],
    block: tuple[int, ...],
    arguments: tuple[Any, ...],
    case: str,
    *,
    shared_bytes: int = 0,
) -> None:
    """Run the kernel as numba launches it, in numba's simulator; what it raises becomes a reason."""
    try:
        kernel[grid, block, 0, shared_bytes](*arguments)
    except Exception as error:
        raise Refused(case, f"in numba's simulator: {type(error).__name__}: {error}") from error
