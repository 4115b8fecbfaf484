"""What every measuring process shares, ours and the peers': the body, the clock, one line of JSON
as the answer.

Standard library only: a peer's own virtual environment imports it too (benchmarks/peers put this
folder first in sys.path).
"""

import ctypes
import gc
import json
import os
import platform
import resource
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def body(n: int) -> dict[str, Any]:
    """The n-th message: about 200 bytes of compact JSON."""
    return {
        "order": n,
        "customer": "c-000000001",
        "currency": "EUR",
        "total": 129.95,
        "items": [{"sku": "SKU-0001", "quantity": 2}, {"sku": "SKU-0002", "quantity": 1}],
        "note": "please leave it at the back door, thank you",
        "express": True,
    }


def compact(value: Any) -> bytes:
    """JSON without spaces."""
    return json.dumps(value, separators=(",", ":")).encode()


_PERF_EVENT_OPEN = {"x86_64": 298, "aarch64": 241}
"""Numbers of the system call."""
_NOT_THE_KERNELS = 0b1100000


def _counter() -> int:
    """A descriptor that counts this thread's instructions from now on; negative where they are not
    counted.

    Unlike times they hardly depend on what else the machine does. Most virtual machines do not
    count them.
    """
    number = _PERF_EVENT_OPEN.get(platform.machine())
    if number is None or platform.system() != "Linux":
        return -1
    # struct perf_event_attr, its first version: a hardware event, its own size, instructions.
    attributes = struct.pack("IIQQQQQIIQ", 0, 64, 1, 0, 0, 0, _NOT_THE_KERNELS, 0, 0, 0)
    return int(ctypes.CDLL(None).syscall(number, attributes, 0, -1, -1, 0))


def _counted(descriptor: int) -> int | None:
    if descriptor < 0:
        return None
    (count,) = struct.unpack("Q", os.read(descriptor, 8))
    os.close(descriptor)
    return int(count)


class Clock:
    """Wall time and this process's CPU time (seconds), and its instructions where counted."""

    last: "Clock | None" = None

    def __init__(self) -> None:
        self.seconds = 0.0
        self.cpu = 0.0
        self.instructions: int | None = None


@contextmanager
def clock() -> Iterator[Clock]:
    """Measure what runs inside, without what was there before being collected again and again."""
    gc.collect()
    gc.freeze()
    result = Clock.last = Clock()
    counter = _counter()
    before = resource.getrusage(resource.RUSAGE_SELF)
    started = time.perf_counter()
    try:
        yield result
    finally:
        result.seconds = time.perf_counter() - started
        after = resource.getrusage(resource.RUSAGE_SELF)
        result.instructions = _counted(counter)
        result.cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def answer(scenarios: dict[str, Callable[..., dict[str, Any]]]) -> None:
    """Run `SCENARIO JSON_OPTIONS` of the command line; print its result as the last line of
    standard output."""
    name = sys.argv[1]
    options = json.loads(sys.argv[2] if len(sys.argv) > 2 else "{}")
    result = scenarios[name](**options)
    if Clock.last is not None and Clock.last.instructions is not None:
        result["instructions_each"] = Clock.last.instructions / result["count"]
    print(json.dumps(result))


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` (0 to 1) of `values` lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
