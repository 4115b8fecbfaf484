"""Checks of a subscriber's options.

Every error names the value, the allowed values and the fix.
"""

import re
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from types import FrameType
from typing import Any, Literal

from faststream import AckPolicy

from faststream_sqlbroker.core.checks import (
    find_name_error,
    find_queue_error,
    is_number,
    is_whole_number,
    validate_integer,
    validate_queue,
)
from faststream_sqlbroker.core.policies import Header, check_ack_first, check_ordered
from faststream_sqlbroker.core.retry import get_max_attempts
from faststream_sqlbroker.core.routing import Destination
from faststream_sqlbroker.core.text import format_value
from faststream_sqlbroker.core.times import Duration, parse_non_negative
from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.flow.settings import ConsumerSettings, get_default_max_deliveries

_MIN_LEASE = 0.1
"""Seconds. A renewal, due after a third of the lease, must reach the database in time."""
MAX_FACTOR = 1000
"""Maximum number of fetched batches that may wait: far more than workers start within a lease."""
MAX_WEIGHT = 1000
"""Maximum weight of a queue; with a greater one, the other queues would starve."""
_PATTERN = re.compile(r"(?:^|[./:])(?:\*|[#>+](?:$|[./:]))|\*(?:$|[./:])")
"""Wildcards of RabbitMQ, NATS, Redis and MQTT."""


def merge_queues(queues: Any, more_queues: tuple[str, ...]) -> Any:
    """Combine the first argument of `subscriber` or `reserve` with further names, unchecked.

    `("a", "b")` and `(["a", "b"])` are the same.
    """
    if not more_queues:
        return queues
    return [*([queues] if isinstance(queues, str) else queues), *more_queues]


