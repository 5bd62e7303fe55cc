"""SQLite export of nsys, small enough to check by hand: two calls, a copy, and a thread of autograd.

Times in ns. The main thread has the range ``step`` (0 to 100,000) with ``forward`` (1,000 to 20,000) and
``backward`` (30,000 to 90,000) inside; the thread of autograd has no ranges and launches during the backward.

    work        launched     ran                  idle before
    copy        at 500       1,000 to 2,000       -
    gelu        at 5,000     8,000 to 12,000      6,000
    gelu        at 6,000     12,000 to 16,000     0
    other       at 40,000    44,000 to 54,000     28,000        (by autograd's thread)
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

PROCESS = (1 << 24 | 71) << 24  # of globalPid and globalTid: a machine's number, and process 71
MAIN, AUTOGRAD = PROCESS | 7, PROCESS | 8
STRINGS = {
    1: "gelu_forward_wide",
    2: "cudaLaunchKernel_v7000",
    3: "other_kernel",
    4: "cudaMemcpyAsync_v3020",
    5: "forward",
}
SCHEMA = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (
  start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL,
  streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, demangledName INTEGER NOT NULL,
  shortName INTEGER NOT NULL, registersPerThread INTEGER NOT NULL, gridX INTEGER NOT NULL,
  gridY INTEGER NOT NULL, gridZ INTEGER NOT NULL, blockX INTEGER NOT NULL, blockY INTEGER NOT NULL,
  blockZ INTEGER NOT NULL, staticSharedMemory INTEGER NOT NULL, dynamicSharedMemory INTEGER NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (
  start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL,
  streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, bytes INTEGER NOT NULL,
  copyKind INTEGER NOT NULL, srcKind INTEGER, dstKind INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (
  start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, globalTid INTEGER,
  correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL, callchainId INTEGER);
CREATE TABLE NVTX_EVENTS (
  start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER, category INTEGER,
  color INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER, domainId INTEGER);
"""


def write(file: Path, *, without: tuple[str, ...] = (), change: str = "") -> Path:
    """Write the export, without these tables, and run the SQL ``change`` on it."""
    with closing(sqlite3.connect(file)) as database:
        database.executescript(SCHEMA)
        database.executemany("INSERT INTO StringIds VALUES (?, ?)", STRINGS.items())
        kernels = [(8_000, 12_000, 11, 1), (12_000, 16_000, 12, 1), (44_000, 54_000, 13, 3)]
        launch = (40, 132, 2, 1, 128, 1, 1, 1024, 512)
        database.executemany(
            f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, 0, 1, 7, ?, {PROCESS}, ?, 1, "
            f"{', '.join(map(str, launch))})",
            kernels,
        )
        copy = (1_000, 2_000, 0, 1, 7, 10, PROCESS, 25_000, 1, 2, 3)
        database.execute(f"INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES {copy}")
        calls = [
            (500, 900, MAIN, 10, 4),
            (5_000, 5_600, MAIN, 11, 2),
            (6_000, 6_400, MAIN, 12, 2),
            (40_000, 41_000, AUTOGRAD, 13, 2),
        ]
        database.executemany(
            "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, 1, ?, ?, ?, 0, NULL)", calls
        )
        ranges = [
            (0, 100_000, 59, "step", MAIN, None),
            (1_000, 20_000, 59, None, MAIN, 5),
            (30_000, 90_000, 59, "backward", MAIN, None),
            (0, None, 75, "a domain", None, None),
        ]
        columns = "start, end, eventType, text, globalTid, textId"
        database.executemany(f"INSERT INTO NVTX_EVENTS ({columns}) VALUES (?, ?, ?, ?, ?, ?)", ranges)
        for table in without:
            database.execute(f"DROP TABLE {table}")
        database.executescript(change)
        database.commit()
    return file
