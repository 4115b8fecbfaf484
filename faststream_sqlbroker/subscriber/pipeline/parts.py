"""What a message meets on its way through one subscriber."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from faststream import AckPolicy

from faststream_sqlbroker.subscriber.pipeline.acknowledging import Acknowledging
from faststream_sqlbroker.subscriber.pipeline.answers import Answers
from faststream_sqlbroker.subscriber.pipeline.arguments import Call
from faststream_sqlbroker.subscriber.pipeline.bodies import Parse
from faststream_sqlbroker.subscriber.pipeline.context import Scopes
from faststream_sqlbroker.subscriber.running_calls import RunningCalls


@dataclass(frozen=True, slots=True)
class Parts:
    """Found once, when the subscriber starts."""

    lock: RunningCalls
    """Counts the calls that run; a stop waits for them."""
    state: Any
    """FastStream's logger."""
    context: Any
    """FastStream's context."""
    scopes: Scopes
    parse: Parse
    """Makes the message of a row."""
    parse_any: Callable[[Any], Awaitable[Any]]
    """Makes the message of a row, or of a batch."""
    decoder: Any
    log_context: Callable[[Any], dict[str, str]]
    """The columns of the log for a message."""
    call: Call
    answers: Answers
    acknowledging: Acknowledging
    policy: AckPolicy