def parse_queue_names(queues: object, more_queues: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the names of the queues, in the given order.

    Raises:
        SetupError: There is no name, a name is repeated or not valid.
    """
    queues = merge_queues(queues, more_queues)
    if isinstance(queues, bytes | bytearray) or not isinstance(queues, Iterable):
        raise SetupError(f"queues must be a name or a list of names, got {queues!r}")
    names = (queues,) if isinstance(queues, str) else tuple(queues)
    if not names:
        raise SetupError("queues is empty: give at least one queue name")
    for name in names:
        validate_queue(name)
    for position, name in enumerate(names):
        if name in names[:position]:
            raise SetupError(f"queue {format_value(name)} is given twice: name each queue once")
    return names


def check_dead_letter_queue(value: object, queues: Sequence[str]) -> None:
    """Raise SetupError unless `value` is None or the name of a queue that is not in `queues`."""
    if value is None:
        return
    validate_queue(value, "the dead_letter_queue")
    if value in queues:
        raise SetupError(
            f"dead_letter_queue {format_value(value)} is a queue of this subscriber, so its dead "
            "letters would return forever: use another queue"
        )


def split_weights(queues: Any) -> tuple[Any, tuple[int, ...] | None]:
    """Return the queues without weights, and the weights; None if there are no weights.

    A mapping as the first argument of `subscriber` gives each queue a weight: its share of the
    claims. Names are checked later.

    Raises:
        SetupError: A weight is not a whole number from 1 to 1000.
    """
    if not isinstance(queues, Mapping):
        return queues, None
    for name, weight in queues.items():
        if not is_whole_number(weight) or not 1 <= weight <= MAX_WEIGHT:
            raise SetupError(
                f"the weight of queue {format_value(name)} must be a whole number from 1 to "
                f"{MAX_WEIGHT}, got {format_value(weight)}: a queue of weight 5 gets five times as "
                "many claims as a queue of weight 1"
            )
    return tuple(queues), tuple(queues.values())


def check_factor(name: str, value: object) -> None:
    """Raise SetupError unless `value` is a number from 1 to 1000."""
    if not is_number(value) or not 1 <= value <= MAX_FACTOR:
        raise SetupError(f"{name} must be a number from 1 to 1000, got {value!r}")


def parse_header_names(value: object) -> bool | tuple[str, ...]:
    """Return `value` as a bool or a tuple of header names.

    Raises:
        SetupError: The value is neither.
    """
    if isinstance(value, bool):
        return value
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise SetupError(f"forward_headers must be True, False or a list of names, got {value!r}")
    names = tuple(value)
    if not all(isinstance(name, str) for name in names):
        raise SetupError(f"forward_headers must hold names of headers, got {value!r}")
    return names


def check_ack_policy(value: object) -> None:
    """Raise SetupError unless `value` is an AckPolicy."""
    if not isinstance(value, AckPolicy):
        allowed = ", ".join(policy.name for policy in AckPolicy)
        raise SetupError(f"ack_policy must be a faststream.AckPolicy ({allowed}), got {value!r}")


def check_retry_strategy(value: object) -> None:
    """Raise SetupError unless `value` is None or can decide on the next attempt."""
    if isinstance(value, type):
        raise SetupError(
            f"retry_strategy must be an instance, got the class {value.__name__}: call it"
        )
    if value is not None and not callable(getattr(value, "get_next_attempt_at", None)):
        raise SetupError(
            "retry_strategy must have a method get_next_attempt_at, or be None for no retries, "
            f"got {value!r}"
        )


def parse_optional_duration(name: str, value: Duration | None) -> float | None:
    """Convert a duration to seconds, 0 or more; None stays None."""
    return None if value is None else parse_non_negative(name, value)


def check_durations(settings: ConsumerSettings) -> None:
    """Raise SetupError for durations that cannot work together.

    Policies and wakeup='poll' need polling, which max_fetch_interval=None (notify_only) disables.
    """
    if settings.notify_only and (settings.policies or settings.wakeup == "poll"):
        other = "wakeup='poll'" if settings.wakeup == "poll" else "policies"
        raise SetupError(
            f"max_fetch_interval=None turns off polling, but {other} cannot work without it. Set a "
            "max_fetch_interval, such as 10"
        )
    if settings.min_fetch_interval > settings.max_fetch_interval:
        raise SetupError(
            f"min_fetch_interval ({settings.min_fetch_interval} s) must not be longer than "
            f"max_fetch_interval ({settings.max_fetch_interval} s): lower the first or raise the "
            "second"
        )
    if settings.release_stuck_timeout < _MIN_LEASE:
        raise SetupError(
            f"release_stuck_timeout must be {_MIN_LEASE} seconds or more, got "
            f"{settings.release_stuck_timeout}: a shorter lease expires before it can be renewed"
        )
    if settings.release_stuck_timeout <= settings.flush_interval:
        raise SetupError(
            f"release_stuck_timeout ({settings.release_stuck_timeout} s) must be longer than "
            f"flush_interval ({settings.flush_interval} s): outcomes must be written before the "
            "lease expires"
        )


def check_ack_timing(settings: ConsumerSettings, policy: AckPolicy) -> None:
    """Raise SetupError if `policy` acks too early for the other options.

    ACK_FIRST acks a message before its handler starts, ACK also after the handler fails. Called
    again at the start, because the broker may have another default policy.
    """
    if settings.transactional and policy in {AckPolicy.ACK, AckPolicy.ACK_FIRST}:
        raise SetupError(
            "transactional=True commits the handler's changes together with its ack, but "
            f"AckPolicy.{policy.name} acks even if the handler fails: use NACK_ON_ERROR, "
            "REJECT_ON_ERROR or MANUAL"
        )
    if settings.dead_letter_queue is not None and policy is AckPolicy.ACK_FIRST:
        raise SetupError(
            "dead_letter_queue takes failed messages, but AckPolicy.ACK_FIRST acks a message "
            "before its handler starts, so no message can fail: use another policy, or omit it"
        )
    if settings.ordered and policy is AckPolicy.ACK_FIRST:
        raise SetupError(
            "ordered=True holds the next message of a key until the previous message ends, but "
            "AckPolicy.ACK_FIRST removes a message before its handler starts: use another policy"
        )
    if policy is AckPolicy.ACK_FIRST:
        check_ack_first(settings.policies)
    if settings.ordered:
        check_ordered(settings.policies)


def check_forwarding(
    settings: ConsumerSettings, policy: AckPolicy, headers: bool | Sequence[str]
) -> None:
    """Raise SetupError for a `forward_to` that is invalid or next to a handler's options.

    A subscriber with `forward_to` moves messages to another queue without a handler. Options of
    handlers include the ack `policy`, and `headers`, the option forward_headers.
    """
    target = settings.forward_to
    if target is None:
        return
    if not isinstance(target, Destination):
        if (problem := find_queue_error(target)) is not None:
            raise SetupError(f"forward_to cannot be {format_value(target)}: {problem}")
        if target in settings.queues:
            raise SetupError(
                f"forward_to={format_value(target)} is a queue of the subscriber itself, so "
                "messages would circulate forever: use another queue"
            )
    elif not settings.retain_in_archive_on_reject:
        raise SetupError(
            "forward_to=DESTINATION archives messages without a destination as FAILED, but "
            "retain_in_archive_on_reject=False would delete them: omit retain_in_archive_on_reject"
        )
    handler_options = {
        "transactional": settings.transactional,
        "task_per_message": settings.task_per_message,
        "forward_headers": headers is not False,
        "handler_timeout": settings.handler_timeout is not None,
        "ack_policy": policy is not AckPolicy.NACK_ON_ERROR,
    }
    check_no_handler_options([name for name, is_set in handler_options.items() if is_set])


def parse_destinations(value: object, settings: ConsumerSettings) -> tuple[str, ...] | None:
    """Return the names of the allowed destinations; None allows all.

    A destination is the queue that a message names in a header, and to which forward_to=DESTINATION
    moves it.

    Raises:
        SetupError: The value is not a list of names, or is passed without DESTINATION.
    """
    if value is None:
        return None
    if not isinstance(settings.forward_to, Destination):
        raise SetupError(
            f"destinations needs forward_to=DESTINATION, got destinations={format_value(value)} "
            f"and forward_to={format_value(settings.forward_to)}: omit destinations"
        )
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise SetupError(
            f'destinations must be a list of names such as ["invoices"], got {format_value(value)}'
        )
    names = tuple(value)
    if not names:
        raise SetupError(
            "destinations is empty, so no message could be moved: name a queue, or omit it"
        )
    for name in names:
        if (problem := find_queue_error(name)) is not None:
            raise SetupError(f"destinations cannot contain {format_value(name)}: {problem}")
        if name in settings.queues:
            raise SetupError(
                f"destinations contains {format_value(name)}, a queue of the subscriber itself, so "
                "messages would circulate forever: remove it"
            )
    return tuple(dict.fromkeys(names))


def check_forward_key(value: object, settings: ConsumerSettings) -> None:
    """Raise SetupError for an invalid key, or for a key without forward_to."""
    if value is None:
        return
    if settings.forward_to is None:
        raise SetupError(
            f"forward_key needs forward_to, got forward_key={format_value(value)} alone: add "
            "forward_to, or omit forward_key"
        )
    if isinstance(value, Header):
        return
    if (problem := find_name_error(value)) is not None:
        raise SetupError(
            f"forward_key cannot be {format_value(value)}: {problem}; use text or "
            'faststream_sqlbroker.Header("name")'
        )


def check_no_handler_options(options: Sequence[str]) -> None:
    """Raise SetupError if there are `options` of handlers next to forward_to."""
    if options:
        raise SetupError(
            f"{options[0]} is for handlers, but forward_to moves messages without a handler, in "
            "the transaction that settles them: omit it"
        )


def check_batch_options(settings: ConsumerSettings) -> None:
    """Raise SetupError for batch options without batch=True, or with invalid values."""
    _check_batch_wait(settings)
    max_records = settings.batch_max_records
    if max_records is None:
        return
    validate_integer("batch_max_records", max_records, other=" or None for fetch_batch_size")
    if not settings.batch:
        raise SetupError(f"batch_max_records={max_records} is for batch handlers: add batch=True")
    if max_records > settings.fetch_batch_size:
        raise SetupError(
            f"batch_max_records={max_records} exceeds the size of a claim "
            f"(fetch_batch_size={settings.fetch_batch_size}): lower it, or raise fetch_batch_size"
        )


def _check_batch_wait(settings: ConsumerSettings) -> None:
    """Raise SetupError for a `batch_max_wait` without batch=True, or not below the lease."""
    wait = settings.batch_max_wait
    if wait is None:
        return
    if not settings.batch:
        raise SetupError(f"batch_max_wait={wait} is for batch handlers: add batch=True")
    for name in ("release_stuck_timeout", "max_lease"):
        lease = getattr(settings, name)
        if lease is not None and wait >= lease:
            raise SetupError(
                f"batch_max_wait ({wait} s) must be shorter than {name} ({lease} s), because the "
                "leases of a batch's messages run while it fills: lower the first or raise the "
                "second"
            )


def warn_about_surprises(settings: ConsumerSettings) -> None:
    """Warn about values that are valid, but probably a mistake."""
    _warn_about_patterns(settings.queues)
    lease = settings.max_lease
    timeout = settings.handler_timeout
    if lease is not None and lease < settings.release_stuck_timeout:
        _warn(
            f"max_lease={lease} has no effect below "
            f"release_stuck_timeout={settings.release_stuck_timeout}, the length of the first "
            "lease: lower release_stuck_timeout too"
        )
    if (
        lease is not None
        and timeout is not None
        and timeout > max(lease, settings.release_stuck_timeout)
    ):
        _warn(
            f"handler_timeout={timeout} is longer than max_lease={lease}: the message may be "
            "delivered again while the handler still runs. Lower handler_timeout or raise max_lease"
        )


def _warn_about_patterns(queues: Sequence[str]) -> None:
    """Warn about queue names with the wildcards of other brokers, such as `logs.*`."""
    for queue in filter(_PATTERN.search, queues):
        _warn(
            f"queue {format_value(queue)} is a name, not a pattern: this subscriber gets only "
            "messages published to exactly this queue. Name each queue, as in "
            'subscriber("logs.info", "logs.error")'
        )


def warn_unused_strategy(settings: ConsumerSettings) -> None:
    """Warn about a retry strategy that is never used, because ACK_FIRST retries no message."""
    if get_max_attempts(settings.retry_strategy) != 1:
        _warn(
            "retry_strategy has no effect with AckPolicy.ACK_FIRST, which removes the message "
            "before the handler starts: omit it, or use another policy"
        )


def _warn(text: str) -> None:
    """Issue a warning that points at the user's line, which called into this package."""
    # The number of frames of this package above that line depends on the entry point, so they are
    # counted here.
    level = 2
    frame = sys._getframe(1)  # noqa: SLF001 - the frames are needed before warnings.warn
    while frame.f_back is not None and _is_own_frame(frame):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, UserWarning, stacklevel=level)


def _is_own_frame(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] == __name__.partition(".")[0]


def parse_max_deliveries(value: int | Literal["auto"] | None, attempts: int | None) -> float:
    """Return how many deliveries of a message may end without an outcome.

    Such a delivery lost its lease, for example because the process was killed. "auto" allows a few
    more than `attempts`, the maximum of the retry strategy; infinity is no limit.

    Raises:
        SetupError: The value is not valid.
    """
    if value == "auto":
        return get_default_max_deliveries(attempts)
    if value is None:
        return float("inf")
    validate_integer("max_deliveries", value, other=', "auto", or None for no limit')
    return value
