"""`SqlBroker.from_yaml`: the same broker as in Python."""

import json
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from faststream import AckPolicy
from prometheus_client import CollectorRegistry, Gauge

from faststream_sqlbroker import (
    DESTINATION,
    BlockingWait,
    Concurrency,
    ConstantWithJitterRetryStrategy,
    Debounce,
    Delay,
    ExponentialBackoffRetryStrategy,
    Header,
    KeepLast,
    MaxDepth,
    NoRetryStrategy,
    Once,
    Retention,
    SetupError,
    SqlBroker,
    SqlBrokerRouter,
    StoreError,
    TestSqlBroker,
    Throttle,
    Window,
)
from faststream_sqlbroker.prometheus import SqlBrokerPrometheusMetrics
from tests.config import handlers
from tests.config.conftest import SERVICE
from tests.http.conftest import as_user, client_of, logins

pytestmark = pytest.mark.capability("A service from a file of YAML, checked at start")
Write = Callable[[str], Path]


def settings_of(broker: SqlBroker, queue: str) -> Any:
    [found] = [each for each in broker.subscribers if queue in each.queues]  # type: ignore[attr-defined]
    return found.config.settings  # type: ignore[attr-defined]


def test_queues_have_the_options_of_the_file(write: Write) -> None:
    broker = SqlBroker.from_yaml(
        write(
            f"""\
{SERVICE}queues:
  front: {{forward_to: DESTINATION, destinations: [out], forward_key: {{header: tenant}}}}
  mails:
    handler: tests.config.handlers:note
    max_workers: 3
    max_fetch_interval: 1.5
    release_stuck_timeout: 2m
    ack_policy: reject_on_error
    forward_headers: [trace]
    dead_letter_queue: out
    max_deliveries: null
    retry_strategy:
      exponential_backoff: {{initial_delay_seconds: 1s, max_attempts: 4, no_retry_on: [ValueError]}}
destinations: [out]
"""
        )
    )
    front = settings_of(broker, "front")
    assert (front.forward_to, front.destinations) == (DESTINATION, ("out",))
    assert front.forward_key == Header("tenant")
    mails = settings_of(broker, "mails")
    assert mails.max_workers == 3
    assert mails.max_fetch_interval == 1.5
    assert mails.release_stuck_timeout == 120
    assert mails.ack_policy is AckPolicy.REJECT_ON_ERROR
    assert mails.forward_headers == ("trace",)
    assert mails.dead_letter_queue == "out"
    assert mails.max_deliveries is None
    assert mails.retry_strategy == ExponentialBackoffRetryStrategy(
        initial_delay_seconds=1.0, max_attempts=4, no_retry_on=ValueError
    )


@pytest.mark.parametrize(
    ("written", "policy"),
    [
        ("{delay: 5m}", Delay("5m")),
        ("{delay: {delay: 300}}", Delay("5m")),
        ("{debounce: 1s}", Debounce("1s")),
        ("{debounce: {window: 1s, edge: leading}}", Debounce("1s", edge="leading")),
        ("{debounce: {window: 1s, max_wait: 1m}}", Debounce("1s", max_wait=timedelta(minutes=1))),
        ("{keep_last: {window: 1s, key: {header: t}}}", KeepLast("1s", key=Header("t"))),
        (
            "{throttle: {rate: 5, per: 1m, when_exceeded: drop}}",
            Throttle(5, "1m", when_exceeded="drop"),
        ),
        ("{throttle: {rate: 5, per: 60, scope: mails}}", Throttle(5, "1m", scope="mails")),
        (
            "{window: {start: 22:00, end: '06:00', tz: Europe/Berlin, days: [mon]}}",
            Window("22:00", "06:00", tz="Europe/Berlin", days=["mon"]),
        ),
        ("{once: 24h}", Once("24h")),
        ("{once: {ttl: 24h, key: {header: order}}}", Once("24h", key=Header("order"))),
        ("{concurrency: 5}", Concurrency(5)),
        ("{concurrency: {limit: 5, per_key: true}}", Concurrency(5, per_key=True)),
        ("{blocking_wait: 2s}", BlockingWait("2s")),
    ],
)
def test_policies_are_those_of_python(write: Write, written: str, policy: object) -> None:
    text = f"queues: {{a: {{handler: tests.config.handlers:note, policies: [{written}]}}}}\n"
    assert settings_of(SqlBroker.from_yaml(write(text + SERVICE)), "a").policies == (policy,)


@pytest.mark.parametrize(
    ("written", "strategy"),
    [
        ("null", None),
        ("{no_retry: {}}", NoRetryStrategy()),
        (
            "{constant_with_jitter: {base_delay_seconds: 1, jitter_seconds: 500ms}}",
            ConstantWithJitterRetryStrategy(base_delay_seconds=1.0, jitter_seconds=0.5),
        ),
    ],
)
def test_strategies_are_those_of_python(write: Write, written: str, strategy: object) -> None:
    text = f"queues: {{a: {{handler: tests.config.handlers:note, retry_strategy: {written}}}}}\n"
    found = settings_of(SqlBroker.from_yaml(write(text + SERVICE)), "a").retry_strategy
    assert found == strategy


def test_exceptions_are_named_by_their_modules(write: Write) -> None:
    strategy = "{constant: {delay_seconds: 1s, retry_on: faststream_sqlbroker:StoreError}}"
    text = f"queues: {{a: {{handler: tests.config.handlers:note, retry_strategy: {strategy}}}}}\n"
    found = settings_of(SqlBroker.from_yaml(write(text + SERVICE)), "a").retry_strategy
    assert found.retry_on == (StoreError,)


