"""Answer: the quotient rounded up, in integers."""


def blocks(n: int, threads: int) -> int:
    return (n + threads - 1) // threads


def idle(n: int, threads: int) -> int:
    return blocks(n, threads) * threads - n
