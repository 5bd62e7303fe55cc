"""Which steps of a profile are looked at: ``repeat`` times wait, warm up, and then look.

A step is a rotation of calls over distinct inputs. A profiler's first steps are slower than those
after, since it makes its buffers then, so each cycle has some that it sees and throws away.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.core import WeftError


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Steps of one cycle: ``wait`` with no profiler, ``warmup`` seen and thrown away, ``active``
    kept; and how often the cycle is gone through. Raises :class:`WeftError` for no active step."""

    wait: int = 1
    warmup: int = 2
    active: int = 5
    repeat: int = 2

    def __post_init__(self) -> None:
        for name, least in (("wait", 0), ("warmup", 1), ("active", 1), ("repeat", 1)):
            if (got := getattr(self, name)) < least:
                raise WeftError(f"--{name}", expected=f"at least {least}", got=got)

    @property
    def cycle(self) -> int:
        return self.wait + self.warmup + self.active

    @property
    def before(self) -> int:
        """Steps of a cycle that are not kept."""
        return self.wait + self.warmup

    @property
    def kept(self) -> int:
        """Steps that are kept, of all cycles together."""
        return self.active * self.repeat

    def is_kept(self, step: int) -> bool:
        """Whether the step of this number, counted from 0 through all cycles, is kept.

        >>> [Schedule(wait=1, warmup=1, active=2).is_kept(i) for i in range(6)]
        [False, False, True, True, False, False]
        """
        return step % self.cycle >= self.before


QUICK = Schedule(wait=0, warmup=1, active=3, repeat=1)
