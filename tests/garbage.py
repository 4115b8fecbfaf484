"""When processes of tests look for objects that only refer to each other."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

MAX_NEW = 50_000
"""New objects before a look at them, in place of Python's 700: looks took a tenth of the tests'
time, and what is found is little."""


@contextmanager
def no_looks() -> Iterator[None]:
    """While tests are collected: what is made then stays, and looks took a third of that time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def look_seldom() -> None:
    """What was imported stays: no look at it again, and forks share its memory."""
    gc.set_threshold(MAX_NEW, 10, 10)
    gc.collect()
    gc.freeze()
