"""Positions of what the pages draw as SVG."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.stored import StoredMessage

WIDTH = 120
"""Of a sparkline, in its own units."""
HEIGHT = 24
"""Of it, too."""


def spark_points(values: Sequence[int]) -> str:
    """The points of a polyline that shows `values` from left to right."""
    if not values:
        return ""
    highest = max(*values, 1)
    step = WIDTH / max(len(values) - 1, 1)
    return " ".join(
        f"{n * step:.1f},{HEIGHT - 1 - (HEIGHT - 2) * value / highest:.1f}"
        for n, value in enumerate(values)
    )


@dataclass(frozen=True, slots=True)
class Box:
    """A state in the diagram of a message."""

    state: str
    x: int
    y: int
    at: datetime | None
    """When the message came to it, as far as its row tells."""
    current: bool


_PLACES = {
    MessageState.PENDING: (10, 80),
    MessageState.PROCESSING: (240, 80),
    MessageState.RETRYABLE: (240, 190),
    MessageState.COMPLETED: (470, 10),
    MessageState.FAILED: (470, 80),
    MessageState.DISCARDED: (470, 150),
}


def boxes(message: StoredMessage) -> list[Box]:
    """The states, with the times that the row of `message` has of them."""
    retried = message.last_attempt_at if message.state is MessageState.RETRYABLE else None
    times = {
        MessageState.PENDING: message.created_at,
        MessageState.PROCESSING: message.acquired_at,
        MessageState.RETRYABLE: retried,
    }
    if message.archived_at is not None:
        times[message.state] = message.archived_at
    return [
        Box(state.name, x, y, times.get(state), state is message.state)
        for state, (x, y) in _PLACES.items()
    ]
