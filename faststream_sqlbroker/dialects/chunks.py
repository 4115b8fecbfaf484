"""Lists too long for one statement."""

from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

IDS_PER_STATEMENT = 500
"""Below MariaDB's in_predicate_conversion_threshold (1 000), above which IN becomes a join by scan."""


def chunks(items: Sequence[T], size: int = IDS_PER_STATEMENT) -> Iterator[Sequence[T]]:
    """Slices of `items` of at most `size`."""
    for start in range(0, len(items), size):
        yield items[start : start + size]
