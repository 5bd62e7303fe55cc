"""Seeds that no candidate can know in advance."""

from __future__ import annotations

import secrets


def fresh_seeds(n: int) -> tuple[int, ...]:
    """Return ``n`` seeds from the operating system's random source."""
    return tuple(secrets.randbelow(1 << 31) for _ in range(n))
