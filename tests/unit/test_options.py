"""A subscriber's options: one declaration, defaults, checks and warnings."""

import re
import types
import warnings
from dataclasses import MISSING, fields
from datetime import timedelta
from typing import Any, get_args, get_type_hints

import pytest
from faststream import AckPolicy

from faststream_sqlbroker.adapter.values import EMPTY
from faststream_sqlbroker.broker.broker import SqlBroker
from faststream_sqlbroker.core.checks import UnknownOptionError, find_name_error
from faststream_sqlbroker.core.retry import (
    ConstantRetryStrategy,
    ExponentialBackoffWithJitterRetryStrategy,
    NoRetryStrategy,
)
from faststream_sqlbroker.core.times import Duration
from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.subscriber.options import (
    SubscriberOptions,
    SubscriberSettings,
    make_settings,
)


def make(queues: Any = "orders", **options: Any) -> SubscriberSettings:
    return make_settings(queues, options)  # type: ignore[arg-type]


def in_seconds(hint: Any) -> Any:
    """The type of an option once its lengths of time are seconds."""
    members = get_args(hint)
    if timedelta not in members:
        return hint
    return float | None if types.NoneType in members else float


def test_options_and_settings_agree() -> None:
    options = {name: in_seconds(hint) for name, hint in get_type_hints(SubscriberOptions).items()}
    settings = get_type_hints(SubscriberSettings)
    assert settings.pop("queues") == tuple[str, ...]
    assert settings.pop("weights") == tuple[int, ...] | None  # given with the queues
    assert options.pop("min_fetch_interval") == float | None  # None only stands for the default
    assert settings.pop("min_fetch_interval") is float
    assert options.pop("max_fetch_interval") == float | None  # None is infinite
    assert settings.pop("max_fetch_interval") is float
    assert options == settings


def test_a_subscriber_without_a_longest_interval_looks_only_when_it_is_told() -> None:
    assert make(max_fetch_interval=None).notify_only
    assert not make(max_fetch_interval=86_400).notify_only
    assert not make().notify_only


def test_every_option_has_a_default() -> None:
    required = [
        f.name for f in fields(SubscriberSettings) if f.default is f.default_factory is MISSING
    ]
    assert required == ["queues"]


def test_the_defaults_are_the_documented_ones() -> None:
    settings = make()
    strategy = settings.retry_strategy
    assert isinstance(strategy, ExponentialBackoffWithJitterRetryStrategy)
    assert strategy.max_attempts == 10
    assert settings == SubscriberSettings(
        queues=("orders",),
        max_workers=1,
        fetch_batch_size=100,
        max_not_processed_factor=1.5,
        max_prefetch_bytes=64 * 1024 * 1024,
        min_fetch_interval=0.0,
        max_fetch_interval=1.0,
        flush_interval=0.05,
        flush_batch_size=500,
        release_stuck_interval=60.0,
        release_stuck_timeout=600.0,
        max_deliveries=13,
        handler_timeout=None,
        max_lease=None,
        ack_policy=AckPolicy.NACK_ON_ERROR,
        retry_strategy=strategy,
        retain_in_archive_on_ack=True,
        retain_in_archive_on_reject=True,
        wakeup="auto",
        batch=False,
    )


def test_times_are_taken_in_any_form() -> None:
    settings = make(
        min_fetch_interval="5ms",
        max_fetch_interval=timedelta(seconds=2),
        flush_interval=1,
        release_stuck_timeout="1h30m",
        max_lease="2h",
        handler_timeout="1m",
    )
    assert (settings.min_fetch_interval, settings.max_fetch_interval, settings.flush_interval) == (
        0.005,
        2,
        1,
    )
    assert (settings.release_stuck_timeout, settings.max_lease, settings.handler_timeout) == (
        5400,
        7200,
        60,
    )
    assert type(settings.flush_interval) is float


