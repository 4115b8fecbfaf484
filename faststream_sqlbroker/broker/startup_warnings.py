"""Log lines at the start of a broker: surprising settings, and the growth of the archive."""

import logging
from collections.abc import Iterable, Iterator
from typing import Any

from faststream_sqlbroker.broker.pipelines import find_forward_loop
from faststream_sqlbroker.core.distribution import get_shared_files_warning
from faststream_sqlbroker.core.policies import Concurrency, Throttle
from faststream_sqlbroker.database.store import Store
from faststream_sqlbroker.exceptions import StoreError
from faststream_sqlbroker.subscriber.usecase import QueueSubscriber


def iter_startup_warnings(store: Store, subscribers: Iterable[Any]) -> Iterator[tuple[int, str]]:
    """Yield the level and text of each log line about surprising settings.

    None of these settings is an error, so the broker starts nevertheless.
    """
    queue_subscribers = [
        subscriber for subscriber in subscribers if isinstance(subscriber, QueueSubscriber)
    ]
    warnings = [
        get_shared_files_warning(),
        store.shortage,
        store.get_handler_shortage(_count_transactional_workers(queue_subscribers)),
        *_iter_unconnected_publishers(queue_subscribers),
        *_iter_unscoped_limits(queue_subscribers),
        find_forward_loop(queue_subscribers),
    ]
    yield from ((logging.WARNING, text) for text in warnings if text)
    settings = [subscriber.config.settings for subscriber in queue_subscribers if subscriber.calls]
    if any(s.handler_timeout is None and s.max_lease is None for s in settings):
        text = (
            "a subscriber has neither handler_timeout nor max_lease: a handler that hangs holds "
            "its message until the process ends"
        )
        yield logging.DEBUG, text


async def format_archive_growth(store: Store) -> str | None:
    """Describe how fast the archive grows, for the log of a start without retention.

    Return None if it does not grow, or if this process may not read it.
    """
    if store.tables.archive is None:
        return None
    try:
        per_day = await store.archive_growth.estimate_rows_per_day()
    except StoreError:
        return None  # The right may be missing, which must not fail a start.
    if not per_day:
        return None
    return (
        f"the archive grows by about {per_day:,} messages a day and has no retention: to prune it, "
        'set SqlBroker(retention=Retention(completed="30d"))'
    )


def _count_transactional_workers(subscribers: Iterable[QueueSubscriber]) -> int:
    """Count the handlers that may hold a connection at the same time."""
    settings = [subscriber.config.settings for subscriber in subscribers if subscriber.calls]
    return sum(s.max_workers for s in settings if s.transactional)


def _iter_unconnected_publishers(subscribers: Iterable[QueueSubscriber]) -> Iterator[str]:
    """Warn about answers that go to another broker which is not connected yet."""
    for subscriber in subscribers:
        for name in (name for name, can_publish in subscriber.relays.items() if not can_publish):
            yield (
                f"a handler's answers go to the publisher {name}, whose broker is not connected: "
                "the handler's messages fail and are retried. Await connect() or start() of that "
                "broker first"
            )


def _iter_unscoped_limits(subscribers: Iterable[QueueSubscriber]) -> Iterator[str]:
    """Warn about limits without a scope on subscribers of several queues.

    A scope is a name under which queues share a limit. Without it each queue has the full limit,
    although one limit for all of them may be meant. Limits per key are not reported.
    """
    for settings in (subscriber.config.settings for subscriber in subscribers):
        if len(settings.queues) < 2:  # noqa: PLR2004 - a single queue shares no limit
            continue
        for policy in settings.policies:
            if not isinstance(policy, Throttle | Concurrency) or policy.scope is not None:
                continue
            if not (policy.key if isinstance(policy, Throttle) else policy.per_key):
                yield (
                    f"{policy} of the subscriber of {', '.join(sorted(settings.queues))} limits "
                    "each queue separately: give it a scope for one limit over all of them, or "
                    "declare a subscriber for each queue"
                )
