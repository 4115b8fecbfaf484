"""Empty databases for cells, several at a time."""

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Engine, text

DRIVERS = {"postgresql": "postgresql+asyncpg", "mariadb": "mariadb+aiomysql"}
_numbers = itertools.count()


@contextmanager
def fresh_database(kind: str, admin: Callable[[str], Engine], folder: Path) -> Iterator[str]:
    """URL (asyncio driver) of an empty database, dropped afterwards."""
    name = f"sqlbroker_faults_{os.getpid()}_{next(_numbers)}"
    if kind == "sqlite":
        yield f"sqlite+aiosqlite:///{folder / name}.db"
        return
    engine = admin(kind)
    force = " WITH (FORCE)" if kind == "postgresql" else ""
    with engine.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    try:
        yield engine.url.set(drivername=DRIVERS[kind], database=name).render_as_string(hide_password=False)
    finally:
        with engine.connect() as connection:
            connection.execute(text(f"DROP DATABASE IF EXISTS {name}{force}"))
