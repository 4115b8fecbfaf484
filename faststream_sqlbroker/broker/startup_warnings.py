"""Warnings at the start of a broker about settings that may surprise."""

import logging
from collections.abc import Iterable, Iterator
from typing import Any

from faststream_sqlbroker.broker.pipelines import endless_way
from faststream_sqlbroker.core.distribution import shared_files_warning
from faststream_sqlbroker.store import Store
from faststream_sqlbroker.subscriber.usecase import QueueSubscriber


def startup_warnings(store: Store, subscribers: Iterable[Any]) -> Iterator[tuple[int, str]]:
    """Levels and lines for the log."""
    ours = [subscriber for subscriber in subscribers if isinstance(subscriber, QueueSubscriber)]
    warnings = [
        shared_files_warning(),
        store.shortage,
        store.handler_shortage(_transactional_workers(ours)),
        *_unstarted_publishers(ours),
        endless_way(ours),
    ]
    yield from ((logging.WARNING, text) for text in warnings if text)
    settings = [subscriber.config.settings for subscriber in ours if subscriber.calls]
    if any(s.handler_timeout is None and s.max_lease is None for s in settings):
        text = (
            "without handler_timeout and max_lease, a handler that hangs holds its message until "
            "its process ends"
        )
        yield logging.INFO, text


def _transactional_workers(subscribers: Iterable[QueueSubscriber]) -> int:
    """Handlers that may hold a connection at the same time."""
    settings = [subscriber.config.settings for subscriber in subscribers if subscriber.calls]
    return sum(s.max_workers for s in settings if s.transactional)


def _unstarted_publishers(subscribers: Iterable[QueueSubscriber]) -> Iterator[str]:
    for subscriber in subscribers:
        for name in subscriber.unstarted_publishers:
            yield (
                f"a handler's answers go to the publisher {name}, whose broker is not connected: "
                "await its connect() or start() first; until then these messages fail and are "
                "tried again"
            )
