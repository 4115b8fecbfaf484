"""Worlds of policies: one on each database for all tests of a module."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from sqlalchemy import text

from tests.conftest import Servers, _driver
from tests.policies.world import World

Worlds = Callable[[str], World]


@pytest.fixture(scope="module")
def worlds(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    """Finds the world on a kind of database."""
    made: dict[str, World] = {}
    with ExitStack() as stack:

        def find(kind: str) -> World:
            if kind not in made:
                url = (
                    _file(tmp_path_factory.mktemp("world"))
                    if kind == "sqlite"
                    else _database(servers, kind, stack)
                )
                made[kind] = stack.enter_context(World(url))
            return made[kind]

        yield find


def _file(folder: Path) -> str:
    return f"sqlite+aiosqlite:///{folder / 'test.db'}"


def _database(servers: Servers, kind: str, stack: ExitStack) -> str:
    admin = servers.admin(kind)
    name = f"sqlbroker_test_{kind}_{os.getpid()}_world"

    def run(statement: str) -> None:
        with admin.connect() as connection:
            connection.execute(text(statement))

    run(f"DROP DATABASE IF EXISTS {name}")
    run(f"CREATE DATABASE {name}")
    stack.callback(run, f"DROP DATABASE {name}")
    url = admin.url.set(drivername=f"{kind}+{_driver(kind)}", database=name)
    return url.render_as_string(hide_password=False)


@pytest.fixture
def world(database: str, worlds: Worlds) -> World:
    """Its clock stands at its start, and its tables are empty."""
    world = worlds(database)
    world.begin([])
    return world