def test_settings_made_directly_are_checked_alike() -> None:
    assert SubscriberSettings(queues="orders", flush_interval="1s").flush_interval == 1.0  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("queues", "names"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        (("b", "a"), ("b", "a")),
        (["ä" * 255], ("ä" * 255,)),
    ],
)
def test_queues_are_given_by_name_or_as_a_list(queues: Any, names: tuple[str, ...]) -> None:
    assert make(queues).queues == names


@pytest.mark.parametrize(
    ("queues", "message"),
    [
        ([], "queues is empty: give at least one queue name"),
        ("", "'' cannot be the name of a queue: it must not be empty"),
        (["a", ""], "'' cannot be the name of a queue"),
        (["a", "b", "a"], "queue 'a' is given twice: name each queue once"),
        ("x" * 256, "it has 256 characters, at most 255 are allowed"),
        ("a\x00", "it must not contain a NUL character"),
        ("a\ud800", "it must not contain a lone surrogate"),
        ("a ", "it must not end in a space"),
        ([5], "5 cannot be the name of a queue: it must be a string, not int"),
        ([None], "None cannot be the name of a queue"),
        (5, "queues must be a name or a list of names, got 5"),
        (None, "queues must be a name or a list of names, got None"),
        (b"a", "queues must be a name or a list of names, got b'a'"),
    ],
)
def test_wrong_queues_are_refused(queues: Any, message: str) -> None:
    with pytest.raises(SetupError) as caught:
        make(queues)
    assert message in str(caught.value)


def test_a_good_name_has_no_problem() -> None:
    assert find_name_error("orders.created") is None


WHOLE = ("max_workers", "fetch_batch_size", "flush_batch_size", "max_deliveries")
TIMES = tuple(
    name for name, hint in get_type_hints(SubscriberOptions).items() if timedelta in get_args(hint)
)


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "3"])
def test_wrong_counts_are_refused(name: str, wrong: Any) -> None:
    with pytest.raises(SetupError, match=rf"^{name} must be a whole number of 1 or more.*, got"):
        make(**{name: wrong})


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "1GB"])
def test_wrong_numbers_of_bytes_are_refused(wrong: Any) -> None:
    with pytest.raises(SetupError, match=r"^max_prefetch_bytes must be .* or None for no limit, "):
        make(max_prefetch_bytes=wrong)
    assert make(max_prefetch_bytes=None).max_prefetch_bytes is None


def test_the_options_that_are_durations() -> None:
    assert set(TIMES) == {
        "min_fetch_interval",
        "max_fetch_interval",
        "flush_interval",
        "release_stuck_interval",
        "release_stuck_timeout",
        "handler_timeout",
        "max_lease",
        "batch_max_wait",
    }
    assert set(get_args(Duration)) == {float, timedelta, str}


@pytest.mark.parametrize("name", [name for name in TIMES if name != "min_fetch_interval"])
@pytest.mark.parametrize("wrong", [0, -1, "0s", "-5s", timedelta(0)])
def test_non_positive_times_are_refused(name: str, wrong: Any) -> None:
    with pytest.raises(SetupError, match=rf"^{name} must be longer than 0 seconds, got"):
        make(**{name: wrong})


def test_min_fetch_interval_may_be_zero_but_not_less() -> None:
    assert make(min_fetch_interval=0).min_fetch_interval == 0
    with pytest.raises(SetupError, match=r"^min_fetch_interval must be 0 or more seconds, got -1"):
        make(min_fetch_interval=-1)


@pytest.mark.parametrize("name", TIMES)
@pytest.mark.parametrize("wrong", ["5", "", True, float("nan"), []])
def test_an_invalid_duration_is_refused(name: str, wrong: Any) -> None:
    with pytest.raises(SetupError, match=rf"^{name} "):
        make(**{name: wrong})


