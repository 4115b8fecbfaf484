"""The options of a subscriber, declared once: names and meaning here, checks below, defaults
with their types in `flow.settings`.

Lengths of time are seconds, a timedelta or text like "500ms" or "1.5h"; `SubscriberSettings` holds
seconds.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from math import inf
from typing import Any, Literal, TypedDict, get_args, get_type_hints

from faststream import AckPolicy

from faststream_sqlbroker.adapter.values import EMPTY
from faststream_sqlbroker.core.checks import advice, flag, one_of, refuse_unknown, whole_number
from faststream_sqlbroker.core.policies import Header, Policy, checked_policies
from faststream_sqlbroker.core.retry import RetryStrategyProto, most_attempts
from faststream_sqlbroker.core.routing import Destination
from faststream_sqlbroker.core.times import Duration, positive_seconds, seconds_or_zero
from faststream_sqlbroker.flow.settings import ConsumerSettings, default_max_deliveries
from faststream_sqlbroker.subscriber import checks


class SubscriberOptions(TypedDict, total=False):
    """Keyword arguments of `broker.subscriber(queues, ...)`; all may be left out."""

    max_workers: int
    """Handlers that run at the same time; default 1."""
    fetch_batch_size: int
    """Most messages per claim; default 100."""
    max_not_processed_factor: float
    """Most claimed messages that may wait for a worker, as a multiple of fetch_batch_size; 1 or
    more, default 1.5. Of a slow handler fewer wait."""
    max_prefetch_bytes: int | None
    """Most bytes of bodies that wait for a worker, or make a batch; a larger message goes alone.
    What a claim finds beyond it is given back, uncharged. None is no limit; default 64 MiB."""
    min_fetch_interval: Duration | None
    """Least time between a full fetch and the next; 0 (the default) fetches as soon as there is
    room."""
    max_fetch_interval: Duration | None
    """Longest wait between two looks at an idle queue, if no wake-up comes; default 1 s. None, only
    when told: PostgreSQL with `notify_trigger`."""
    flush_interval: Duration
    """Longest wait before outcomes are written (at once when workers are idle); default 50 ms."""
    flush_batch_size: int
    """Most outcomes per write; default 500."""
    release_stuck_interval: Duration
    """Most time between two searches for expired leases, which mostly come sooner; default 60 s."""
    release_stuck_timeout: Duration
    """Length of a lease, 100 ms or more; held messages are renewed after a third of it; default 600
    s. What waits for a worker is leased for at most 20 s."""
    max_deliveries: int | None
    """Deliveries without an outcome, such as lost leases, after which a message is FAILED
    unhandled; None is no limit; default: the retry strategy's max_attempts + 3, or 20 if it has
    none."""
    handler_timeout: Duration | None
    """Time after which an async handler is cancelled and the message nacked; default None, never.
    """
    max_lease: Duration | None
    """Time after the claim at which a lease is no longer renewed; default None, never."""
    ack_policy: AckPolicy
    """What a handler's end means for the message; default NACK_ON_ERROR."""
    retry_strategy: RetryStrategyProto | None
    """When a nacked message is tried again; None is never; default 1 s, doubled up to 5 min, 10
    attempts."""
    retry_invalid_body: bool
    """Whether a message is tried again whose body cannot be decoded or does not fit the handler;
    default False: FAILED at once, with reason invalid_body."""
    retain_in_archive_on_ack: bool
    """Whether COMPLETED messages are archived; default True."""
    retain_in_archive_on_reject: bool
    """Whether FAILED messages are archived, as dead letters; default True."""
    dead_letter_queue: str | None
    """Queue to which FAILED messages go in place of the archive, to be consumed there; default
    None."""
    wakeup: Literal["auto", "listen", "poll"]
    """How new messages are noticed: "listen" needs PostgreSQL, "poll" only looks, "auto" (default)
    picks."""
    batch: bool
    """Whether the handler gets a list of up to batch_max_records messages; default False."""
    batch_max_records: int | None
    """Most messages per call of a batch handler, up to fetch_batch_size; default None: that."""
    batch_max_wait: Duration | None
    """Longest time that a batch waits to be filled, from its first message on; shorter than a
    lease; default None: it starts with what one claim has found."""
    forward_headers: bool | Sequence[str]
    """Headers that answers take over from their message: names, True for all; default False, none.
    """
    transactional: bool
    """Whether the handler works in the transaction that acks its message; default False."""
    task_per_message: bool
    """Whether each call of the handler has an asyncio task of its own, for what goes by
    `asyncio.current_task()`; default False: its worker's task, in a context of its own."""
    policies: Sequence[Policy]
    """Delay, Debounce, KeepLast, Throttle, Window, Once, Concurrency, BlockingWait, in the order in
    which they apply."""
    ordered: bool
    """Whether messages of one key are handled one at a time, in the order of their ids; default
    False."""
    forward_to: str | Destination | None
    """Queue to which every message is moved, in place of a handler; `DESTINATION`: the one that its
    header of that name says; default None."""
    destinations: Sequence[str] | None
    """With `forward_to=DESTINATION` the only queues to which messages are moved, by their full
    names; one that names another is FAILED, with reason destination_not_allowed; default None, any.
    """
    forward_key: str | Header | None
    """With `forward_to` the key of each message in the next queue: a text for all, or
    `Header("tenant")`, the value of that header, without which it has none; default None, the key
    that it has."""


