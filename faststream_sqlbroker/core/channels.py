"""Channels, their consumers and queues over HTTP: states, tokens, settings and pages of jobs.

A job is a message in the queue `channel/consumer`. `TRANSITIONS` lists the allowed changes of
its state.
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

from faststream_sqlbroker.core.checks import check_choice, validate_integer, validate_queue
from faststream_sqlbroker.core.retry import RetryStrategyProto
from faststream_sqlbroker.core.stored import InvalidCursorError
from faststream_sqlbroker.core.text import format_value
from faststream_sqlbroker.core.times import (
    Duration,
    from_microseconds,
    parse_delay,
    parse_non_negative,
    parse_positive,
    to_microseconds,
)
from faststream_sqlbroker.exceptions import SetupError

QueueRole = Literal["publish", "consume"]
"""Roles of a queue's tokens; each role has its own token."""
MAX_WAIT = 30.0
"""Maximum wait of a request for a message in seconds: proxies cut off longer requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueTokens:
    """The tokens of a queue in the configuration.

    Args:
        publish: Allows publishing into the queue: 16 characters or more. None keeps the existing
            token.
        consume: Allows taking the queue's messages; otherwise like `publish`.

    Raises:
        SetupError: a token is invalid.
    """

    publish: str | None = field(default=None, repr=False)
    consume: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Validate both tokens."""
        check_token("publish", self.publish)
        check_token("consume", self.consume)


@dataclass(frozen=True, slots=True, kw_only=True)
class Queues:
    """Queues over HTTP: `broker.asgi(auth, queues=Queues())`.

    Args:
        queues: Tokens by the queue's full name; `PUT` creates those of other queues.
        retry_strategy: Decides when a message is due after a rollback without a delay, and how
            often it is tried; "auto" is the default of subscribers, None allows no further attempt.
        max_deliveries: A message that has lost this many leases is rejected. "auto" is the
            strategy's attempts plus 3, or 20 without such a limit; None is no limit.
        longest_wait: Maximum wait of a request for a message, up to 30 seconds.

    Raises:
        SetupError: a value is invalid.
    """

    queues: Mapping[str, QueueTokens] = field(default_factory=dict)
    retry_strategy: RetryStrategyProto | Literal["auto"] | None = "auto"
    max_deliveries: int | Literal["auto"] | None = "auto"
    longest_wait: Duration = MAX_WAIT

    def __post_init__(self) -> None:
        """Validate the names and the wait; the broker validates the other options."""
        # A token for a name that no publish can use would be useless.
        for name in self.queues:
            validate_queue(name)
        if self.wait > MAX_WAIT:
            raise SetupError(
                f"longest_wait must be {MAX_WAIT:g} seconds or less, got {self.longest_wait!r}"
            )

    @property
    def wait(self) -> float:
        """The maximum wait in seconds."""
        return parse_non_negative("longest_wait", self.longest_wait)


MESSAGE_ID = "channel-message-id"
"""Header with the common id of the jobs of one message."""
TYPES = ("push", "pull")
"""Types of consumers. A push consumer is a FastStream subscriber of its queue."""
MAX_TIMEOUT = 10 * 365 * 86_400
"""Maximum extension of a job's timeout in seconds."""
MIN_TOKEN_LENGTH = 16
"""Minimum length in characters of a token in a configuration."""
RANDOM_TOKEN_LENGTH = 43
"""Length in characters of a generated token: 256 random bits."""
PAGE_BYTES = 8 * 1024 * 1024
"""Maximum total size of the bodies of a page in bytes. A page of large jobs has fewer jobs, but
never none."""
MAX_JOB_ID = 2**63 - 1
"""Maximum id of a job; drivers refuse larger numbers."""
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~-]{0,99}", re.ASCII)
"""Ids are parts of paths; two ids and a slash fit into the name of a queue."""


