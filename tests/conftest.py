"""Databases for every test: an empty one each time."""

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer.testing
from hypothesis import HealthCheck, settings
from sqlalchemy import Connection, Engine, create_engine, make_url, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from faststream_sqlbroker.broker import broker
from faststream_sqlbroker.broker.engine_factory import configure_for_pgbouncer
from faststream_sqlbroker.database.server import DatabaseServer
from faststream_sqlbroker.flow.fleet import write_path
from faststream_sqlbroker.schema.tables import Tables
from faststream_sqlbroker.testing import clock
from tests import garbage, quick_tables, scheduling
from tests.compiled import Compiled
from tests.compiling import compile_share
from tests.costs import Costs
from tests.failures import Explained, SecondChance, passes_alone
from tests.helpers import list_of_sessions
from tests.kept_tables import CREATING, KeptTables
from tests.known_types import keep_types
from tests.quick_tables import QuickTables
from tools.private import CannotStartError, pgbouncer
from tools.servers import VARIABLES, NoServerError, own_server, server
from tools.stalled import VARIABLE as STALLS

# A pause of a busy machine is no failure: 200 ms for an example are not ours to promise.
settings.register_profile(
    "ours", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ours")
keep_types()

DRIVERS = {
    "sqlite": "aiosqlite",
    "postgresql": "asyncpg",
    "mariadb": "aiomysql",
    "mysql": "aiomysql",
}
PUBLIC_IS_CLOSED = (15,)
"""PostgreSQL's version from which not every user may create tables in the schema public."""
KEPT = "tests, from one to the next"
"""The application's name of the sessions that are not ended."""
OTHER_DRIVERS = {"psycopg": ("postgresql",), "asyncmy": ("mariadb", "mysql")}
"""Drivers that `just test-drivers` puts in place of the usual ones."""


# Every Spark that tests start, in processes of their own too: much of its time is Java's compiler,
# the check of the classes' code, and the search for classes in 287 jars.
_QUICK = Path(__file__).parent / "spark" / "quick"
_JARS = Path(getattr(find_spec("pyspark"), "origin", "")).parent / "jars"
_FIRST = [
    str(jar)
    for name in (_QUICK / "jars.txt").read_text().split()
    for jar in _JARS.glob(f"{name}[-_][0-9]*.jar")
]
os.environ["SPARK_CONF_DIR"] = str(_QUICK)
os.environ["SPARK_SUBMIT_OPTS"] = (
    "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC "
    "-XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
    f" -cp {':'.join([str(_QUICK), *_FIRST, str(_JARS / '*')])}"
)


class Servers:
    """Administrators' engines, made when first needed."""

    def __init__(self, own: tuple[str, ...] = ()) -> None:
        """Of the kinds in `own` it starts private servers."""
        self._own = own
        self._stack = ExitStack()
        self._found: dict[str, Engine | NoServerError] = {}
        self._pgbouncer: int | str | None = None
        self._kept: dict[tuple[str, str], Engine] = {}

    def admin(self, kind: str) -> Engine:
        """The engine of `kind`'s administrator; skip without a server, fail in CI if nothing
        excuses it."""
        if kind not in self._found:
            self._found[kind] = self._find(kind)
        found = self._found[kind]
        if isinstance(found, NoServerError):
            if os.environ.get("CI") and not found.excused:
                pytest.fail(str(found))
            pytest.skip(str(found))
        return found

    def _find(self, kind: str) -> Engine | NoServerError:
        if reason := os.environ.get(f"{VARIABLES[kind]}_MISSING"):
            missing = NoServerError(reason)
            missing.excused = True  # else the tests would not have been started in CI
            return missing
        try:
            url = self._stack.enter_context((own_server if kind in self._own else server)(kind))
        except NoServerError as error:
            return error
        return create_engine(url, isolation_level="AUTOCOMMIT", pool_pre_ping=True)

    def pgbouncer(self) -> int:
        """The port of a PgBouncer before PostgreSQL; skip if it cannot start, fail in CI."""
        if self._pgbouncer is None:
            url = self.admin("postgresql").url.render_as_string(hide_password=False)
            try:
                self._pgbouncer = self._stack.enter_context(pgbouncer(url))
            except CannotStartError as error:
                self._pgbouncer = str(error)
        if isinstance(self._pgbouncer, str):
            if os.environ.get("CI"):
                pytest.fail(self._pgbouncer)
            pytest.skip(self._pgbouncer)
        return self._pgbouncer

    def inside(self, kind: str, name: str) -> Engine | None:
        """An engine on the database `name`, which stays until the end; None: it is not there.

        What the test before, or a process that it started, has left there is ended.
        """
        admin = self.admin(kind)
        # Not only ours: a module may have servers of its own, which end earlier.
        query = f"SELECT 1 FROM information_schema.schemata WHERE schema_name = '{name}'"
        if kind == "postgresql":
            query = f"SELECT 1 FROM pg_database WHERE datname = '{name}'"
        with admin.connect() as connection:
            if connection.exec_driver_sql(query).first() is None:
                return None
            _end_sessions(connection, name)
        if (kind, name) not in self._kept:
            # PostgreSQL reads its catalogs anew for each session, which takes 10 ms. A session of
            # MySQL would be in no database once the database was made anew.
            options: dict[str, Any] = {"poolclass": NullPool}
            if kind == "postgresql":
                called = {"application_name": KEPT}
                options = {"pool_size": 1, "pool_pre_ping": True, "connect_args": called}
            self._kept[kind, name] = create_engine(
                admin.url.set(database=name), isolation_level="AUTOCOMMIT", **options
            )
        return self._kept[kind, name]

    def create(self, kind: str, name: str) -> Engine:
        """As `inside`, of a new database."""
        with self.admin(kind).connect() as connection:
            connection.execute(text(f"CREATE DATABASE {name}"))
        inside = self.inside(kind, name)
        assert inside is not None
        return inside

    def leave(self) -> None:
        """Close the sessions that are kept; they are opened again when they are needed."""
        for inside in self._kept.values():
            inside.dispose()

    def close(self) -> None:
        """End what was started here."""
        for (kind, name), inside in self._kept.items():
            inside.dispose()
            _drop(self.admin(kind), name)
        for found in self._found.values():
            if isinstance(found, Engine):
                found.dispose()
        self._stack.close()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Costs(config), "costs")
    config.pluginmanager.register(Explained(), "explained")
    if config.getoption("numprocesses", None) and STALLS not in os.environ:
        config.pluginmanager.register(SecondChance(passes_alone), "second chance")