@dataclass(frozen=True, kw_only=True)
class SubscriberSettings(ConsumerSettings):
    """All options of a subscriber, checked; `SubscriberOptions` says what each means.

    Raises:
        SetupError: A value that cannot work; the message says which and what to do.

    Warns:
        UserWarning: Values that are legal together, but hardly meant.
    """

    ack_policy: AckPolicy = AckPolicy.NACK_ON_ERROR
    retry_invalid_body: bool = False
    forward_headers: bool | Sequence[str] = False

    def __post_init__(self) -> None:
        """Work out, then check."""
        self._set("queues", checks.queue_names(self.queues))
        checks.dead_letter_queue(self.dead_letter_queue, self.queues)
        for name in ("max_workers", "fetch_batch_size", "flush_batch_size"):
            whole_number(name, getattr(self, name))
        if self.max_prefetch_bytes is not None:
            whole_number(
                "max_prefetch_bytes", self.max_prefetch_bytes, other=" or None for no limit"
            )
        checks.factor("max_not_processed_factor", self.max_not_processed_factor)
        for name in _FLAGS:
            flag(name, getattr(self, name))
        self._set("forward_headers", checks.header_names(self.forward_headers))
        one_of("wakeup", self.wakeup, get_args(_HINTS["wakeup"]))
        self._set("policies", checked_policies(self.policies))
        checks.ack_policy(self.ack_policy)
        checks.retry_strategy(self.retry_strategy)
        self._take_times()
        if self.max_deliveries is not None:
            whole_number("max_deliveries", self.max_deliveries, other=" or None for no limit")
        checks.batch_fits(self)
        checks.times_fit(self)
        checks.policy_fits(self, self.ack_policy)
        checks.forward_key(self.forward_key, self)
        self._set("destinations", checks.destinations(self.destinations, self))
        checks.forward_fits(self, self.ack_policy, self.forward_headers)
        checks.warn_of_surprises(self)

    def _take_times(self) -> None:
        if self.max_fetch_interval is None:
            self._set("max_fetch_interval", inf)
        for name in sorted(_TIMES - {"min_fetch_interval"}):
            if name == "max_fetch_interval" and self.told_only:
                continue
            value = getattr(self, name)
            if value is not None or not _may_be_none(name):
                self._set(name, positive_seconds(name, value))
        name = "min_fetch_interval"
        value = getattr(self, name)
        # None stands for the default, which is not None.
        self._set(name, 0.0 if value is None else seconds_or_zero(name, value))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def make_settings(
    queues: str | Sequence[str] | Mapping[str, int], options: SubscriberOptions
) -> SubscriberSettings:
    """Check `options` and fill in defaults; an option that is FastStream's EMPTY counts as left
    out.

    Args:
        queues: One name or several, or a mapping of names to their weights.
        options: What the user gave, and nothing else.

    Raises:
        UnknownOptionError: An option of another name; also a TypeError.
        SetupError: A value that cannot work.
    """
    refuse_unknown("a subscriber", options, _HINTS, _ELSEWHERE)
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not EMPTY}
    if "retry_strategy" in given:
        attempts = most_attempts(given["retry_strategy"])
        given.setdefault("max_deliveries", default_max_deliveries(attempts))
    names, weights = checks.weighted(queues)
    settings = SubscriberSettings(queues=checks.queue_names(names), weights=weights, **given)
    if given.get("retry_strategy") is not None and settings.ack_policy is AckPolicy.ACK_FIRST:
        checks.warn_unused_strategy(settings)
    return settings


def changed(settings: SubscriberSettings, **changes: Any) -> SubscriberSettings:
    """`settings` with `changes`, without the warnings, which were given at the decorator."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return replace(settings, **changes)


def _may_be_none(name: str) -> bool:
    return type(None) in get_args(_HINTS[name])


_HINTS: dict[str, Any] = get_type_hints(SubscriberOptions)
_FLAGS = [name for name, hint in _HINTS.items() if hint is bool]
_TIMES = {name for name, hint in _HINTS.items() if timedelta in get_args(hint)}
_ELSEWHERE = advice(
    ("max_not_persisted_factor", "leave it out, claims stop by themselves while outcomes wait"),
    (
        "batch_max_accumulation_timeout_factor batch_timeout_ms",
        "use batch_max_wait, a length of time",
    ),
    ("max_records", "use batch_max_records"),
    ("overfetch_factor prefetch prefetch_count", "use max_not_processed_factor"),
    ("concurrency", "use max_workers"),
    (
        "no_ack auto_ack auto_commit",
        "use ack_policy: AckPolicy.MANUAL lets the handler ack, ACK_FIRST acks before it runs",
    ),
    ("retry requeue", "use retry_strategy, which says when a message is tried again"),
    (
        "group_id group consumer durable exchange",
        "leave it out, the subscribers of a queue share its messages; use a queue for each group",
    ),
    ("queue topic subject channel stream list routing_key", "use queues, the first argument"),
    ("middlewares", "give them to SqlBroker or to a SqlBrokerRouter"),
)
"""Options of other brokers, and what to do here."""
