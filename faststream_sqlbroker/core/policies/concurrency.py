"""Concurrency: at most so many leases at a time, for the whole fleet."""

from dataclasses import dataclass
from typing import Literal

from faststream_sqlbroker.core.checks import flag, whole_number
from faststream_sqlbroker.core.policies import options


@dataclass(frozen=True, init=False)
class Concurrency:
    """At most `limit` messages of a queue, or of each of its keys, are leased at a time.

    Exact in leases: a worker that has lost its lease may still be running until it notices.
    """

    limit: int
    per_key: bool
    without_key: str

    def __init__(
        self,
        limit: int,
        *,
        per_key: bool = False,
        without_key: Literal["deliver", "dead_letter"] = "deliver",
    ) -> None:
        """Say how many.

        Args:
            limit: Most messages at a time, 1 to 1 000 000.
            per_key: Whether the limit is each key's, else the queue's.
            without_key: With per_key=True, what becomes of a message without a key: it passes, or it is FAILED.

        Raises:
            SetupError: a value out of its range, or `without_key` where no key is asked for.
        """
        object.__setattr__(
            self, "limit", whole_number("Concurrency's limit", limit, most=1_000_000)
        )
        flag("Concurrency's per_key", per_key)
        options.without_key("Concurrency", without_key, keyed=per_key, mend="per_key=True")
        object.__setattr__(self, "per_key", per_key)
        object.__setattr__(self, "without_key", without_key)

    def __str__(self) -> str:
        return f"Concurrency({self.limit}{', per_key=True' if self.per_key else ''})"
