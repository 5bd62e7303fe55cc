"""Exercise: how many blocks cover n elements, and how many threads of them have none?"""


def blocks(n: int, threads: int) -> int:
    """Return the smallest number of blocks of ``threads`` threads that cover ``n`` elements."""
    return n // threads  # YOUR CODE


def idle(n: int, threads: int) -> int:
    """Return the number of threads in these blocks that have no element."""
    return 0  # YOUR CODE
