"""Channels and their consumers, whose jobs are taken over HTTP: states, tokens, settings, pages of
jobs; and the queues that a configuration serves over HTTP, with what a request may ask of them.

A job is a message in the queue `channel/consumer`. What is allowed is the table `TRANSITIONS`.
"""

import base64
import hmac
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from hashlib import sha256
from typing import Any, Literal
from uuid import UUID

from faststream_sqlbroker.core.checks import checked_queue, one_of, whole_number
from faststream_sqlbroker.core.retry import RetryStrategyProto
from faststream_sqlbroker.core.stored import NotACursorError
from faststream_sqlbroker.core.text import short
from faststream_sqlbroker.core.times import (
    Duration,
    delay_seconds,
    from_microseconds,
    positive_seconds,
    seconds_or_zero,
    to_microseconds,
)
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
        max_deliveries: A message that has lost so many leases is rejected. "auto" is the
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
            checked_queue(name)
        if self.wait > LONGEST_WAIT:
            raise SetupError(
                f"longest_wait must be {LONGEST_WAIT:g} seconds or less, got {self.longest_wait!r}"
            )

    @property
    def wait(self) -> float:
        """The longest wait in seconds."""
        return seconds_or_zero("longest_wait", self.longest_wait)


MESSAGE_ID = "channel-message-id"
"""The header with the id that the jobs of one message have in common."""
TYPES = ("push", "pull")
"""Of consumers. A push consumer is a FastStream subscriber of its queue."""
LONGEST_TIMEOUT = 10 * 365 * 86_400
"""Seconds that a job may add to its timeout."""
SHORTEST_TOKEN = 16
"""Characters of a token in a configuration."""
RANDOM_TOKEN = 43
"""Characters of a token that is made here: 256 random bits."""
PAGE_BYTES = 8 * 1024 * 1024
"""Bytes of the bodies of one page; a page of large jobs is shorter, but never empty."""
LARGEST_ID = 2**63 - 1
"""Of a job; drivers refuse larger numbers."""
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~-]{0,99}", re.ASCII)
"""An id stands in paths; two of them and a slash fit into the name of a queue."""


class JobState(Enum):
    """Where a job is; the values are those of requests and answers."""

    QUEUED = "QUEUED"
    """PENDING or RETRYABLE."""
    INFLIGHT = "INFLIGHT"
    """PROCESSING."""
    DELIVERED = "DELIVERED"
    """COMPLETED, in the archive."""
    DEAD = "DEAD"
    """FAILED or DISCARDED, in the archive."""


TRANSITIONS = (
    (JobState.QUEUED, JobState.INFLIGHT),
    (JobState.INFLIGHT, JobState.DELIVERED),
    (JobState.INFLIGHT, JobState.DEAD),
    (JobState.DEAD, JobState.INFLIGHT),
)
"""From a state, as the database has it, to the one that is asked for."""


def is_allowed(state: JobState, wanted: JobState, *, with_timeout: bool) -> bool:
    """Whether a request may ask for `wanted`; with an IncrementalTimeout only to start the job."""
    if (state, wanted) in TRANSITIONS:
        return wanted is JobState.INFLIGHT or not with_timeout
    return state is wanted and not with_timeout


def is_id(value: str) -> bool:
    """Whether it can be the id of a channel or of a consumer."""
    return _ID.fullmatch(value) is not None


def channel_id(value: object) -> str:
    """`value`, if it can be the id of a channel or of a consumer.

    Raises:
        SetupError: it cannot.
    """
    if not isinstance(value, str) or not is_id(value):
        raise SetupError(
            "an id has 1 to 100 letters, digits, dots, tildes, dashes and underscores, and begins "
            f"with a letter or digit, got {short(value)}"
        )
    return value


def consumer_type(value: str | None) -> str:
    """The type of a consumer; missing or empty is push.

    Raises:
        SetupError: it is something else.
    """
    one_of("type", value or "push", TYPES)
    return value or "push"


def queue_of(channel: str, consumer: str) -> str:
    """The queue of a consumer's jobs."""
    return f"{channel}/{consumer}"


def ids_of(queue: str) -> tuple[str, str] | None:
    """The channel and the consumer whose jobs are in `queue`; None: it cannot be such a queue."""
    channel, slash, consumer = queue.partition("/")
    return (channel, consumer) if slash and is_id(channel) and is_id(consumer) else None


def new_token() -> str:
    """A random token of 256 bits."""
    return secrets.token_urlsafe(32)


def hashed_token(token: str) -> str:
    """As it is stored. A random token needs no salt and no slow hash."""
    return sha256(token.encode(errors="surrogatepass")).hexdigest()


