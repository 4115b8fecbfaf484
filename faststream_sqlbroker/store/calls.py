"""Calls that wait to be written together."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from faststream_sqlbroker.core.rows import NewMessage
from faststream_sqlbroker.dialects.query import Query
from faststream_sqlbroker.exceptions import StoreError

MOST_ROWS = 1_000
"""Rows of one shared statement; a call that has more goes alone."""
MOST_BYTES = 4 * 1024 * 1024
"""Bodies of one shared statement."""


@dataclass(slots=True)
class Call:
    """One publish that waits for its commit, or another `query`; `deadline` is in the event loop's time."""

    rows: Sequence[NewMessage]
    done: asyncio.Future[Any]
    deadline: float
    query: Query[Any] | None = None


def take_group(calls: list[Call]) -> list[Call]:
    """Take the first of `calls` that fit into one statement; those that nobody waits for any more are dropped."""
    rows = size = taken = 0
    for call in calls:
        rows += len(call.rows)
        size += sum([len(row.payload) for row in call.rows])
        if taken and (rows > MOST_ROWS or size > MOST_BYTES or call.query is not None):
            break
        taken += 1
        if call.query is not None:
            break
    group = [call for call in calls[:taken] if not call.done.done()]
    del calls[:taken]
    return group


def answer(group: list[Call], result: Any) -> None:
    """Give each call its part of `result`."""
    start = 0
    for call in group:
        end = start + len(call.rows)
        if not call.done.done():
            call.done.set_result(result if call.query is not None else result[start:end])
        start = end


def fail(group: list[Call], error: Exception, cause: BaseException | None = None) -> None:
    """Raise `error` in each call that still waits."""
    for n, call in enumerate(group):
        if call.done.done():
            continue
        # One object raised in several tasks would collect all their tracebacks.
        own = error if n == 0 or not isinstance(error, StoreError) else type(error)(str(error))
        own.__cause__ = cause or error.__cause__
        call.done.set_exception(own)