@pytest.mark.parametrize(
    "name", ["release_stuck_interval", "flush_interval", "release_stuck_timeout"]
)
def test_none_is_refused_where_a_duration_is_needed(name: str) -> None:
    with pytest.raises(SetupError, match=rf"^{name} cannot be None"):
        make(**{name: None})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_not_processed_factor": 0.9}, "must be a number from 1 to 1000, got 0.9"),
        (
            {"max_not_processed_factor": float("nan")},
            "max_not_processed_factor must be a number from 1",
        ),
        ({"max_not_processed_factor": "2"}, "max_not_processed_factor must be a number from 1"),
        ({"batch": 1}, "batch must be True or False, got 1"),
        (
            {"retain_in_archive_on_ack": None},
            "retain_in_archive_on_ack must be True or False, got None",
        ),
        ({"wakeup": "push"}, "wakeup must be one of 'auto', 'listen', 'poll', got 'push'"),
        ({"ack_policy": "ack"}, "ack_policy must be a faststream.AckPolicy (ACK_FIRST, "),
        (
            {"dead_letter_queue": "orders"},
            "dead_letter_queue 'orders' is a queue of this subscriber",
        ),
        ({"dead_letter_queue": ""}, "'' cannot be the dead_letter_queue: it must not be empty"),
        (
            {"dead_letter_queue": 5},
            "5 cannot be the dead_letter_queue: it must be a string, not int",
        ),
        (
            {"dead_letter_queue": ["a"]},
            "cannot be the dead_letter_queue: it must be a string, not list",
        ),
        (
            {"dead_letter_queue": "dead", "ack_policy": AckPolicy.ACK_FIRST},
            (
                "dead_letter_queue takes failed messages, but AckPolicy.ACK_FIRST acks a message "
                "before its handler starts"
            ),
        ),
        ({"retry_strategy": 5}, "retry_strategy must have a method get_next_attempt_at"),
        (
            {"retry_strategy": NoRetryStrategy},
            "must be an instance, got the class NoRetryStrategy: call it",
        ),
        ({"min_fetch_interval": 2}, "(2.0 s) must not be longer than max_fetch_interval (1.0 s)"),
        (
            {"release_stuck_timeout": 0.09},
            "release_stuck_timeout must be 0.1 seconds or more, got 0.09",
        ),
        (
            {"release_stuck_timeout": 1, "flush_interval": 1},
            "release_stuck_timeout (1.0 s) must be longer than flush_interval (1.0 s)",
        ),
    ],
)
def test_wrong_values_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SetupError) as caught:
        make(**options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "left_out", [{}, {"min_fetch_interval": None}, {"min_fetch_interval": EMPTY}]
)
def test_the_shortest_wait_follows_a_shorter_longest_one(left_out: dict[str, Any]) -> None:
    assert make(max_fetch_interval=0.01, **left_out).min_fetch_interval == 0.0
    assert make(max_fetch_interval=5, **left_out).min_fetch_interval == 0.0


class Unlimited:
    def get_next_attempt_at(self, **_: Any) -> None:
        return None


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({"retry_strategy": None}, 4),
        ({"retry_strategy": NoRetryStrategy()}, 4),
        ({"retry_strategy": ConstantRetryStrategy(delay_seconds=1, max_attempts=5)}, 8),
        ({"retry_strategy": ConstantRetryStrategy(delay_seconds=1)}, 20),
        ({"retry_strategy": Unlimited()}, 20),
        ({"max_deliveries": EMPTY}, 13),
        ({"max_deliveries": None}, None),
        ({"max_deliveries": 50}, 50),
    ],
)
def test_deliveries_are_limited_by_default(options: dict[str, Any], limit: int | None) -> None:
    assert make(**options).max_deliveries == limit


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch_max_records": 5}, "batch_max_records=5 is for batch handlers: add batch=True"),
        ({"batch_max_wait": "1s"}, "batch_max_wait=1.0 is for batch handlers: add batch=True"),
        ({"batch_max_wait": 0, "batch": True}, "batch_max_wait must be"),
        (
            {"batch_max_wait": 2.0, "batch": True, "release_stuck_timeout": 2.0},
            r"batch_max_wait \(2.0 s\) must be shorter than release_stuck_timeout \(2.0 s\)",
        ),
        (
            {"batch_max_wait": "15m", "batch": True, "release_stuck_timeout": "1h", "max_lease": 9},
            r"batch_max_wait \(900.0 s\) must be shorter than max_lease \(9.0 s\)",
        ),
        ({"batch_max_records": 0, "batch": True}, "batch_max_records must be a whole number"),
        (
            {"batch_max_records": 101, "batch": True},
            r"batch_max_records=101 exceeds the size of a claim \(fetch_batch_size=100\)",
        ),
    ],
)
def test_a_limit_of_batches_fits(options: dict[str, Any], said: str) -> None:
    with pytest.raises(SetupError, match=said):
        make(**options)


