"""The options of a subscriber, declared once.

Names and meaning are declared here, checks in `subscriber.option_checks`, defaults and types in
`flow.settings`. Durations are seconds, a timedelta or text like "500ms" or "1.5h";
`SubscriberSettings` holds seconds.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from math import inf
from typing import Any, Literal, TypedDict, get_args, get_type_hints

from faststream import AckPolicy

from faststream_sqlbroker.adapter.values import EMPTY
from faststream_sqlbroker.core.checks import (
    build_hints,
    check_bool,
    check_choice,
    reject_unknown_options,
    validate_integer,
)
from faststream_sqlbroker.core.policies import Header, Policy, validate_policies
from faststream_sqlbroker.core.retry import RetryStrategyProto, get_max_attempts
from faststream_sqlbroker.core.routing import Destination
from faststream_sqlbroker.core.times import Duration, parse_non_negative, parse_positive
from faststream_sqlbroker.flow.settings import ConsumerSettings, get_default_max_deliveries
from faststream_sqlbroker.subscriber import option_checks


class SubscriberOptions(TypedDict, total=False):
    """Keyword arguments of `broker.subscriber(queues, ...)`; all are optional."""

    max_workers: int
    """Maximum number of handlers that run at the same time; default 1."""
    fetch_batch_size: int
    """Maximum number of messages per claim; default 100."""
    max_not_processed_factor: float
    """Maximum number of claimed messages that wait for a worker, as a multiple of fetch_batch_size;
    1 or more, default 1.5. For a slow handler fewer messages wait.
    """
    max_prefetch_bytes: int | None
    """Maximum total size of the bodies that wait for a worker or form a batch; a larger message is
    delivered alone. Claimed messages beyond this size are released without counting a delivery.
    None is no limit; default 64 MiB.
    """
    min_fetch_interval: Duration | None
    """Minimum time between a full fetch and the next; 0 (the default) fetches as soon as there is
    capacity.
    """
    max_fetch_interval: Duration | None
    """Maximum time between two polls of an idle queue without a wake-up; default 1 s. None polls
    only when notified: PostgreSQL with `notify_trigger`.
    """
    flush_interval: Duration
    """Maximum delay of writing outcomes (no delay while workers are idle); default 50 ms."""
    flush_batch_size: int
    """Maximum number of outcomes per write; default 500."""
    release_stuck_interval: Duration
    """Maximum time between searches for expired leases (usually shorter); default 60 s."""
    release_stuck_timeout: Duration
    """Length of a lease, 100 ms or more; leases of held messages are renewed after a third of this
    time; default 600 s. Messages that wait for a worker are leased for at most 20 s.
    """
    max_deliveries: int | None
    """Number of deliveries without an outcome, such as lost leases, after which a message is FAILED
    without another run; None is no limit; default: the retry strategy's max_attempts + 3, or 20
    if the strategy has no maximum.
    """
    handler_timeout: Duration | None
    """Time after which an async handler is cancelled and its message nacked; never by default."""
    max_lease: Duration | None
    """Time after the claim from which a lease is no longer renewed; default None, never."""
    ack_policy: AckPolicy
    """Decides the outcome of a message when its handler ends; default NACK_ON_ERROR."""
    retry_strategy: RetryStrategyProto | None
    """Decides when a nacked message is tried again; None never retries; default 1 s, doubled up to
    5 min, 10 attempts.
    """
    retry_invalid_body: bool
    """Retry messages whose body cannot be decoded or does not fit the handler; default False: such
    a message is FAILED immediately, with reason invalid_body.
    """
    retain_in_archive_on_ack: bool
    """Archive COMPLETED messages; default True."""
    retain_in_archive_on_reject: bool
    """Archive FAILED messages, as dead letters; default True."""
    dead_letter_queue: str | None
    """Queue that receives FAILED messages, to be consumed, instead of the archive; default None."""
    wakeup: Literal["auto", "listen", "poll"]
    """How the subscriber notices new messages: "listen" requires PostgreSQL, "poll" only polls,
    "auto" (the default) selects the best available.
    """
    batch: bool
    """Pass the handler a list of up to batch_max_records messages; default False."""
    batch_max_records: int | None
    """Maximum number of messages per call of a batch handler, up to fetch_batch_size; default None:
    fetch_batch_size.
    """
    batch_max_wait: Duration | None
    """Maximum time to fill a batch, starting with its first message; shorter than a lease; default
    None: a batch starts with the result of a single claim.
    """
    forward_headers: bool | Sequence[str]
    """Headers of the message that are copied to its answers: a list of names, or True for all;
    default False.
    """
    transactional: bool
    """Run the handler in the transaction that acks its message; default False."""
    task_per_message: bool
    """Run each call of the handler in its own asyncio task, for libraries that depend on
    `asyncio.current_task()`; default False: the task of the worker, in a separate context.
    """
    policies: Sequence[Policy]
    """Delay, Debounce, KeepLast, Throttle, Window, Once, Concurrency, BlockingWait, in the order of
    their application.
    """
    ordered: bool
    """Handle messages of the same key one at a time, in the order of their ids; default False."""
    forward_to: str | Destination | None
    """Queue to which every message is moved, instead of a handler; `DESTINATION` uses the queue
    named in the message's header of that name; default None.
    """
    destinations: Sequence[str] | None
    """With `forward_to=DESTINATION`: the full names of the only queues to which messages are moved;
    a message with another destination is FAILED, with reason destination_not_allowed; default
    None, any queue.
    """
    forward_key: str | Header | None
    """With `forward_to`: the key of each message in the next queue: a fixed text, or
    `Header("tenant")` for the value of that header (no key if the header is missing); default
    None keeps the key.
    """


@dataclass(frozen=True, kw_only=True)
class SubscriberSettings(ConsumerSettings):
    """All validated options of a subscriber; `SubscriberOptions` explains each.

    Raises:
        SetupError: A value is not valid; the message names the value and the fix.

    Warns:
        UserWarning: Values that are valid together, but probably a mistake.
    """

    ack_policy: AckPolicy = AckPolicy.NACK_ON_ERROR
    retry_invalid_body: bool = False
    forward_headers: bool | Sequence[str] = False

    def __post_init__(self) -> None:
        """Convert and validate the values."""
        self._set("queues", option_checks.parse_queue_names(self.queues))
        option_checks.check_dead_letter_queue(self.dead_letter_queue, self.queues)
        for name in ("max_workers", "fetch_batch_size", "flush_batch_size"):
            validate_integer(name, getattr(self, name))
        if self.max_prefetch_bytes is not None:
            validate_integer(
                "max_prefetch_bytes", self.max_prefetch_bytes, other=" or None for no limit"
            )
        option_checks.check_factor("max_not_processed_factor", self.max_not_processed_factor)
        for name in _FLAGS:
            check_bool(name, getattr(self, name))
        self._set("forward_headers", option_checks.parse_header_names(self.forward_headers))
        check_choice("wakeup", self.wakeup, get_args(_HINTS["wakeup"]))
        self._set("policies", validate_policies(self.policies))
        option_checks.check_ack_policy(self.ack_policy)
        option_checks.check_retry_strategy(self.retry_strategy)
        self._convert_durations()
        if self.max_deliveries is not None:
            validate_integer("max_deliveries", self.max_deliveries, other=" or None for no limit")
        option_checks.check_batch_options(self)
        option_checks.check_durations(self)
        option_checks.check_ack_timing(self, self.ack_policy)
        option_checks.check_forward_key(self.forward_key, self)
        self._set("destinations", option_checks.parse_destinations(self.destinations, self))
        option_checks.check_forwarding(self, self.ack_policy, self.forward_headers)
        option_checks.warn_about_surprises(self)

    def _convert_durations(self) -> None:
        """Convert all durations to seconds; `max_fetch_interval=None` becomes infinity."""
        if self.max_fetch_interval is None:
            self._set("max_fetch_interval", inf)
        for name in sorted(_DURATIONS - {"min_fetch_interval"}):
            if name == "max_fetch_interval" and self.notify_only:
                continue
            value = getattr(self, name)
            if value is not None or not _is_optional(name):
                self._set(name, parse_positive(name, value))
        name = "min_fetch_interval"
        value = getattr(self, name)
        # None selects the default, which is not None.
        self._set(name, 0.0 if value is None else parse_non_negative(name, value))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def make_settings(
    queues: str | Sequence[str] | Mapping[str, int], options: SubscriberOptions
) -> SubscriberSettings:
    """Check `options` and fill in defaults.

    An option with FastStream's EMPTY as its value counts as omitted.

    Args:
        queues: A name or several names, or a mapping of names to weights.
        options: The options that the user passed, and no others.

    Raises:
        UnknownOptionError: An unknown option; also a TypeError.
        SetupError: A value is not valid.
    """
    reject_unknown_options("a subscriber", options, _HINTS, _FOREIGN_OPTIONS)
    values: dict[str, Any] = {name: value for name, value in options.items() if value is not EMPTY}
    if "retry_strategy" in values:
        # The limit on deliveries must allow all attempts of the strategy.
        attempts = get_max_attempts(values["retry_strategy"])
        values.setdefault("max_deliveries", get_default_max_deliveries(attempts))
    names, weights = option_checks.split_weights(queues)
    settings = SubscriberSettings(queues=names, weights=weights, **values)
    if values.get("retry_strategy") is not None and settings.ack_policy is AckPolicy.ACK_FIRST:
        option_checks.warn_unused_strategy(settings)
    return settings


def replace_settings(settings: SubscriberSettings, **changes: Any) -> SubscriberSettings:
    """Return `settings` with `changes`, without repeating the warnings of the decorator.

    A router's prefix, for example, is only known at the start; `changes` are validated again.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return replace(settings, **changes)