def pytest_sessionstart(session: pytest.Session) -> None:
    compile_share(session.config)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = scheduling.order(items)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    with garbage.no_looks():
        return (yield)


def pytest_collection_finish() -> None:
    garbage.look_seldom()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return scheduling.scheduler(config, log)


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    servers = Servers()
    yield servers
    servers.close()


@pytest.fixture(params=["sqlite", "postgresql", "mariadb", "mysql"])
def database(request: pytest.FixtureRequest) -> str:
    """The kind of database; a test for one kind only is parametrised with it, indirectly."""
    kind: str = request.param
    return kind


@pytest.fixture
def database_url(
    database: str,
    servers: Servers,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    _kept_tables: KeptTables,
    tmp_path_factory: pytest.TempPathFactory,
) -> str:
    """URL (asyncio driver) of an empty database.

    Where a fixture of the test creates the usual tables, they may be there already: empty.
    """
    creates = not CREATING.isdisjoint(request.fixturenames)
    if database == "sqlite":
        file = tmp_path / "test.db"
        if creates:
            _kept_tables.copy_to(file, tmp_path_factory.getbasetemp() / "template.db")
        return f"sqlite+aiosqlite:///{file}"
    kind = "postgresql" if database == "pgbouncer" else database
    # PgBouncer's sessions are not ended with those of other tests.
    suffix = "_pooled" if database == "pgbouncer" else ""
    admin = servers.admin(kind)
    name = f"sqlbroker_test_{kind}_{os.getpid()}{suffix}"
    _kept_tables.forget(name)
    inside = servers.inside(kind, name)
    keeps = creates and "new_tables" not in request.fixturenames
    looking = inside if kind == "postgresql" else admin
    if inside is None or looking is None or not (keeps and _kept_tables.empty(looking, name)):
        inside = _emptied(servers, kind, name, inside)
        if creates:
            _kept_tables.create(inside, name)
    url = admin.url.set(drivername=f"{kind}+{_driver(kind)}", database=name)
    if database == "pgbouncer":
        url = url.set(port=servers.pgbouncer())
    return url.render_as_string(hide_password=False)


