"""Policies with one or two arguments: Delay, Once, Concurrency and BlockingWait."""

from dataclasses import dataclass
from typing import Literal

from faststream_sqlbroker.core.checks import validate_integer
from faststream_sqlbroker.core.policies import argument_checks
from faststream_sqlbroker.core.policies.argument_checks import (
    MICROSECONDS,
    format_seconds,
    parse_microseconds,
)
from faststream_sqlbroker.core.policies.header import (
    Header,
    Key,
    check_required_key,
    format_key,
    validate_key,
)
from faststream_sqlbroker.core.policies.scopes import format_scope, validate_scope
from faststream_sqlbroker.core.times import Duration


@dataclass(frozen=True, init=False)
class Delay:
    """Delay each message once, by `delay` after the due time.

    Its retries are not delayed again: the retry strategy sets their time.
    """

    delay: int
    """Microseconds."""

    def __init__(self, delay: Duration) -> None:
        """Set the delay: longer than 0, as seconds, a timedelta or text like "5m".

        Raises:
            SetupError: the delay is not a duration above 0.
        """
        object.__setattr__(self, "delay", parse_microseconds("Delay", delay))

    def __str__(self) -> str:
        return f"Delay({format_seconds(self.delay)})"


# Once: at most one run per key.


@dataclass(frozen=True, init=False)
class Once:
    """One message of each key is handled, at most once.

    The key is claimed in a committed transaction before the handler starts, and stays claimed for
    `ttl`. Further messages of the key are DISCARDED as duplicates. If a handler raises
    `RetryPossible`, the key is released and the message is tried again; any other error ends the
    message. After a crash it is unknown how far the handler got: the message is FAILED
    ("unknown_outcome"), and `broker.admin.unknown()` lists it.
    """

    ttl: int
    """Microseconds."""
    key: Key
    without_key: str

    def __init__(
        self,
        ttl: Duration,
        *,
        key: Key = True,
        without_key: Literal["deliver", "dead_letter"] = "deliver",
    ) -> None:
        """Set the time for which a key stays claimed.

        Args:
            ttl: Time from the start of the handler.
            key: False is refused. `Header("order")`: the value of that header is the key.
            without_key: What happens to a message without a key: it is handled as usual, or it
                is FAILED.

        Raises:
            SetupError: the ttl is not longer than 0, or key=False.
        """
        check_required_key("Once", key, without_key)
        length = parse_microseconds("Once's ttl", ttl)
        argument_checks.set_attributes(self, ttl=length, key=key, without_key=without_key)

    def __str__(self) -> str:
        key = format_key("key", self.key) if isinstance(self.key, Header) else ""
        return f"Once({format_seconds(self.ttl)}{key})"


# Concurrency: a limit on simultaneous leases of the complete fleet.


@dataclass(frozen=True, init=False)
class Concurrency:
    """Lease at most `limit` messages of a queue, or of each key, at a time.

    The limit is exact for leases. A worker that has lost its lease runs on until it notices, so
    for that time one more handler may run.
    """

    limit: int
    per_key: Key
    without_key: str
    scope: str | None

    def __init__(
        self,
        limit: int,
        *,
        per_key: Key = False,
        without_key: Literal["deliver", "dead_letter"] = "deliver",
        scope: str | None = None,
    ) -> None:
        """Set the limit.

        Args:
            limit: Maximum number of messages at a time, 1 to 1 000 000.
            per_key: If True, the limit applies to each key, else to the queue. `Header("tenant")`:
                to each value of that header.
            without_key: With per_key=True, what happens to a message without a key: it is handled
                without a limit, or it is FAILED.
            scope: A name shared by several queues and subscribers, whose leases are counted
                together. None: each queue is counted by itself.

        Raises:
            SetupError: a value is out of range, or `without_key` is given without per_key=True, or
                `scope` with per_key=True.
        """
        validate_integer("Concurrency's limit", limit, maximum=1_000_000)
        validate_key("Concurrency's per_key", per_key)
        argument_checks.check_without_key(
            "Concurrency", without_key, has_key=bool(per_key), option="per_key=True"
        )
        valid_scope = validate_scope(
            "Concurrency", scope, conflict="per_key=True" if per_key else None
        )
        key_options = {"without_key": without_key, "scope": valid_scope}
        argument_checks.set_attributes(self, limit=limit, per_key=per_key, **key_options)

    def __str__(self) -> str:
        key = format_key("per_key", self.per_key)
        return f"Concurrency({self.limit}{key}{format_scope(self.scope)})"

    def leases(self, running: int, wanted: int, starting: int, limit: int | None = None) -> int:
        """Return the number of `wanted` leases that may be granted while `running` leases exist.

        `starting` of the messages start at once; `limit` replaces the policy's own limit, if
        another process has a lower limit. Messages that would only wait for a worker get a quarter
        of the free leases at most: free workers of other processes must find some.
        """
        free = max(0, (self.limit if limit is None else limit) - running)
        starting_now = min(free, wanted, starting)
        return starting_now + min(wanted - starting_now, (free - starting_now) // 4)


# BlockingWait: a worker pauses after a failure, which slows down the queue (back-pressure).


@dataclass(frozen=True, init=False)
class BlockingWait:
    """After a failed attempt, the worker waits before the nack and before the next message.

    The message stays leased during the wait. Stopping the broker ends the wait.
    """

    wait: int
    """Microseconds."""

    def __init__(self, wait: Duration) -> None:
        """Set the wait: longer than 0, as seconds, a timedelta or text like "2s".

        Raises:
            SetupError: the wait is not a duration above 0.
        """
        object.__setattr__(self, "wait", parse_microseconds("BlockingWait", wait))

    @property
    def seconds(self) -> float:
        """Length of the wait in seconds."""
        return self.wait / MICROSECONDS

    def __str__(self) -> str:
        return f"BlockingWait({format_seconds(self.wait)})"
