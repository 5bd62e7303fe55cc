"""Progress of a run on stderr: a live line on a terminal, a line every ten seconds in a pipe.

Tokens per second are those since the last report, without the warm-up: the first steps compile kernels and
capture the graph, which may take as long as many others. MFU follows llm.c's convention: 6 N + 6 L C T
FLOPs per token, N including the padded vocabulary, over the datasheet's dense peak for the dtype.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from rich.console import Console

from weft import machine
from weft.machine import datasheet

RATES = {"bfloat16": "bf16", "float32": "fp32"}
LIVE_SECONDS, PIPE_SECONDS = 0.2, 10.0  # between reports on a terminal and in a pipe


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Speed of a run: ``tokens_a_second`` of all processes; ``mfu`` from 0 to 1, None if the peak is
    unknown; ``memory``, the GPU's peak allocated bytes; ``left``, the remaining seconds."""

    tokens_a_second: float
    mfu: float | None
    memory: int | None
    left: float


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """Return the datasheet's dense FLOP/s of the GPU for this dtype; None on a CPU or unknown card."""
    if device.type != "cuda":
        return None
    card = datasheet.look_up(machine.query("cuda").name)
    return None if card is None else card.matrix.get(RATES[dtype])


class Progress:
    """Reports on stderr.

    Args:
        steps: steps of the whole run.
        done: completed steps.
        tokens: tokens of a step, over all processes.
        flops: FLOPs per token.
        peak: FLOP/s of all processes' devices at best; None if unknown.
        device: the device whose memory is shown.
        quiet: print nothing; the pace is measured all the same.
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
        self._reported_at, self._counted, self._counted_since = 0.0, done, time.perf_counter()

    def step(self, done: int, loss: float, now: float, is_warmup: bool = False) -> None:
        """Count a step that ended at ``now`` (time.perf_counter); report if enough time has passed.

        Later reports do not count a step that ``is_warmup``.
        """
        self._report_if_due(done, loss, now)
        if is_warmup:
            self._counted, self._counted_since = done, now

    def _report_if_due(self, done: int, loss: float, now: float) -> None:
        first = self.pace is None
        interval = LIVE_SECONDS if self.live else PIPE_SECONDS
        # The first and the last step are always reported.
        if not first and done < self.steps and now - self._reported_at < interval:
            return
        seconds, count = now - self._counted_since, done - self._counted
        if seconds > 0 and count > 0:
            speed = count * self.tokens / seconds
            on_gpu = self.device.type == "cuda"
            self.pace = Pace(
                tokens_a_second=speed,
                mfu=speed * self.flops / self.peak if self.peak else None,
                memory=torch.cuda.max_memory_allocated(self.device) if on_gpu else None,
                left=(self.steps - done) * seconds / count,
            )
            text = progress_line(done, self.steps, loss, self.pace)
            if self.status:
                self.status.update(text)
            else:
                self.print(text)
        self._reported_at, self._counted, self._counted_since = now, done, now

    def pause(self) -> float:
        """Return the current time, for :meth:`resume`, before work that is not a training step."""
        return time.perf_counter()

    def resume(self, since: float) -> float:
        """Exclude the time since ``since`` from the pace; return the current time."""
        now = time.perf_counter()
        self._counted_since += now - since
        return now

    def print(self, text: str) -> None:
        """Print a line that is not overwritten."""
        if self.live:
            self.console.print(text, markup=False, soft_wrap=True)
        elif not self.quiet:
            self.console.file.write(text + "\n")
            self.console.file.flush()

    def close(self) -> None:
        if self.status:
            self.status.stop()


def progress_line(done: int, steps: int, loss: float, pace: Pace) -> str:
    """Format a report.

    >>> progress_line(7, 90, 2.5, Pace(tokens_a_second=5.6e5, mfu=0.4547, memory=33 << 30, left=4000))
    'step 7/90  loss 2.5000  560,000 tokens/s  MFU 45.5 %  33.0 GiB  1:06:40 left'
    """
    columns = [f"step {done}/{steps}", f"loss {loss:.4f}", f"{pace.tokens_a_second:,.0f} tokens/s"]
    if pace.mfu is not None:
        columns.append(f"MFU {100 * pace.mfu:.1f} %")
    if pace.memory is not None:
        columns.append(f"{pace.memory / 2**30:.1f} GiB")
    return "  ".join([*columns, f"{format_duration(pace.left)} left"])


def format_duration(seconds: float) -> str:
    """Format seconds as 0:07, 12:34 or 1:06:40."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