def token_fits(given: str, stored: str) -> bool:
    """Whether `given` is the token of the hash `stored`, in a time that does not tell."""
    return hmac.compare_digest(hashed_token(given), stored)


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumer:
    """A consumer in the configuration.

    Args:
        type: "push" or "pull"; empty is push.
        token: 16 characters or more. None keeps the one that is there; a new one is random then,
            and `PUT` with rotate=true tells another.

    Raises:
        SetupError: one of them is not valid.
    """

    type: str | None = None
    token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Check both."""
        consumer_type(self.type)
        check_token("token", self.token)


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """A channel in the configuration.

    Args:
        token: As a consumer's.
        consumers: By id.

    Raises:
        SetupError: one of them is not valid.
    """

    token: str | None = field(default=None, repr=False)
    consumers: Mapping[str, Consumer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check both."""
        check_token("token", self.token)
        for name in self.consumers:
            channel_id(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Channels:
    """Channels over HTTP: `broker.asgi(auth, channels=Channels())`.

    Args:
        stop_timeout: How long a job may take that gives no IncrementalTimeout.
        rational_delay: Added to each timeout.
        max_retries: How often a job that runs out of time is queued again; then it is dead.
        channels: Made at the first request, by id; `PUT` makes others.

    Raises:
        SetupError: one of them is not valid.
    """

    stop_timeout: Duration = 30.0
    rational_delay: Duration = 2.0
    max_retries: int = 5
    channels: Mapping[str, Channel] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check them."""
        positive_seconds("stop_timeout", self.stop_timeout)
        delay_seconds(self.rational_delay, name="rational_delay")
        whole_number("max_retries", self.max_retries)
        for name in self.channels:
            channel_id(name)

    @property
    def timeout(self) -> float:
        """Seconds until a job is queued again."""
        longer = delay_seconds(self.rational_delay, name="rational_delay")
        return positive_seconds("stop_timeout", self.stop_timeout) + longer


def check_token(name: str, token: object) -> None:
    """Refuse what is too easy to guess; None is no token.

    Raises:
        SetupError: it is.
    """
    if token is not None and (not isinstance(token, str) or len(token) < SHORTEST_TOKEN):
        given = f"{len(token)} characters" if isinstance(token, str) else type(token).__name__
        raise SetupError(f"{name} must be text of {SHORTEST_TOKEN} characters or more, got {given}")


@dataclass(frozen=True, slots=True)
class Registered:
    """A channel or a consumer, as the database has it."""

    id: str
    token_hash: str = field(repr=False)
    type: str = ""
    """Of a consumer."""
    new_token: str | None = field(default=None, repr=False)
    """Told once, when it was made."""
    created: bool = False
    changed: bool = False
    """Whether anything was written."""
    earlier_type: str = ""
    """Of a consumer: its type before; of a new one the type that it has got."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullJob:
    """A job as its consumer sees it."""

    id: int
    state: JobState
    priority: int
    deliveries: int
    headers: Mapping[str, Any]
    payload: bytes
    token: UUID | None = None
    """The lease of one in flight."""
    age: float = 0.0
    """Seconds since that was given."""
    over: bool = False
    """Whether its time was over when it was read."""

    @property
    def retries(self) -> int:
        """How often it was started again, or will have been with its next start."""
        return self.deliveries if self.state is JobState.QUEUED else max(0, self.deliveries - 1)

    @property
    def message_id(self) -> str:
        """What all jobs of its message have in common."""
        found = self.headers.get(MESSAGE_ID)
        return found if isinstance(found, str) else str(self.id)


@dataclass(frozen=True, slots=True)
class JobsPage:
    """Jobs that may be taken."""

    jobs: list[PullJob]
    following: str | None
    """Where the next page begins."""
    overdue: bool
    """Whether the queue has leases that have ended: their jobs are not in the page yet."""
    expired: list[int]
    """Jobs that stand among those of the page, and have expired long ago."""


def page_cursor(priority: int, due: datetime, job_id: int) -> str:
    """The position of a page's last job, as text."""
    position = [priority, to_microseconds(due), job_id]
    return base64.urlsafe_b64encode(json.dumps(position).encode()).decode().rstrip("=")


def page_position(text: str) -> tuple[int, Any, int]:
    """Priority, due time and id of a `page_cursor`.

    Raises:
        NotACursorError: it is none.
    """
    try:
        priority, due, last = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
        if any(type(each) is not int for each in (priority, due, last)):
            raise NotACursorError
        if not 0 <= last <= LARGEST_ID:
            raise NotACursorError
        return priority, from_microseconds(due), last
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise NotACursorError from error
