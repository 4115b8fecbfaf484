"""How PostgreSQL's answers are read."""

from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any
from uuid import UUID

from faststream_sqlbroker.core.rows import (
    ClaimedMessage,
    ReadyPair,
    ReadyPairs,
    Settlement,
    SettleResult,
)

_DUE = itemgetter(10, 0)
"""Due time (as bytes that sort like it) and id among `CLAIMED_COLUMNS`."""
_NEGATIVE = 0x80


def read_claimed(rows: Iterable[Sequence[Any]], token: UUID) -> list[ClaimedMessage]:
    """`CLAIMED_COLUMNS` as messages; what needs decoding is left until somebody looks."""
    return [
        ClaimedMessage(
            r[0],
            r[1],
            r[2],
            r[3],
            r[4],
            r[5],
            r[6],
            r[7],
            r[8],
            r[9],
            r[10],
            r[11],
            r[12],
            r[13],
            r[14],
            token,
            r[15],
        )
        for r in rows
    ]


def read_pairs(rows: Iterable[Sequence[Any]]) -> ReadyPairs:
    """Pairs, and how long the server took to find them."""
    pairs = ReadyPairs()
    for queue, priority, due_in, due, took, at in rows:
        pairs.took, pairs.at = max(pairs.took, took), at
        if queue is not None:
            pairs.append(ReadyPair(queue, priority, due_in, due))
    return pairs


def settled_of(settlements: Sequence[Settlement], settled: set[int]) -> SettleResult:
    """The result of `settlements`, of which the ids `settled` were written."""
    if len(settled) == len(settlements):
        return SettleResult(settled)
    return SettleResult(settled, {s.id for s in settlements} - settled)


def in_order(rows: Iterable[Sequence[Any]]) -> list[Sequence[Any]]:
    """By due time and id; as bytes, times before 2000 come after all others."""
    ordered = sorted(rows, key=_DUE)
    if ordered and ordered[-1][10][0] >= _NEGATIVE:
        first = next(n for n, row in enumerate(ordered) if row[10][0] >= _NEGATIVE)
        ordered = ordered[first:] + ordered[:first]
    return ordered
