"""Test program: the first of two processes is killed; the other reports it two seconds later."""

import os
import signal
import time

from weft.gpt2.distributed.process_group import barrier, joined

if __name__ == "__main__":
    with joined("cpu") as group:
        try:
            if group.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            barrier(group)
        finally:
            time.sleep(2)  # torchrun checks its processes ten times a second
