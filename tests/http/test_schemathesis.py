"""Requests that are made of the OpenAPI document: no defect, and answers as documented."""

import asyncio
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from hypothesis import HealthCheck, Phase, given, seed, settings

from faststream_sqlbroker import SqlBroker
from tests.http.conftest import as_user, client_of, logins
from tests.http.documented import SEEN, operations, whole
from tests.http.pulling import CHANNEL, CONSUMER, TOKENS, channels
from tests.http.queueing import CONSUME, PUBLISH, QUEUE, bearer, queues

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import schemathesis
    from schemathesis import GenerationMode

EXAMPLES = 6
"""Of each request, and of each way to make it."""
KNOWN = {"channel": CHANNEL, "consumer": CONSUMER, "queue": QUEUE, "job": "1", "message": 1}
"""What there is, so that requests get further than to its absence."""


class Served:
    """An application with an event loop of its own: the tests of Hypothesis are synchronous."""

    def __init__(self, folder: Path) -> None:
        self.runner = asyncio.Runner()
        self.broker = SqlBroker(f"sqlite+aiosqlite:///{folder}/asked.db", logger=None)
        self.client = client_of(
            self.broker.asgi(logins(), channels=channels(), queues=queues(longest_wait=0))
        )
        self.runner.run(self.broker.create_tables())

    def send(self, case: Any, headers: dict[str, str]) -> Any:
        """The answer to one request; the client compares it with the document."""
        given = case.as_transport_kwargs(base_url="http://broker.test")
        given.pop("cookies", None)
        allowed = ("method", "url", "headers", "params", "data", "json", "files")
        made = requests.Request(**{name: given[name] for name in allowed if name in given})
        prepared = made.prepare()
        own = {name: str(value) for name, value in prepared.headers.items()}
        body: Any = prepared.body
        return self.runner.run(
            self.client.request(
                str(prepared.method),
                str(prepared.url),
                headers={**own, **headers},
                content=body.encode() if isinstance(body, str) else body,
            )
        )

    def close(self) -> None:
        """End."""
        self.runner.run(self.client.aclose())
        self.runner.run(self.broker.stop())
        self.runner.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    found = Served(tmp_path_factory.mktemp("asked"))
    yield found
    found.close()


def credentials(path: str, told: dict[str, Any]) -> dict[str, str]:
    """The headers of those who may send it."""
    schemes = {name for each in told["security"] for name in each}
    if "queueToken" in schemes:
        return bearer(PUBLISH if "publish" in path else CONSUME)
    if "channelToken" in schemes:
        return TOKENS
    name, password = as_user("ann")
    return {"Authorization": requests.auth._basic_auth_str(name, password)}


def ways(told: dict[str, Any]) -> Iterator[tuple[bool, GenerationMode]]:
    """How requests are made: with a path that is known or any, and as documented or not."""
    where = {each["in"] for each in told.get("parameters", ())}
    yield True, GenerationMode.POSITIVE
    if where - {"path"} or "requestBody" in told:
        yield True, GenerationMode.NEGATIVE
    if "path" in where:
        yield False, GenerationMode.POSITIVE
        yield False, GenerationMode.NEGATIVE


@pytest.mark.parametrize(
    ("method", "path", "told"),
    [pytest.param(*each, id=each[2]["operationId"]) for each in operations()],
)
def test_a_request_has_a_documented_answer(
    served: Served, method: str, path: str, told: dict[str, Any]
) -> None:
    schema = schemathesis.openapi.from_dict(whole())
    cases = schema[path][method.upper()]
    names = [each["name"] for each in told.get("parameters", ()) if each["in"] == "path"]
    there = {name: KNOWN[name] for name in names if name in KNOWN}
    headers = credentials(path, told)
    for known, mode in ways(told):
        wanted = there if known else None
        ask_all(served, headers, cases.as_strategy(generation_mode=mode, path_parameters=wanted))
    assert (method.upper(), path) in {each[:2] for each in SEEN}


def ask_all(served: Served, headers: dict[str, str], cases: Any) -> None:
    """Send some requests, the same ones each time."""

    @seed(0)
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases)
    def ask(case: Any) -> None:
        answer = served.send(case, headers)
        assert answer.status_code < 500, answer.text

    ask()
