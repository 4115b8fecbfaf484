"""Empty databases for cells, several at a time."""

import itertools
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Engine, create_engine, make_url, text

from tests.faults.faults import Fault
from tests.faults.logins import Login
from tools.private import STARTERS, CannotStartError, Process

DRIVERS = {
    "postgresql": "postgresql+asyncpg",
    "mariadb": "mariadb+aiomysql",
    "mysql": "mysql+aiomysql",
}
_numbers = itertools.count()


@dataclass(frozen=True)
class Place:
    """Where a cell works: an empty database, and its server if that is the cell's own."""

    url: str
    """Its owner's."""
    server: Process | None = None
    login: Login | None = None
    """The user of the workers, if not the owner."""


@dataclass(frozen=True)
class OwnServer:
    """A server that a cell may end or change."""

    engine: Engine
    """Its administrator's."""
    process: Process


@contextmanager
def own_server(kind: str) -> Iterator[OwnServer]:
    """A private server.

    Raises:
        CannotStartError: this machine does not give it.
    """
    with STARTERS[kind]() as (url, process):
        engine = create_engine(url, isolation_level="AUTOCOMMIT", pool_pre_ping=True)
        yield OwnServer(engine, process)
        engine.dispose()


@contextmanager
def place_for(
    fault: Fault,
    kind: str,
    admin: Callable[[str], Engine],
    folder: Path,
    own: OwnServer | None = None,
) -> Iterator[Place]:
    """What `fault` needs on the database `kind`; if that is a server of its own, `own` or a new
    one.

    Raises:
        CannotStartError: this machine does not give it.
    """
    with ExitStack() as stack:
        if fault.own_server:
            own = own or stack.enter_context(own_server(kind))
            admin = _always(own.engine)
        if fault.small_disk:
            folder = stack.enter_context(small_disk(folder))
        url, login = stack.enter_context(_place(fault, kind, admin, folder))
        yield Place(url, own.process if own is not None else None, login)


def _always(engine: Engine) -> Callable[[str], Engine]:
    return lambda _kind: engine


@contextmanager
def _place(
    fault: Fault, kind: str, admin: Callable[[str], Engine], folder: Path
) -> Iterator[tuple[str, Login | None]]:
    """An empty database, with a user for the workers if `fault` wants one."""
    if not fault.login:
        with fresh_database(kind, admin, folder) as url:
            yield url, None
        return
    name = f"sqlbroker_worker_{os.getpid()}_{next(_numbers)}"
    with _user(kind, admin, name), fresh_database(kind, admin, folder) as url:
        yield url, Login(kind, name, make_url(url).database or "")


@contextmanager
def _user(kind: str, admin: Callable[[str], Engine], name: str) -> Iterator[None]:
    login = Login(kind, name, "")

    def execute(statements: list[str]) -> None:
        with admin(kind).connect() as connection:
            for statement in statements:
                connection.execute(text(statement))

    execute(login.create())
    try:
        yield
    finally:
        execute(login.drop())


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of its own in memory, 8 MiB.

    Raises:
        CannotStartError: we may not mount; the text says why.
    """
    place = folder / "small"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        msg = f"no small file system can be mounted: {done.stderr.strip()}"
        raise CannotStartError(msg)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=False)


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
        yield engine.url.set(drivername=DRIVERS[kind], database=name).render_as_string(
            hide_password=False
        )
    finally:
        with engine.connect() as connection:
            connection.execute(text(f"DROP DATABASE IF EXISTS {name}{force}"))
