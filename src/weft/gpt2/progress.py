"""How a run is followed: one live line on a terminal, a line every so often in a pipe.

Tokens a second are those since the last report. MFU is by llm.c's convention: 6 N + 6 L C T
operations a token, N with the padded vocabulary, over the datasheet's dense peak for the dtype.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from rich.console import Console

from weft import machine
from weft.machine import datasheet

RATES = {"bfloat16": "bf16", "float32": "fp32"}
LIVE, PIPE = 0.2, 10.0  # seconds between reports on a terminal and in a pipe


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How fast a run goes: tokens a second of all processes; ``mfu`` a share, None where the peak
    is not known; ``memory`` the most bytes that tensors held on the GPU at once; ``left`` in
    seconds."""

    tokens_a_second: float
    mfu: float | None
    memory: int | None
    left: float


def peak(device: torch.device, dtype: str) -> float | None:
    """The datasheet's dense FLOP/s of the GPU for this dtype; None on a CPU or an unknown card."""
    if device.type != "cuda":
        return None
    found = datasheet.look_up(machine.query("cuda").name)
    return None if found is None else found.matrix.get(RATES[dtype])


class Progress:
    """Reports on stderr.

    Args:
        steps: of the whole run.
        done: those that are done.
        tokens: of one step, all processes together.
        flops: operations that a token takes.
        peak: FLOP/s of all processes' devices at best; None where that is not known.
        device: whose memory is shown.
        quiet: say nothing; the pace is measured all the same.
    """

    def __init__(
        self,
        *,
        steps: int,
        done: int,
        tokens: int,
        flops: int,
        peak: float | None,
        device: torch.device,
        quiet: bool = False,
    ) -> None:
        self.steps, self.tokens, self.flops, self.peak = steps, tokens, flops, peak
        self.device, self.quiet = device, quiet
        self.console = Console(stderr=True, highlight=False, quiet=quiet)
        self.live = self.console.is_terminal and not quiet
        self.status = self.console.status("starting") if self.live else None
        if self.status:
            self.status.start()
        self.pace: Pace | None = None
        self._told, self._counted, self._since = 0.0, done, time.perf_counter()

    def step(self, done: int, loss: float, now: float) -> None:
        """Of each step, which ended ``now`` by time.perf_counter; reports where it is time to."""
        first = self.pace is None
        if not first and done < self.steps and now - self._told < (LIVE if self.live else PIPE):
            return
        seconds, count = now - self._since, done - self._counted
        if seconds > 0 and count > 0:
            speed = count * self.tokens / seconds
            self.pace = Pace(
                tokens_a_second=speed,
                mfu=speed * self.flops / self.peak if self.peak else None,
                memory=_memory(self.device),
                left=(self.steps - done) * seconds / count,
            )
            self._report(line(done, self.steps, loss, self.pace))
        self._told, self._counted, self._since = now, done, now

    def pause(self) -> float:
        """The time now, for :meth:`resume`: before what is no training step."""
        return time.perf_counter()

    def resume(self, since: float) -> float:
        """Leave what took place since out of the pace; the time now."""
        now = time.perf_counter()
        self._since += now - since
        return now

    def say(self, text: str) -> None:
        """A line that stays."""
        if self.live:
            self.console.print(text, markup=False, soft_wrap=True)
        elif not self.quiet:
            self.console.file.write(text + "\n")
            self.console.file.flush()

    def _report(self, text: str) -> None:
        if self.status:
            self.status.update(text)
        else:
            self.say(text)

    def close(self) -> None:
        if self.status:
            self.status.stop()


def line(done: int, steps: int, loss: float, pace: Pace) -> str:
    """A report, in words.

    >>> line(7, 90, 2.5, Pace(tokens_a_second=5.6e5, mfu=0.4547, memory=33 << 30, left=4000))
    'step 7/90  loss 2.5000  560,000 tokens/s  MFU 45.5 %  33.0 GiB  1:06:40 left'
    """
    parts = [f"step {done}/{steps}", f"loss {loss:.4f}", f"{pace.tokens_a_second:,.0f} tokens/s"]
    if pace.mfu is not None:
        parts.append(f"MFU {100 * pace.mfu:.1f} %")
    if pace.memory is not None:
        parts.append(f"{pace.memory / 2**30:.1f} GiB")
    return "  ".join([*parts, f"{clock(pace.left)} left"])


def clock(seconds: float) -> str:
    """Seconds as 0:07, 12:34 or 1:06:40."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _memory(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
