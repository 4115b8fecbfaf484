"""Ordered pairs of options, without trying all of them on each database.

A decision about two options is Python, which is the same for all databases; a statement knows one
option at a time. So SQLite tries every pair, and each server the pairs of neighbours in a ring,
each server at another distance: there every option comes once before and once after another.
"""

from collections.abc import Sequence
from itertools import permutations
from typing import TypeVar

T = TypeVar("T")

SERVERS = ("postgresql", "mariadb", "mysql")


def pairs(options: Sequence[T], database: str) -> list[tuple[T, T]]:
    """The ordered pairs of `options` that are tried on `database`."""
    if database not in SERVERS:
        return list(permutations(options, 2))
    distance = 1 + SERVERS.index(database) % (len(options) - 1)
    return [(old, options[(n + distance) % len(options)]) for n, old in enumerate(options)]
