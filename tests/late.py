"""One of two processes is killed, and the other takes its time to say so."""

import os
import signal
import time

from weft.gpt2.group import joined, wait

if __name__ == "__main__":
    with joined("cpu") as group:
        try:
            if group.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            wait(group)
        finally:
            time.sleep(2)  # torchrun looks ten times a second