class PullJobState(Enum):
    """The state of a job; the values are used in requests and answers."""

    QUEUED = "QUEUED"
    """PENDING or RETRYABLE."""
    INFLIGHT = "INFLIGHT"
    """PROCESSING."""
    DELIVERED = "DELIVERED"
    """COMPLETED, in the archive."""
    DEAD = "DEAD"
    """FAILED or DISCARDED, in the archive."""


TRANSITIONS = (
    (PullJobState.QUEUED, PullJobState.INFLIGHT),
    (PullJobState.INFLIGHT, PullJobState.DELIVERED),
    (PullJobState.INFLIGHT, PullJobState.DEAD),
    (PullJobState.DEAD, PullJobState.INFLIGHT),
)
"""Allowed changes of a job: its state in the database and the requested state."""


def is_allowed(state: PullJobState, requested: PullJobState, *, with_timeout: bool) -> bool:
    """Return True if a request may change `state` to `requested`.

    Repeating the current state is allowed, so that a client may send its request again. A request
    with an IncrementalTimeout, a time limit of its own for the job, may only start the job.
    """
    if (state, requested) in TRANSITIONS:
        return requested is PullJobState.INFLIGHT or not with_timeout
    return state is requested and not with_timeout


def is_valid_id(value: str) -> bool:
    """Return True if `value` is a valid id of a channel or consumer."""
    return _ID.fullmatch(value) is not None


def validate_id(value: object) -> str:
    """Return a valid id of a channel or consumer unchanged.

    Raises:
        SetupError: the id is invalid.
    """
    if not isinstance(value, str) or not is_valid_id(value):
        raise SetupError(
            "an id must be 1 to 100 letters, digits, dots, tildes, dashes and underscores, and "
            f"begin with a letter or digit, got {format_value(value)}"
        )
    return value


def validate_consumer_type(value: str | None) -> str:
    """Return the type of a consumer; a missing or empty type is push.

    Raises:
        SetupError: the type is unknown.
    """
    check_choice("type", value or "push", TYPES)
    return value or "push"


def build_queue_name(channel: str, consumer: str) -> str:
    """Return the name of the queue with a consumer's jobs."""
    return f"{channel}/{consumer}"


def parse_queue_name(queue: str) -> tuple[str, str] | None:
    """Return the channel and consumer of a queue of jobs, or None for another queue."""
    channel, slash, consumer = queue.partition("/")
    return (channel, consumer) if slash and is_valid_id(channel) and is_valid_id(consumer) else None


def create_token() -> str:
    """Return a random token of 256 bits."""
    return secrets.token_urlsafe(32)


def hash_token(token: str) -> str:
    """Hash a token for storage. A random token needs no salt and no slow hash."""
    # A client may send any text. Invalid text must not fail here, but match no stored hash.
    return sha256(token.encode(errors="surrogatepass")).hexdigest()