def _driver(kind: str) -> str:
    for name in os.environ.get("SQLBROKER_TEST_DRIVERS", "").split(","):
        if kind in OTHER_DRIVERS.get(name, ()):
            return name
    return DRIVERS[kind]


def _drop(admin: Engine, name: str) -> None:
    force = " WITH (FORCE)" if admin.dialect.name == "postgresql" else ""
    with admin.connect() as connection:
        connection.execute(text(f"DROP DATABASE IF EXISTS {name}{force}"))


def _end_sessions(connection: Connection, name: str, *, kept_too: bool = False) -> None:
    if connection.dialect.name == "postgresql":
        ours = "" if kept_too else f" AND application_name <> '{KEPT}'"
        connection.exec_driver_sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            f"WHERE datname = '{name}' AND backend_type = 'client backend'{ours}"
        )
        return
    query = f"SELECT id FROM {list_of_sessions(connection.dialect)} WHERE db = '{name}'"
    for session in connection.exec_driver_sql(query).scalars().all():
        with suppress(DBAPIError):  # it has just ended
            connection.exec_driver_sql(f"KILL {session}")


def _emptied(servers: Servers, kind: str, name: str, inside: Engine | None) -> Engine:
    """Make the database `name` anew, or as good as new."""
    admin = servers.admin(kind)
    if kind == "postgresql" and inside is not None:
        _empty(admin, name, inside)
        return inside
    _drop(admin, name)
    return servers.create(kind, name)


def _empty(admin: Engine, name: str, inside: Engine) -> None:
    """Make PostgreSQL's database `name` as good as new, ten times as fast as a new one: it copies
    no files."""
    with admin.connect() as connection:
        connection.execute(text(f"ALTER DATABASE {name} RESET ALL"))
    with inside.begin() as connection:
        schemas = connection.scalars(
            text(
                "SELECT quote_ident(nspname) FROM pg_namespace "
                "WHERE nspname !~ '^(pg_|information_schema)'"
            )
        ).all()
        for schema in schemas:
            connection.execute(text(f"DROP SCHEMA {schema} CASCADE"))
        connection.execute(text("CREATE SCHEMA public"))
        rights = "USAGE" if connection.dialect.server_version_info >= PUBLIC_IS_CLOSED else "ALL"
        connection.execute(text(f"GRANT {rights} ON SCHEMA public TO PUBLIC"))


@pytest.fixture
def alone(servers: Servers, database: str, database_url: str) -> None:
    """For tests that look at the sessions of the database: none is kept from other tests."""
    servers.leave()
    # A folder may have servers of its own, and the others' keep their sessions too.
    with servers.admin(database).connect() as connection:
        _end_sessions(connection, str(make_url(database_url).database), kept_too=True)


@pytest.fixture
def new_tables() -> None:
    """For tests that read what the database counts of a table: no other test had these before."""


@pytest.fixture(scope="session")
def _kept_tables(_quick_tables: QuickTables) -> KeptTables:
    return KeptTables(_quick_tables)


@pytest.fixture(scope="session", autouse=True)
def _quick_tables() -> Iterator[QuickTables]:
    quick = QuickTables()

    async def create_tables(server: Any) -> None:
        await server._database.run(lambda connection: quick(connection, server._dialect.tables))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DatabaseServer, "create_tables", create_tables)
        patch.setattr(broker, "build_tables", quick_tables.built)
        # Our commands have a hundred options, which each test of a command would build.
        patch.setattr(typer.testing, "_get_command", cache(typer.main.get_command))
        patch.setattr(
            Tables,
            "for_dialect",
            lambda tables, name: quick_tables.built(tables.config, name),
        )
        yield quick


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_stuck() -> Iterator[None]:
    """A busy machine may need longer than users wait for a handler in virtual time, or a probe."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "REAL_TIME_LIMIT", 600.0)
        patch.setattr(write_path, "PROBE_TIMEOUT", 60.0)
        yield


@pytest.fixture
async def engine(database_url: str, database: str) -> AsyncIterator[AsyncEngine]:
    """An engine on the empty database."""
    kept = {"compiled_cache": Compiled.of(database)}
    # SQLite's lock may be held for so long by a process that stands still.
    options = {"timeout": 60} if database == "sqlite" else {}
    engine = create_async_engine(
        make_url(database_url), execution_options=kept, connect_args=options
    )
    if database == "pgbouncer":
        configure_for_pgbouncer(engine)
    yield engine
    await engine.dispose()
