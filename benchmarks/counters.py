"""What the machine did while something was measured, as Linux counts it.

A ratio of runs taken in turn hides a busy machine. These counters show it: the processors' time by
kind, the time stolen by other virtual machines, and how long something waited for a processor.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_PROC = Path("/proc")
_KINDS = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
"""The first fields of a processor's line in /proc/stat, in ticks."""
_COUNTS = {"ctxt": "context_switches", "processes": "processes_started"}

Counters = dict[str, float]


def counters() -> Counters:
    """Totals since the machine started: seconds of all processors by kind, and counts.

    Empty without /proc. `waiting` are seconds in which something was ready to run, but had to wait
    for a processor; it is missing where the kernel does not count it.
    """
    found: Counters = {}
    for line in _read("stat").splitlines():
        name, *fields = line.split()
        if name == "cpu":
            ticks = os.sysconf("SC_CLK_TCK")
            found |= {kind: int(n) / ticks for kind, n in zip(_KINDS, fields, strict=False)}
        elif name in _COUNTS:
            found[_COUNTS[name]] = int(fields[0])
    for line in _read("pressure/cpu").splitlines():
        if line.startswith("some "):
            found["waiting"] = int(line.rpartition("total=")[2]) / 1e6
    return found


def _read(name: str) -> str:
    try:
        return (_PROC / name).read_text()
    except OSError:  # not Linux, or not counted
        return ""


@contextmanager
def counted() -> Iterator[dict[str, Any]]:
    """Gives a dict that holds, at the end, what was counted until then.

    Also the load averages at the start: of the last minute, five and fifteen minutes.
    """
    found: dict[str, Any] = {}
    if hasattr(os, "getloadavg"):
        found["load_before"] = [round(load, 2) for load in os.getloadavg()]
    before = counters()
    try:
        yield found
    finally:
        after = counters()
        found |= {name: round(n - before[name], 2) for name, n in after.items() if name in before}