def test_the_broker_has_the_options_of_the_file(write: Write) -> None:
    broker = SqlBroker.from_yaml(
        write(
            f"""\
{SERVICE}  statement_timeout: 5s
  graceful_timeout: null
  max_payload: 1000
  max_depth: {{a: 5, b: {{messages: 7, when_full: drop}}}}
  retention: {{completed: 30d, max_rows: 1000}}
  schema: {{message_table_name: jobs, message_archive_table_name: old_jobs}}
  ack_policy: nack_on_error
destinations: [a, b]
"""
        )
    )
    assert broker._retention == Retention(completed="30d", max_rows=1000)
    assert broker._max_depth == {"a": MaxDepth(5), "b": MaxDepth(7, when_full="drop")}
    assert broker._max_payload == 1000
    assert broker.config.graceful_timeout is None
    assert broker.config.store.tables.message.name == "jobs"
    assert broker.config.ack_policy is AckPolicy.NACK_ON_ERROR


def test_a_variable_may_be_a_number(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_WORKERS", "7")
    text = (
        "queues:\n  a:\n    forward_to: b\n    max_workers: '${SHOP_WORKERS}'\ndestinations: [b]\n"
    )
    broker = SqlBroker.from_yaml(write(text.replace("'", "") + SERVICE))
    assert settings_of(broker, "a").max_workers == 7
    with pytest.raises(SetupError, match="a whole number, got text"):
        SqlBroker.from_yaml(write(text + SERVICE))


async def test_schedules_are_declared(write: Write) -> None:
    broker = SqlBroker.from_yaml(
        write(
            f"""\
{SERVICE}destinations: [reports, mails]
schedules:
  nightly: {{expression: "0 3 * * *", queue: reports, message: {{a: [1]}}, tz: Europe/Berlin,
            missed: skip, headers: {{x: 1}}, priority: 5, expires_in: 1h, destination: mails}}
"""
        )
    )
    [planned] = broker.schedules
    assert (planned.name, planned.missed) == ("nightly", "skip")
    [row] = await planned.make(datetime(2030, 1, 1, 3, tzinfo=timezone.utc))
    assert row.priority == 5
    assert json.loads(row.headers or "")["destination"] == "mails"


async def test_handlers_of_the_file_and_of_the_program_run(write: Write) -> None:
    class Mine(SqlBroker):
        pass

    handlers.seen.clear()
    router = SqlBrokerRouter(prefix="more.")
    text = "queues: {a: {handler: tests.config.handlers:note}}\n"
    broker = Mine.from_yaml(write(text + SERVICE), logger=None, routers=[router])
    assert isinstance(broker, Mine)

    @broker.subscriber("b")
    async def own(body: object) -> None:
        handlers.seen.append(("own", body))

    @router.subscriber("c")
    async def routed(body: object) -> None:
        handlers.seen.append(("routed", body))

    async with TestSqlBroker(broker):
        await broker.publish({"n": 1}, "a")
        await broker.publish(2, "b")
        await broker.publish(3, "more.c")
    assert handlers.seen == [{"n": 1}, ("own", 2), ("routed", 3)]


def test_code_gives_what_a_file_cannot_have_and_nothing_else(write: Write) -> None:
    path = write(SERVICE)
    with pytest.raises(SetupError, match="has no option 'max_payload': set it under broker"):
        SqlBroker.from_yaml(path, max_payload=5)
    with pytest.raises(SetupError, match="has no option 'engine'"):
        SqlBroker.from_yaml(path, engine="x")
    with pytest.raises(SetupError, match="has no option 'loger'"):
        SqlBroker.from_yaml(path, loger=None)


async def test_metrics_of_the_file_are_shown(write: Write) -> None:
    """In a registry of the broker's own, so two brokers of one process do not meet."""
    path = write(f"{SERVICE}  metrics: true\n")
    for broker in (SqlBroker.from_yaml(path, logger=None), SqlBroker.from_yaml(path, logger=None)):
        async with client_of(broker.asgi(logins())) as client:
            shown = await client.get("/metrics", auth=as_user("ann"))
            assert shown.status_code == 200
            assert "# TYPE sqlbroker_ready_messages gauge" in shown.text
    own = CollectorRegistry()
    Gauge("shop_orders", "Of the program.", registry=own)
    broker = SqlBroker.from_yaml(path, metrics=SqlBrokerPrometheusMetrics(own), logger=None)
    async with client_of(broker.asgi(logins())) as client:
        shown = await client.get("/metrics", auth=as_user("ann"))
        assert "# TYPE shop_orders gauge" in shown.text


async def test_without_metrics_it_is_told_how_to_have_them(write: Write) -> None:
    broker = SqlBroker.from_yaml(write(SERVICE), logger=None)
    async with client_of(broker.asgi(logins())) as client:
        refused = await client.get("/metrics", auth=as_user("ann"))
        assert refused.status_code == 404
        assert "write metrics: true below broker" in refused.json()["error"]


@pytest.mark.parametrize(
    ("extra", "module", "more"),
    [("config", "yaml", ""), ("prometheus", "prometheus_client", "  metrics: true\n")],
)
def test_a_missing_extra_is_named(write: Write, extra: str, module: str, more: str) -> None:
    """In a process of its own: here both are imported already."""
    code = (
        f"import sys; sys.modules[{module!r}] = None\n"
        "from faststream_sqlbroker import SqlBroker\n"
        f"try: SqlBroker.from_yaml({str(write(SERVICE + more))!r})\n"
        "except ImportError as error: print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "MissingExtraError" in done.stdout, done.stderr
    assert f"pip install 'sqlbroker[{extra}]'" in done.stdout
