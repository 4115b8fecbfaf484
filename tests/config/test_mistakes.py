"""Each mistake has its line and column, says what is allowed, and shows no secret."""

from collections.abc import Callable
from pathlib import Path

import pytest

from faststream_sqlbroker import SetupError, SqlBroker
from faststream_sqlbroker.config import check_service
from faststream_sqlbroker.exceptions import ConfigError
from tests.config.conftest import SERVICE, told

pytestmark = pytest.mark.capability("A service from a file of YAML, checked at start")
Write = Callable[[str], Path]


def mistakes(path: Path) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check_service(path)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    return told(caught.value)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "",
            ["1:1 : it must be a mapping of broker, queues, destinations, schedules, http, got no"],
        ),
        ("queues: {}", ["1:1 : the option 'broker' is required"]),
        ("broker: {}", ["1:9 broker: the option 'url' is required"]),
        ("broker: 5", ["1:9 broker: it must be a mapping of url, "]),
        ("brokers: {url: x}\nbroker: {url: x}", ["1:1 brokers: unknown option 'brokers': did"]),
        ("broker: {url: 5}", ["1:15 broker.url: it must be text, got a number: put it in quotes"]),
        ("broker: {url: nonsense}", ["1:9 broker: the database URL is not valid"]),
        (
            f"{SERVICE}  graceful_timeout: 5 minutes",
            ["3:21 broker.graceful_timeout: duration cannot be '5 minutes': use seconds"],
        ),
        (
            f"{SERVICE}  graceful_timeout: -5s\nqueues: {{a: {{handler: json:dumps}}}}",
            ["3:21 broker.graceful_timeout: graceful_timeout must be"],
        ),
        (
            f"{SERVICE}  retention: {{completed: 5 days}}",
            ["3:26 broker.retention.completed: dur"],
        ),
        (f"{SERVICE}  retention: {{}}", ["3:14 broker.retention: Retention() removes nothing"]),
        (f"{SERVICE}  max_depth: {{a: 5}}", ["3:15 broker.max_depth.a: unknown queue 'a'"]),
        (f"{SERVICE}  schema: {{message_table_name: 5x}}", ["3:32 broker.schema.message_table_na"]),
        (f"{SERVICE}channels: {{}}", ["3:1 channels: unknown option 'channels'"]),
    ],
)
def test_of_the_broker(write: Write, text: str, found: list[str]) -> None:
    for said, wanted in zip(mistakes(write(text)), found, strict=True):
        assert said.startswith(wanted)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a: {}", ["2:6 queues.a: a queue needs either handler or forward_to, got neither"]),
        ("a:", ["2:5 queues.a: a queue needs either handler or forward_to, got neither"]),
        (
            "a: {forward_to: b, handler: json:dumps}",
            ["2:6 queues.a: a queue needs either handler or"],
        ),
        ("a: {forward_to: b, max_worker: 1}", ["2:22 queues.a.max_worker: unknown option"]),
        ("a: {forward_to: b, max_workers: 0}", ["2:35 queues.a.max_workers: max_workers must be"]),
        (
            'a: {forward_to: b, max_workers: "4"}',
            ["2:35 queues.a.max_workers: it must be a whole number, got text: write it as digits"],
        ),
        ("a: {forward_to: b, max_workers: 1.5}", ["2:35 queues.a.max_workers: it must be a whole"]),
        (
            "a: {forward_to: b, ordered: yes}",
            ["2:31 queues.a.ordered: it must be true or false, g"],
        ),
        ("a: {forward_to: b, max_workers: x}", ["2:35 queues.a.max_workers: it must be a whole"]),
        ("a: {forward_to: a}", ["2:19 queues.a.forward_to: forward_to"]),
        ("a: {forward_to: c}", ["2:19 queues.a.forward_to: unknown queue 'c': choose from a, b"]),
        (
            "front: {forward_to: frnt}",
            ["2:23 queues.front.forward_to: unknown queue 'frnt': did you mean 'front'? (list"],
        ),
        (
            "a: {forward_to: b, dead_letter_queue: bb}",
            ["2:41 queues.a.dead_letter_queue: unknown queue 'bb'"],
        ),
        (
            "a: {forward_to: DESTINATION, destinations: [b, x]}",
            ["2:50 queues.a.destinations[1]: unknown queue 'x'"],
        ),
        (
            "b: {forward_to: a}\n  a: {forward_to: b}",
            ["4:16 destinations[0]: 'b' is also under queues"],
        ),
        ("'logs.{level}': {forward_to: b}", ["2:19 queues.logs.{level}: 'logs.{level}' cannot be"]),
        ("a: {handler: nonsense}", ["2:16 queues.a.handler: handler must be module:name"]),
        ("a: {handler: 'no_such:f'}", ["2:16 queues.a.handler: handler 'no_such:f' cannot be im"]),
        ("a: {handler: './app:f'}", ["2:16 queues.a.handler: handler './app:f' cannot be im"]),
        (
            "a: {handler: 'tests.config.handlers:NO_FUNCTION'}",
            [
                (
                    "2:16 queues.a.handler: handler "
                    "'tests.config.handlers:NO_FUNCTION' is not a function"
                )
            ],
        ),
        (
            "a: {forward_to: b, policies: {delay: 5m}}",
            ["2:32 queues.a.policies: it must be a list, "],
        ),
        ("a: {forward_to: b, policies: [delay]}", ["2:33 queues.a.policies[0]: it must be a "]),
        (
            "a: {forward_to: b, policies: [{delay: 5 m}]}",
            ["2:41 queues.a.policies[0].delay: duration cannot be '5 m'"],
        ),
        (
            "a: {forward_to: b, policies: [{dealy: 5m}]}",
            ["2:34 queues.a.policies[0].dealy: unknown option 'dealy': did you mean 'delay'?"],
        ),
        (
            "a: {forward_to: b, policies: [{delay: 5m, once: 1h}]}",
            ["2:33 queues.a.policies[0]: exactly one of delay, debounce"],
        ),
        (
            "a: {forward_to: b, policies: [{throttle: {rate: 0, per: 1s}}]}",
            ["2:51 queues.a.policies[0].throttle.rate: Throttle's rate must be a whole number"],
        ),
        (
            "a: {forward_to: b, policies: [{throttle: {rate: 1, per: 1s, key: x}}]}",
            ["2:68 queues.a.policies[0].throttle.key: it must be a mapping with the key"],
        ),
        (
            "a: {forward_to: b, policies: [{delay: 1s}, {delay: 2s}]}",
            ["2:6 queues.a: a Delay can be given only once"],
        ),
        (
            "a: {handler: json:dumps, forward_headers: 5}",
            ["2:45 queues.a.forward_headers: it must be true or false or a list, got a number"],
        ),
        (
            "a: {handler: json:dumps, ack_policy: acknowledge}",
            ["2:40 queues.a.ack_policy: it must be 'ack_first', "],
        ),
        (
            "a: {handler: json:dumps, retry_strategy: {constant: {}}}",
            ["2:55 queues.a.retry_strategy.constant: the option 'delay_seconds' is required"],
        ),
        (
            "a: {handler: json:dumps, retry_strategy: {constant: {delay_seconds: 1, retry_on: X}}}",
            ["2:84 queues.a.retry_strategy.constant.retry_on: 'X' is not a built-in exception"],
        ),
    ],
)
def test_of_a_queue(write: Write, text: str, found: list[str]) -> None:
    path = write(f"queues:\n  {text}\ndestinations: [b]\n{SERVICE}")
    for said, wanted in zip(mistakes(path), found, strict=True):
        assert said.startswith(wanted)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("{queue: b}", "the option 'expression' is required"),
        ('{queue: c, expression: "* * * * *"}', "queue: unknown queue 'c'"),
        ('{queue: b, reply_to: c, expression: "* * * * *"}', "reply_to: unknown queue 'c'"),
        (
            '{queue: b, destination: c, expression: "* * * * *"}',
            "destination: unknown queue 'c'",
        ),
        ('{queue: b, expression: "* *"}', "cron"),
        ('{queue: b, expression: "* * * * *", tz: Europe/Berln}', "tz"),
        ('{queue: b, expression: "* * * * *", missed: no}', "missed: it must be 'one', "),
        ('{queue: b, expression: "* * * * *", delay: soon}', "delay: duration cannot be 'soon'"),
    ],
)
def test_of_a_schedule(write: Write, text: str, found: str) -> None:
    [said] = mistakes(write(f"{SERVICE}destinations: [b]\nschedules:\n  nightly: {text}"))
    assert said.startswith("5:")
    assert " schedules.nightly" in said
    assert found in said


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("{}", "http: HTTP needs authentication: give users or proxy_auth"),
        ("{users: []}", "http: HTTP needs authentication"),
        ("{users: [{name: a, role: root, password_hash: x}]}", "users[0].role: it must be 'view"),
        (
            "{users: [{name: a, role: admin, password: top-secret}]}",
            "users[0].password: unknown option 'password': did you mean 'password_hash'?",
        ),
        (
            "{users: [{name: a, role: admin, password_hash: top-secret}]}",
            "password_hash must have the form",
        ),
        (
            "{proxy_auth: {header: X-User, proxies: [x], roles: {a: admin}}}",
            "proxy_auth: 'x' is no",
        ),
        ("{queues: {longest_wait: 31}}", "longest_wait must be 30 seconds or less"),
        (
            "{queues: {queues: {a: {publish: short}}}}",
            "a.publish: publish must be text of 16 characters or more, got 5 characters",
        ),
        ("{channels: {stop_timeout: soon}}", "http.channels.stop_timeout: duration cannot be"),
        (
            "{channels: {channels: {a: {token: short}}}}",
            "a.token: token must be text of 16 characters or more, got 5 characters",
        ),
        (
            "{channels: {channels: {a: {consumers: {b: {type: poll}}}}}}",
            "type must be one of 'push', 'pull', got 'poll'",
        ),
        ("{channels: {channels: {a: {consumer: {}}}}}", "channels.a.consumer: unknown option"),
        (
            "{certificate: cert.pem}",
            "http: TLS needs both certificate and key: give key too",
        ),
        ("{port: 70000}", "port: it must be less than or equal to 65535, got 70000"),
    ],
)
def test_of_http(write: Write, text: str, found: str) -> None:
    said = mistakes(write(f"{SERVICE}http: {text}"))
    assert any(found in each for each in said)
    assert "top-secret" not in str(said)