def _is_optional(name: str) -> bool:
    return type(None) in get_args(_HINTS[name])


_HINTS: dict[str, Any] = get_type_hints(SubscriberOptions)
_FLAGS = [name for name, hint in _HINTS.items() if hint is bool]
_DURATIONS = {name for name, hint in _HINTS.items() if timedelta in get_args(hint)}
_FOREIGN_OPTIONS = build_hints(
    ("max_not_persisted_factor", "omit it, claims stop automatically while outcomes wait"),
    (
        "batch_max_accumulation_timeout_factor batch_timeout_ms",
        "use batch_max_wait, a duration",
    ),
    ("max_records", "use batch_max_records"),
    ("overfetch_factor prefetch prefetch_count", "use max_not_processed_factor"),
    ("concurrency", "use max_workers"),
    (
        "no_ack auto_ack auto_commit",
        "use ack_policy: AckPolicy.MANUAL lets the handler ack, ACK_FIRST acks before it runs",
    ),
    ("retry requeue", "use retry_strategy, which decides when a message is retried"),
    (
        "group_id group consumer durable exchange",
        "omit it, the subscribers of a queue share its messages; use one queue for each group",
    ),
    ("queue topic subject channel stream list routing_key", "use queues, the first argument"),
    ("middlewares", "pass them to SqlBroker or SqlBrokerRouter"),
)
"""Options of other brokers, with the replacement."""
