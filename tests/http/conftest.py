"""An application over a broker's empty tables, and clients of it."""

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import httpx
import pytest

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.cli import listening
from faststream_sqlbroker.flow.fleet import heartbeat
from faststream_sqlbroker.http import BasicAuth, HttpApp, Login, basic_auth, gate, server
from faststream_sqlbroker.http import diagnosis as diagnoses
from faststream_sqlbroker.http import probes as of_probes
from faststream_sqlbroker.http.app import HttpOptions
from faststream_sqlbroker.http.dashboard import fleet, live
from faststream_sqlbroker.http.responses import BodyLimits
from tests.faststream.conftest import broker, heard, logger, look
from tests.http.documented import is_documented

__all__ = ("broker", "heard", "logger", "look")

on_sqlite = pytest.mark.parametrize("database", ["sqlite"], indirect=True)
PASSWORDS = {"ann": "ann-password", "ola": "ola-password", "vic": "vic-password"}
"""By name; ann is the admin, ola an operator, vic a viewer."""
ROLES = {"ann": "admin", "ola": "operator", "vic": "viewer"}
BASE = "http://broker.test"
LONG = 120
"""Seconds: a limit that is not reached."""


def _cheap_hashes() -> dict[str, str]:
    """Checked by the same code; each test logs in anew, which would take 50 ms of a processor."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(basic_auth, "COST", 2**4)
        return {name: basic_auth.hash_password(password) for name, password in PASSWORDS.items()}


_HASHES = _cheap_hashes()


def logins() -> BasicAuth:
    """One user of each role."""
    return BasicAuth([Login(name, ROLES[name], _HASHES[name]) for name in PASSWORDS])


def as_user(name: str) -> tuple[str, str]:
    """What httpx takes as auth."""
    return name, PASSWORDS[name]


def client_of(
    app: Any, *, client: tuple[str, int] = ("192.0.2.1", 4711), **options: Any
) -> httpx.AsyncClient:
    """A client at an address that is not this machine's; what it is answered is as documented."""
    if isinstance(app, HttpApp):
        served = {getattr(route, "path", "").replace(":path}", "}") for route in app.api.routes}
        compare = partial(is_documented, served=served)
        options.setdefault("event_hooks", {"response": [compare]})
    transport = httpx.ASGITransport(app, raise_app_exceptions=False, client=client)
    return httpx.AsyncClient(transport=transport, **{"base_url": BASE, **options})


@pytest.fixture(autouse=True)
def a_minute_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failures are counted by the minute; a busy machine may need longer for a test."""
    monkeypatch.setattr(gate, "monotonic", lambda: 1000.0)


@pytest.fixture(autouse=True)
def limits_longer_than_a_machine_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the servers in the tests' own process; `running.COMMAND` has those of others."""
    for owner, name in (
        *((server, name) for name in ("HEAD_TIMEOUT", "READ_TIMEOUT")),
        *((listening, name) for name in ("IDLE_TIMEOUT", "SHUTDOWN_TIMEOUT")),
        *((module, "LIMIT") for module in (of_probes, diagnoses, fleet)),
        (live, "MAX_STREAM_SECONDS"),
    ):
        monkeypatch.setattr(owner, name, LONG)
    bodies = property(lambda options: BodyLimits(options.max_body, LONG))
    monkeypatch.setattr(HttpOptions, "limits", bodies)
    monkeypatch.setattr(heartbeat, "LEASE_INTERVALS", 100)


@pytest.fixture
def app(broker: SqlBroker) -> HttpApp:
    return broker.asgi(logins())


@pytest.fixture
async def web(app: HttpApp) -> AsyncIterator[httpx.AsyncClient]:
    """A client that says nothing of itself."""
    async with client_of(app) as client:
        yield client
