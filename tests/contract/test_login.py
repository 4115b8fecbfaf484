"""MySQL's default login, with a password over TCP and without TLS."""

import os
from collections.abc import Iterator

import pytest
from sqlalchemy import make_url, text
from sqlalchemy.ext.asyncio import create_async_engine

from faststream_sqlbroker import SqlBroker
from tests.conftest import Servers

USER = f"sqlbroker_login_{os.getpid()}"


@pytest.fixture
def password_url(database_url: str, servers: Servers) -> Iterator[str]:
    """The empty database's URL for a new user, of whom the server has nothing cached."""
    with servers.admin("mysql").connect() as connection:
        connection.execute(text(f"DROP USER IF EXISTS {USER}"))
        connection.execute(
            text(f"CREATE USER {USER} IDENTIFIED WITH caching_sha2_password BY 'p w'")
        )
        connection.execute(text(f"GRANT ALL ON {make_url(database_url).database}.* TO {USER}"))
    url = make_url(database_url).set(username=USER, password="p w")
    yield url.render_as_string(hide_password=False)
    with servers.admin("mysql").connect() as connection:
        connection.execute(text(f"DROP USER {USER}"))


@pytest.mark.parametrize("database", ["mysql"], indirect=True)
@pytest.mark.parametrize("driver", ["aiomysql", "asyncmy"])
async def test_a_password_is_taken_without_tls(password_url: str, driver: str) -> None:
    """It goes encrypted by the server's key, for which the drivers need cryptography (the extras
    bring it)."""
    engine = create_async_engine(make_url(password_url).set(drivername=f"mysql+{driver}"))
    broker = SqlBroker(engine, logger=None)
    await broker.create_tables()
    await broker.start()
    await broker.publish({"n": 1}, "q")
    async with engine.connect() as connection:
        assert (
            (await connection.scalars(text("SELECT CURRENT_USER()"))).one().startswith(f"{USER}@")
        )
        tls = (await connection.execute(text("SHOW SESSION STATUS LIKE 'Ssl_cipher'"))).one()
    assert tls[1] == ""
    await broker.stop()
    await engine.dispose()
