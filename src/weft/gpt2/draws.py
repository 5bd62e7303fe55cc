"""``Draws``: dropout of one forward, a share and a seed for each place, so that nothing is kept."""

from __future__ import annotations


class Draws:
    """Seeds that depend on the forward's own and on the place alone."""

    def __init__(self, p: float, seed: int) -> None:
        self.p = p
        self.seed = seed

    def at(self, place: int) -> int:
        """0 is after the embedding; a block has three. An odd constant tells the places apart."""
        return (self.seed + place * 0x9E3779B97F4A7C15) % 2**63
