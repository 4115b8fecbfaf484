"""What policies have to say about a message that waits: each brings a function of its own."""

from collections.abc import Callable, Sequence

from sqlalchemy import Connection

from faststream_sqlbroker.core.status import LiveSubscriber, Reason, WaitingMessage
from faststream_sqlbroker.dialects.base import Dialect
from faststream_sqlbroker.explain import policies

Explain = Callable[[Connection, Dialect, WaitingMessage, Sequence[LiveSubscriber]], list[Reason]]
"""Gets the snapshot's connection, its dialect, the message and the live subscribers of its queue;
only reads."""

EXPLAINERS: list[Explain] = [
    policies.window,
    policies.burst,
    policies.slot,
    policies.concurrency,
    policies.once,
]
"""In the order in which their reasons are listed."""


def policy_reasons(
    connection: Connection,
    dialect: Dialect,
    message: WaitingMessage,
    subscribers: Sequence[LiveSubscriber],
) -> list[Reason]:
    """Why policies of `subscribers` keep `message` from its handler; nothing if they do not."""
    return [
        reason
        for explain in EXPLAINERS
        for reason in explain(connection, dialect, message, subscribers)
    ]
