"""What every measuring process shares, ours and the peers': the body, the clock, one line of JSON as the answer.

Standard library only: a peer's own virtual environment imports it too (benchmarks/peers put this folder first in
sys.path).
"""

import gc
import json
import resource
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


class Clock:
    """Wall time (seconds) and this process's CPU time over what is measured."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.cpu = 0.0


@contextmanager
def clock() -> Iterator[Clock]:
    """Measure what runs inside, without what was there before being collected again and again."""
    gc.collect()
    gc.freeze()
    result = Clock()
    before, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    try:
        yield result
    finally:
        result.seconds = time.perf_counter() - started
        after = resource.getrusage(resource.RUSAGE_SELF)
        result.cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def answer(scenarios: dict[str, Callable[..., dict[str, Any]]]) -> None:
    """Run `SCENARIO JSON_OPTIONS` of the command line; print its result as the last line of standard output."""
    name, options = sys.argv[1], json.loads(sys.argv[2] if len(sys.argv) > 2 else "{}")
    result = scenarios[name](**options)
    print(json.dumps(result))


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` (0 to 1) of `values` lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
