"""The CPU that the database's server uses, as Linux counts it."""

import os
from pathlib import Path

NAME = "postgres"
_PROCESSES = Path("/proc")
_CPU = slice(11, 15)
"""utime, stime, and those of ended children, in clock ticks, after the name in /proc/PID/stat."""


def server_cpu() -> float | None:
    """CPU seconds of all PostgreSQL processes of this machine up to now, ended sessions included.

    In steps of 10 ms. None where none can be seen: without /proc, or with the server elsewhere.
    """
    ticks = 0
    seen = False
    for file in _PROCESSES.glob("[0-9]*/stat"):
        try:
            _, _, after = file.read_text().partition("(")
        except OSError:  # has ended
            continue
        name, _, fields = after.rpartition(")")
        if name == NAME:
            seen = True
            ticks += sum(int(field) for field in fields.split()[_CPU])
    return ticks / os.sysconf("SC_CLK_TCK") if seen else None
