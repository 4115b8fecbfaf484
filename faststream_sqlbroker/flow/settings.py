"""What the loops of one subscriber are told: checked values, each with its default."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from faststream_sqlbroker.core.policies import Header, Policy
from faststream_sqlbroker.core.retry import (
    RetryStrategyProto,
    default_retry_strategy,
    most_attempts,
)
from faststream_sqlbroker.core.routing import Destination
from faststream_sqlbroker.core.settle import SettleRules

SPARE_DELIVERIES = 3
"""How much higher `max_deliveries` is than a strategy's `max_attempts`."""
DELIVERIES_WITHOUT_LIMIT = 20
"""`max_deliveries` under a strategy that does not limit attempts: a message that kills its process
would else come back for ever."""


def default_max_deliveries(attempts: int | None) -> int:
    """Return `max_deliveries` where it was not given, of the most attempts of the strategy."""
    return DELIVERIES_WITHOUT_LIMIT if attempts is None else attempts + SPARE_DELIVERIES


@dataclass(frozen=True, kw_only=True)
class ConsumerSettings:
    """One subscriber's options as its loops use them: lengths of time are seconds.

    `SubscriberOptions` says what each means. What only the handler's pipeline uses is added by
    `SubscriberSettings`, which also checks.
    """

    queues: tuple[str, ...]
    weights: tuple[int, ...] | None = None
    """Weights of `queues`, if they were given with weights."""
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
    max_deliveries: int | None = default_max_deliveries(most_attempts(default_retry_strategy()))
    """The default is that of the default retry strategy; `make_settings` asks a given one."""
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
    def told_only(self) -> bool:
        """Whether it looks only when it is told to, as PostgreSQL's triggers can
        (`max_fetch_interval` is infinite).
        """
        return self.max_fetch_interval == inf

    @property
    def settle_rules(self) -> SettleRules:
        """How outcomes are settled."""
        return SettleRules(
            retry_strategy=self.retry_strategy,
            retain_on_ack=self.retain_in_archive_on_ack,
            retain_on_reject=self.retain_in_archive_on_reject,
            dead_letter_queue=self.dead_letter_queue,
        )

    @property
    def run_size(self) -> int:
        """Most messages of one call of the handler."""
        return (self.batch_max_records or self.fetch_batch_size) if self.batch else 1
