"""Settings of one subscriber's loops: checked values, each with its default."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from faststream_sqlbroker.core.policies import Header, Policy
from faststream_sqlbroker.core.retry import (
    RetryStrategyProto,
    default_retry_strategy,
    get_max_attempts,
)
from faststream_sqlbroker.core.routing import Destination
from faststream_sqlbroker.core.settle import SettleRules

SPARE_DELIVERIES = 3
"""Difference between `max_deliveries` and a strategy's `max_attempts`."""
DELIVERIES_WITHOUT_LIMIT = 20
"""`max_deliveries` under a strategy that does not limit attempts: a message that kills its process
would otherwise come back for ever.
"""


def get_default_max_deliveries(attempts: int | None) -> int:
    """Return the default of `max_deliveries` for a strategy's maximum number of attempts."""
    return DELIVERIES_WITHOUT_LIMIT if attempts is None else attempts + SPARE_DELIVERIES


@dataclass(frozen=True, kw_only=True)
class ConsumerSettings:
    """Options of a subscriber for the loops; durations are in seconds.

    `SubscriberOptions` explains each. `SubscriberSettings` adds the options of the handler's
    pipeline, and checks all of them.
    """

    queues: tuple[str, ...]
    weights: tuple[int, ...] | None = None
    """Weights of `queues`, if given."""
    max_workers: int = 1
    fetch_batch_size: int = 100
    max_not_processed_factor: float = 1.5
    max_prefetch_bytes: int | None = 64 * 2**20
    min_fetch_interval: float = 0.0
    max_fetch_interval: float = 1.0
    flush_interval: float = 0.05
    flush_batch_size: int = 500
    release_stuck_interval: float = 60.0
    release_stuck_timeout: float = 600.0
    max_deliveries: int | None = get_default_max_deliveries(
        get_max_attempts(default_retry_strategy())
    )
    """The default belongs to the default retry strategy; `make_settings` computes it for a
    given one.
    """
    handler_timeout: float | None = None
    max_lease: float | None = None
    retry_strategy: RetryStrategyProto | None = field(default_factory=default_retry_strategy)
    retain_in_archive_on_ack: bool = True
    retain_in_archive_on_reject: bool = True
    dead_letter_queue: str | None = None
    wakeup: Literal["auto", "listen", "poll"] = "auto"
    batch: bool = False
    batch_max_records: int | None = None
    batch_max_wait: float | None = None
    transactional: bool = False
    task_per_message: bool = False
    policies: Sequence[Policy] = ()
    ordered: bool = False
    forward_to: str | Destination | None = None
    destinations: Sequence[str] | None = None
    forward_key: str | Header | None = None

    @property
    def notify_only(self) -> bool:
        """True if the subscriber polls only when notified (`max_fetch_interval` is infinite).

        PostgreSQL's triggers can notify it.
        """
        return self.max_fetch_interval == inf

    @property
    def settle_rules(self) -> SettleRules:
        """Rules by which outcomes are settled."""
        return SettleRules(
            retry_strategy=self.retry_strategy,
            retain_on_ack=self.retain_in_archive_on_ack,
            retain_on_reject=self.retain_in_archive_on_reject,
            dead_letter_queue=self.dead_letter_queue,
        )

    @property
    def run_size(self) -> int:
        """Maximum number of messages in a handler call."""
        return (self.batch_max_records or self.fetch_batch_size) if self.batch else 1
