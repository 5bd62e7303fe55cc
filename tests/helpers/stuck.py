"""Test program: the first of two processes is killed; the other waits in a call that signals do not end."""

import ctypes
import os
import signal

from weft.gpt2.distributed.process_group import barrier, joined

if __name__ == "__main__":
    with joined("cpu") as group:
        barrier(group)
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        mutex = ctypes.create_string_buffer(64)  # of zeros: unlocked
        for _ in range(2):  # the second call never returns, as gloo's if it misses a closed connection
            ctypes.CDLL(None).pthread_mutex_lock(mutex)