def is_token_valid(token: str, stored_hash: str) -> bool:
    """Return True if `token` has the hash `stored_hash`, in constant time."""
    return hmac.compare_digest(hash_token(token), stored_hash)


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumer:
    """A consumer in the configuration.

    Args:
        type: "push" or "pull"; empty is push.
        token: 16 characters or more. None keeps the existing token; a new consumer then gets a
            random one, and `PUT` with rotate=true returns another.

    Raises:
        SetupError: a value is invalid.
    """

    type: str | None = None
    token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Validate the type and the token."""
        validate_consumer_type(self.type)
        check_token("token", self.token)


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """A channel in the configuration.

    Args:
        token: Like a consumer's token.
        consumers: Consumers by id.

    Raises:
        SetupError: a value is invalid.
    """

    token: str | None = field(default=None, repr=False)
    consumers: Mapping[str, Consumer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Validate the token and the consumers' ids."""
        check_token("token", self.token)
        for name in self.consumers:
            validate_id(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Channels:
    """Channels over HTTP: `broker.asgi(auth, channels=Channels())`.

    Args:
        stop_timeout: Time limit of a job that requests no IncrementalTimeout.
        rational_delay: Added to each timeout.
        max_retries: Number of timeouts after which a job is queued again; the next one makes it
            dead.
        channels: Channels by id, created at the first request; `PUT` creates others.

    Raises:
        SetupError: a value is invalid.
    """

    stop_timeout: Duration = 30.0
    rational_delay: Duration = 2.0
    max_retries: int = 5
    channels: Mapping[str, Channel] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Validate all values."""
        parse_positive("stop_timeout", self.stop_timeout)
        parse_delay(self.rational_delay, name="rational_delay")
        validate_integer("max_retries", self.max_retries)
        for name in self.channels:
            validate_id(name)

    @property
    def timeout(self) -> float:
        """Seconds until a job is queued again."""
        extra = parse_delay(self.rational_delay, name="rational_delay")
        return parse_positive("stop_timeout", self.stop_timeout) + extra


def check_token(name: str, token: object) -> None:
    """Refuse a token that is too easy to guess; None is accepted.

    Raises:
        SetupError: the token is too short, or not text.
    """
    if token is not None and (not isinstance(token, str) or len(token) < MIN_TOKEN_LENGTH):
        actual = f"{len(token)} characters" if isinstance(token, str) else type(token).__name__
        raise SetupError(
            f"{name} must be text of {MIN_TOKEN_LENGTH} characters or more, got {actual}"
        )


@dataclass(frozen=True, slots=True)
class RegisteredEndpoint:
    """A channel or consumer, as stored in the database."""

    id: str
    token_hash: str = field(repr=False)
    type: str = ""
    """Type of a consumer."""
    new_token: str | None = field(default=None, repr=False)
    """The token, returned only once, after its creation."""
    created: bool = False
    changed: bool = False
    """True if anything was written."""
    previous_type: str = ""
    """Previous type of a consumer; for a new consumer, its type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullJob:
    """A job as seen by the consumer."""

    id: int
    state: PullJobState
    priority: int
    deliveries: int
    headers: Mapping[str, Any]
    payload: bytes
    token: UUID | None = None
    """Lease token of a job in flight."""
    lease_age: float = 0.0
    """Seconds since the start of the lease."""
    is_expired: bool = False
    """True if its lease had expired when the job was read."""

    @property
    def retries(self) -> int:
        """Number of repeated starts, including the next start of a queued job."""
        return self.deliveries if self.state is PullJobState.QUEUED else max(0, self.deliveries - 1)

    @property
    def message_id(self) -> str:
        """The common id of all jobs of a message."""
        value = self.headers.get(MESSAGE_ID)
        return value if isinstance(value, str) else str(self.id)


@dataclass(frozen=True, slots=True)
class JobsPage:
    """A page of jobs that may be taken."""

    jobs: list[PullJob]
    next_cursor: str | None
    """Cursor of the next page."""
    has_expired_leases: bool
    """True if leases of the queue have expired; their jobs are not in the page yet."""
    expired_ids: list[int]
    """Ids of jobs within the page that have expired long ago."""


def build_page_cursor(priority: int, due: datetime, job_id: int) -> str:
    """Encode the position of a page's last job as text."""
    position = [priority, to_microseconds(due), job_id]
    return base64.urlsafe_b64encode(json.dumps(position).encode()).decode().rstrip("=")


def parse_page_cursor(text: str) -> tuple[int, Any, int]:
    """Return priority, due time and id of a page cursor.

    Raises:
        InvalidCursorError: the text is not a cursor.
    """
    try:
        # `build_page_cursor` removed the padding.
        priority, due, last = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
        # Not isinstance, which would accept true and false.
        if any(type(number) is not int for number in (priority, due, last)):
            raise InvalidCursorError
        if not 0 <= last <= MAX_JOB_ID:
            raise InvalidCursorError
        return priority, from_microseconds(due), last
    # JSON that is nested too deeply raises a RecursionError.
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise InvalidCursorError from error
