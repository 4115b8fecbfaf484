"""Policies of one or two arguments: Delay, Once, Concurrency and BlockingWait."""

from dataclasses import dataclass
from typing import Literal

from faststream_sqlbroker.core.checks import one_of, whole_number
from faststream_sqlbroker.core.policies import options
from faststream_sqlbroker.core.policies.header import (
    Header,
    Key,
    checked_key,
    key_text,
    keyed,
)
from faststream_sqlbroker.core.policies.options import (
    MICROSECONDS,
    WITHOUT_KEY,
    microseconds,
    seconds,
)
from faststream_sqlbroker.core.policies.scopes import checked_scope, scope_text
from faststream_sqlbroker.core.times import Duration


@dataclass(frozen=True, init=False)
class Delay:
    """Every message waits `delay` after its due time, once.

    Its retries are not delayed again: the retry strategy sets their time.
    """

    delay: int
    """Microseconds."""

    def __init__(self, delay: Duration) -> None:
        """`delay` is longer than 0: seconds, a timedelta or text like "5m".

        Raises:
            SetupError: it is not.
        """
        object.__setattr__(self, "delay", microseconds("Delay", delay))

    def __str__(self) -> str:
        return f"Delay({seconds(self.delay)})"


# Once: at most one run for each key.


@dataclass(frozen=True, init=False)
class Once:
    """One message of each key is handled, at most once.

    The key is claimed in a committed transaction before the handler starts, and stays claimed for
    `ttl`. Other messages of the key are DISCARDED as duplicates. A handler that raises
    `RetryPossible` gives the key back and is tried again; any other error ends its message. After
    a crash it is not known how far the handler got: the message is FAILED ("unknown_outcome"),
    and `broker.admin.unknown()` lists it.
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
        """Say how long a key stays claimed.

        Args:
            ttl: From the start of its handler.
            key: False is refused. `Header("order")`: the value of that header is the key.
            without_key: What happens to a message without a key: it is handled as usual, or it
                is FAILED.

        Raises:
            SetupError: the ttl is not longer than 0, or key=False.
        """
        keyed("Once", key)
        length = microseconds("Once's ttl", ttl)
        one_of("Once's without_key", without_key, WITHOUT_KEY)
        options.assign(self, ttl=length, key=key, without_key=without_key)

    def __str__(self) -> str:
        of = key_text("key", self.key) if isinstance(self.key, Header) else ""
        return f"Once({seconds(self.ttl)}{of})"


# Concurrency: a limit on leases at a time, for the whole fleet.


@dataclass(frozen=True, init=False)
class Concurrency:
    """At most `limit` messages of a queue, or of each of its keys, are leased at a time.

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
        """Say how many.

        Args:
            limit: Most messages at a time, 1 to 1 000 000.
            per_key: Whether the limit applies to each key, else to the queue. `Header("tenant")`:
                to each value of that header.
            without_key: With per_key=True, what happens to a message without a key: it is handled
                without a limit, or it is FAILED.
            scope: A name that several queues and subscribers share: their leases are counted
                together. None: each queue is counted by itself.

        Raises:
            SetupError: a value out of its range, `without_key` without per_key=True, or `scope`
                with per_key=True.
        """
        whole_number("Concurrency's limit", limit, most=1_000_000)
        checked_key("Concurrency's per_key", per_key)
        options.without_key("Concurrency", without_key, keyed=bool(per_key), mend="per_key=True")
        shared = checked_scope("Concurrency", scope, refused="per_key=True" if per_key else None)
        own = {"without_key": without_key, "scope": shared}
        options.assign(self, limit=limit, per_key=per_key, **own)

    def __str__(self) -> str:
        each = key_text("per_key", self.per_key)
        return f"Concurrency({self.limit}{each}{scope_text(self.scope)})"

    def leases(self, running: int, wanted: int, starting: int, limit: int | None = None) -> int:
        """How many of `wanted` leases may be given while `running` are, if `starting` of them start
        at once; `limit` takes the place of its own.

        What only waits for a worker gets a quarter of the free leases at most: workers of other
        processes that are free must find some.
        """
        free = max(0, (self.limit if limit is None else limit) - running)
        at_once = min(free, wanted, starting)
        return at_once + min(wanted - at_once, (free - at_once) // 4)


# BlockingWait: a worker pauses after a failure, which slows the whole queue down (back-pressure).


@dataclass(frozen=True, init=False)
class BlockingWait:
    """After a failed attempt, the worker waits before it nacks the message and takes the next one.

    The message stays leased during the wait. Stopping the broker ends the wait.
    """

    wait: int
    """Microseconds."""

    def __init__(self, wait: Duration) -> None:
        """`wait` is longer than 0: seconds, a timedelta or text like "2s".

        Raises:
            SetupError: it is not.
        """
        object.__setattr__(self, "wait", microseconds("BlockingWait", wait))

    @property
    def seconds(self) -> float:
        """The length in seconds."""
        return self.wait / MICROSECONDS

    def __str__(self) -> str:
        return f"BlockingWait({seconds(self.wait)})"
