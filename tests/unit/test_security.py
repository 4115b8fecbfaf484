"""`security=`: user, password and TLS of the connections that the broker makes from a URL."""

import ssl
from typing import Any

import pytest
from faststream.security import (
    SASLGSSAPI,
    BaseSecurity,
    SASLOAuthBearer,
    SASLPlaintext,
    SASLScram256,
    SASLScram512,
)
from sqlalchemy import make_url
from sqlalchemy.ext.asyncio import create_async_engine

from faststream_sqlbroker import NotSupportedError, SetupError, SqlBroker
from faststream_sqlbroker.security import parse_security

URL = "postgresql+asyncpg://db.example/app"
LOGIN = SASLPlaintext("ann", "hunter2")


@pytest.mark.parametrize("driver", ["postgresql+asyncpg", "mysql+aiomysql", "mariadb+asyncmy"])
def test_a_login_becomes_part_of_the_url(driver: str) -> None:
    url, arguments = parse_security(LOGIN, make_url(f"{driver}://db.example:99/app?a=b"))
    assert url.render_as_string(hide_password=False) == (
        f"{driver}://ann:hunter2@db.example:99/app?a=b"
    )
    assert arguments == {}


@pytest.mark.parametrize("driver", ["postgresql+asyncpg", "mysql+aiomysql", "mariadb+asyncmy"])
@pytest.mark.parametrize("kind", [BaseSecurity, SASLPlaintext])
def test_tls_goes_to_the_driver(driver: str, kind: Any) -> None:
    context = ssl.create_default_context()
    login = () if kind is BaseSecurity else ("ann", "hunter2")
    address = make_url(f"{driver}://db.example/app")
    assert parse_security(kind(*login, ssl_context=context), address)[1] == {"ssl": context}
    [own] = parse_security(kind(*login, use_ssl=True), address)[1].values()
    assert own.verify_mode is ssl.CERT_REQUIRED
    assert own.check_hostname


def test_tls_of_psycopg_checks_the_certificate() -> None:
    address = make_url("postgresql+psycopg://db.example/app")
    _, arguments = parse_security(BaseSecurity(use_ssl=True), address)
    assert arguments == {"sslmode": "verify-full", "sslrootcert": "system"}
    with pytest.raises(
        NotSupportedError, match=r"psycopg accepts no SSLContext.*sslrootcert=ca.pem"
    ):
        parse_security(BaseSecurity(ssl_context=ssl.create_default_context()), address)


def test_scram_is_a_login_of_postgresql_only() -> None:
    url, _ = parse_security(SASLScram256("ann", "hunter2"), make_url(URL))
    assert (url.username, url.password) == ("ann", "hunter2")
    with pytest.raises(SetupError, match="SASLScram256 cannot log in to mysql"):
        parse_security(SASLScram256("ann", "x"), make_url("mysql+aiomysql://db.example/app"))


@pytest.mark.parametrize("wrong", [SASLScram512("a", "b"), SASLOAuthBearer(), SASLGSSAPI()])
def test_other_logins_are_refused(wrong: Any) -> None:
    with pytest.raises(SetupError, match=r"cannot log in to postgresql: use SASLPlaintext"):
        SqlBroker(URL, security=wrong)


def test_two_logins_are_refused_without_their_passwords() -> None:
    with pytest.raises(SetupError, match="both name a user") as info:
        SqlBroker("postgresql+asyncpg://bob:secret@db.example/app", security=LOGIN)
    assert not {"secret", "hunter2"} & set(str(info.value).split())


def test_sqlite_has_no_login() -> None:
    with pytest.raises(SetupError, match="SQLite is a file"):
        SqlBroker("sqlite+aiosqlite:///a.db", security=LOGIN)


def test_both_engines_of_the_broker_use_it() -> None:
    broker = SqlBroker(URL, listen_url="postgresql+asyncpg://direct.example/app", security=LOGIN)
    listening = broker._listen_engine
    assert listening is not None
    for engine, host in ((broker.engine, "db.example"), (listening, "direct.example")):
        assert (engine.url.username, engine.url.password, engine.url.host) == (
            "ann",
            "hunter2",
            host,
        )


def test_an_engine_keeps_its_own() -> None:
    engine = create_async_engine("postgresql+asyncpg://bob:secret@db.example/app")
    broker = SqlBroker(engine, security=SASLOAuthBearer())
    assert broker.engine.url.username == "bob"
