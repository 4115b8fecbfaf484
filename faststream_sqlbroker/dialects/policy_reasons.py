"""What policies have to say about a message that waits: each brings a function of its own."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from sqlalchemy import Connection

from faststream_sqlbroker.core.status import LiveSubscriber, Reason, WaitingMessage
from faststream_sqlbroker.dialects import policy_explain

if TYPE_CHECKING:
    from faststream_sqlbroker.dialects.base import Dialect

Explain = Callable[[Connection, "Dialect", WaitingMessage, Sequence[LiveSubscriber]], list[Reason]]
"""Gets the snapshot's connection, its dialect, the message and the live subscribers of its queue;
only reads."""

EXPLAINERS: list[Explain] = [
    policy_explain.window,
    policy_explain.burst,
    policy_explain.slot,
    policy_explain.concurrency,
    policy_explain.once,
]
"""In the order in which their reasons are listed."""


def policy_reasons(
    connection: Connection,
    dialect: "Dialect",
    message: WaitingMessage,
    subscribers: Sequence[LiveSubscriber],
) -> list[Reason]:
    """Why policies of `subscribers` keep `message` from its handler; nothing if they do not."""
    return [
        reason
        for explain in EXPLAINERS
        for reason in explain(connection, dialect, message, subscribers)
    ]
