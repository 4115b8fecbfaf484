"""Destinations that only messages name: whether a live subscriber has such a queue; asked, and told, once for each.

A name with a slip of the pen is a queue as any other: its messages wait there for ever, and nobody is told.
"""

import logging
from collections.abc import Iterable
from time import monotonic
from typing import NamedTuple

from faststream_sqlbroker.core.presence import LiveSubscriber
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.core.text import short
from faststream_sqlbroker.flow.loop import Log

MOST_NAMES = 1_000
"""Names that are asked about: messages may name any number, and each is remembered."""


class _First(NamedTuple):
    """The first message that named a queue."""

    at: float
    message_id: int
    queue: str
    log: Log


class Destinations:
    """The names that messages of one broker's subscribers in this process have given."""

    def __init__(self, patience: float) -> None:
        """A name is asked about `patience` seconds after it was first given: its subscriber may be starting."""
        self._patience = patience
        self._asked: set[str] = set()
        self._open: dict[str, _First] = {}

    def named(self, queue: str, row: ClaimedMessage, log: Log) -> None:
        """`row` is moved to `queue`, as its header says; `log` is told if nobody has such a queue."""
        if queue not in self._asked and len(self._asked) < MOST_NAMES:
            self._asked.add(queue)
            self._open[queue] = _First(monotonic(), row.id, row.queue, log)

    @property
    def are_due(self) -> bool:
        """Whether there is something to ask."""
        return any(self._is_due(first) for first in self._open.values())

    def compare(self, living: Iterable[LiveSubscriber]) -> None:
        """Warn of those that are due and that none of `living` has."""
        known = {queue for subscriber in living for queue in subscriber.queues}
        for queue, first in [each for each in self._open.items() if self._is_due(each[1])]:
            del self._open[queue]
            if queue not in known:
                text = (
                    f"message {first.message_id} of queue {first.queue!r} named the destination {short(queue)}, and no "
                    "live subscriber has a queue of this name: what is moved there waits until one comes. destinations= "
                    "says which names are meant"
                )
                first.log(logging.WARNING, text, message_id=first.message_id)

    def _is_due(self, first: _First) -> bool:
        return monotonic() - first.at >= self._patience