def test_an_option_of_http_is_checked(write: Write) -> None:
    proxy = "proxy_auth: {header: X-User, proxies: [10.0.0.1], roles: {a: admin}}"
    path = write(f"{SERVICE}http:\n  {proxy}\n  max_body: 0\n")
    [said] = mistakes(path)
    assert said.startswith("5:13 http.max_body: max_body must be a whole number of 1 or more")


def test_all_mistakes_are_told_at_once(write: Write) -> None:
    said = mistakes(
        write(
            f"{SERVICE}  max_connections: x\n"
            "queues:\n  a: {forward_to: b, max_workers: x}\n  c: {forward_to: b, ordred: true}\n"
        )
    )
    assert [each.partition(" ")[0] for each in said] == ["3:20", "5:35", "6:22"]


def test_no_error_shows_a_password(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_PASSWORD", "hunter2-hunter2")
    url = "postgresql+asyncpg://user:${SHOP_PASSWORD}@db:x/shop"
    path = write(f"broker:\n  url: {url}\n  max_workers: ${{SHOP_PASSWORD}}\n")
    assert "hunter2" not in str(mistakes(path))
    path = write(f"broker:\n  url: {url}\n  graceful_timeout: ${{SHOP_PASSWORD}}\n")
    assert "${SHOP_PASSWORD}" in str(mistakes(path))
    path = write(f"broker:\n  url: {url}\n")
    [said] = mistakes(path)
    assert "hunter2" not in said
    assert "the database URL" in said


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"none\.yaml cannot be read"):
        SqlBroker.from_yaml(tmp_path / "none.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SetupError, match=r"bytes\.yaml cannot be read"):
        SqlBroker.from_yaml(tmp_path / "bytes.yaml")


def test_the_text_of_the_error_has_all(write: Write, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        SqlBroker.from_yaml(write(f"{SERVICE}queues:\n  a: {{forward_to: b}}\n"))
    head, said = str(caught.value).splitlines()
    assert head == f"{tmp_path / 'service.yaml'} has 1 mistake:"
    assert said == (
        "  line 4, column 19: queues.a.forward_to: unknown queue 'b': choose from a "
        "(list a queue under queues, or under destinations if another program consumes it)"
    )
