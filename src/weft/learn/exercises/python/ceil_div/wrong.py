"""The usual mistake: one more block always, also where the division has no remainder."""


def blocks(n: int, threads: int) -> int:
    return n // threads + 1


def idle(n: int, threads: int) -> int:
    return blocks(n, threads) * threads - n
