"""What a broker says at its start, for it may surprise."""

import logging
from collections.abc import Iterable, Iterator
from typing import Any

from faststream_sqlbroker.broker.pipelines import endless_way
from faststream_sqlbroker.core.distribution import shared_files_warning
from faststream_sqlbroker.store import Store
from faststream_sqlbroker.subscriber.usecase import QueueSubscriber


def startup_warnings(store: Store, subscribers: Iterable[Any]) -> Iterator[tuple[int, str]]:
    """Levels and lines for the log."""
    if shared := shared_files_warning():
        yield logging.WARNING, shared
    ours = [subscriber for subscriber in subscribers if isinstance(subscriber, QueueSubscriber)]
    if shortage := store.shortage:
        yield logging.WARNING, shortage
    transactional = [
        s.config.settings.max_workers for s in ours if s.calls and s.config.settings.transactional
    ]
    if shortage := store.handler_shortage(sum(transactional)):
        yield logging.WARNING, shortage
    for name in (name for subscriber in ours for name in subscriber.unstarted_publishers):
        text = (
            f"a handler's answers go to the publisher {name}, whose broker is not connected: await its "
            "connect() or start() first; until then those messages fail and are tried again"
        )
        yield logging.WARNING, text
    if loop := endless_way(ours):
        yield logging.WARNING, loop
    settings = [subscriber.config.settings for subscriber in ours if subscriber.forward_to is None]
    if any(s.handler_timeout is None and s.max_lease is None for s in settings):
        text = (
            "without handler_timeout and max_lease a handler that hangs holds its message for as long as "
            "its process lives"
        )
        yield logging.INFO, text