def test_a_run_of_the_handler_has_one_message_or_a_batch() -> None:
    assert make().run_size == 1
    assert make(batch=True).run_size == 100
    assert make(batch=True, batch_max_records=7).run_size == 7
    assert make(batch=True, batch_max_wait="500ms").batch_max_wait == 0.5
    assert make(batch=True).batch_max_wait is None
    assert make(batch=True, batch_max_records=None, fetch_batch_size=50).run_size == 50


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_worker", "did you mean 'max_workers'?"),
        ("overfetch_factor", "use max_not_processed_factor"),
        ("max_not_persisted_factor", "omit it, claims stop automatically"),
        ("batch_max_accumulation_timeout_factor", "use batch_max_wait, a duration"),
        ("group_id", "omit it, the subscribers of a queue share its messages"),
        ("no_ack", "use ack_policy: AckPolicy.MANUAL lets the handler ack"),
        ("requeue", "use retry_strategy, "),
        ("prefetch_count", "use max_not_processed_factor"),
        ("topic", "use queues, the first argument"),
        ("zzz", "choose from max_workers, fetch_batch_size, "),
    ],
)
def test_unknown_options_are_refused_by_name(name: str, hint: str) -> None:
    with pytest.raises(UnknownOptionError) as caught:
        make(**{name: 1})
    assert str(caught.value).startswith(f"a subscriber has no option {name!r}: ")
    assert hint in str(caught.value)
    assert isinstance(caught.value, SetupError)
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_lease": 60}, "max_lease=60.0 has no effect below release_stuck_timeout=600.0"),
        (
            {"max_lease": 700, "handler_timeout": 800},
            "handler_timeout=800.0 is longer than max_lease=700",
        ),
        (
            {
                "ack_policy": AckPolicy.ACK_FIRST,
                "retry_strategy": ConstantRetryStrategy(delay_seconds=1),
            },
            "retry_strategy has no effect with AckPolicy.ACK_FIRST",
        ),
    ],
)
def test_surprising_values_warn_at_the_users_line(options: dict[str, Any], message: str) -> None:
    with pytest.warns(UserWarning, match=f"^{re.escape(message)}") as caught:
        make(**options)
    assert len(caught) == 1
    assert caught[0].filename == __file__


@pytest.mark.parametrize("queue", ["logs.*", "logs*", "logs.#", "#", "logs.>", "a/+/b"])
def test_a_queue_that_looks_like_a_pattern_warns(queue: str) -> None:
    with pytest.warns(UserWarning, match="^queue .* is a name, not a pattern: ") as caught:
        SqlBroker("sqlite+aiosqlite:///no.db", logger=None).subscriber("plain", queue)
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("queue", ["C#", "a+b", "a->b", "user:42", "?"])
def test_a_name_with_such_characters_does_not_warn(queue: str) -> None:
    SqlBroker("sqlite+aiosqlite:///no.db", logger=None).subscriber(queue)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch": True, "max_workers": 4},
        {"ack_policy": AckPolicy.ACK_FIRST},
        {"ack_policy": AckPolicy.ACK_FIRST, "retry_strategy": None},
        {"ack_policy": AckPolicy.ACK_FIRST, "retry_strategy": NoRetryStrategy()},
        {"ack_policy": AckPolicy.MANUAL, "retry_strategy": NoRetryStrategy(), "max_deliveries": 1},
        {"max_lease": 700, "handler_timeout": 700},
        {"max_fetch_interval": 0.01, "flush_interval": 0.01, "release_stuck_timeout": 0.1},
    ],
)
def test_ordinary_values_do_not_warn(options: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(**options)
