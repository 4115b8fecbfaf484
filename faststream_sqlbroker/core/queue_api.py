"""Queues over HTTP: which there are by configuration, and what a request may ask of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from faststream_sqlbroker.core.channels import check_token
from faststream_sqlbroker.core.checks import queue_problem
from faststream_sqlbroker.core.retry import RetryStrategyProto
from faststream_sqlbroker.core.text import short
from faststream_sqlbroker.core.times import Duration, seconds_or_zero
from faststream_sqlbroker.exceptions import SetupError

QUEUE_ROLES = ("publish", "consume")
"""What a token of a queue allows; each has one of its own."""
QueueRole = Literal["publish", "consume"]
LONGEST_WAIT = 30.0
"""Seconds that a request may wait for a message: proxies cut off what takes longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueTokens:
    """The tokens of a queue in the configuration.

    Args:
        publish: Allows to publish into it: 16 characters or more. None keeps the one that is there.
        consume: Allows to take its messages; as `publish`.

    Raises:
        SetupError: one of them is not valid.
    """

    publish: str | None = field(default=None, repr=False)
    consume: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Check both."""
        check_token("publish", self.publish)
        check_token("consume", self.consume)


@dataclass(frozen=True, slots=True, kw_only=True)
class Queues:
    """Queues over HTTP: `broker.asgi(auth, queues=Queues())`.

    Args:
        queues: Their tokens, by the queue's full name; `PUT` makes those of others.
        retry_strategy: Decides when a message is due after a rollback without a delay, and how
            often it is tried; "auto" is the default of subscribers, None allows no further attempt.
        max_deliveries: A message that was delivered more often is rejected. "auto" is the
            strategy's attempts plus 3, or 20 without such a limit; None is no limit.
        longest_wait: How long a request may wait for a message, up to 30 seconds.

    Raises:
        SetupError: one of them is not valid.
    """

    queues: Mapping[str, QueueTokens] = field(default_factory=dict)
    retry_strategy: RetryStrategyProto | Literal["auto"] | None = "auto"
    max_deliveries: int | Literal["auto"] | None = "auto"
    longest_wait: Duration = LONGEST_WAIT

    def __post_init__(self) -> None:
        """Check the names and the wait; the broker checks the others as those of `reserve`."""
        # A name that no publish could use would have a token for nothing.
        for name in self.queues:
            if (problem := queue_problem(name)) is not None:
                raise SetupError(f"{short(name)} cannot be the name of a queue: {problem}")
        if self.wait > LONGEST_WAIT:
            raise SetupError(
                f"longest_wait must be {LONGEST_WAIT:g} seconds or less, got {self.longest_wait!r}"
            )

    @property
    def wait(self) -> float:
        """The longest wait in seconds."""
        return seconds_or_zero("longest_wait", self.longest_wait)
