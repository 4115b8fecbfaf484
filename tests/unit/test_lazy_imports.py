"""What a process imports: what it uses, and no more."""

import ast
import pkgutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from sqlalchemy.ext.asyncio import create_async_engine

import faststream_sqlbroker
from faststream_sqlbroker import policies, retry
from faststream_sqlbroker.database import store
from faststream_sqlbroker.database.dialects import DIALECTS, Dialect
from faststream_sqlbroker.database.store import Store
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.tables import build_tables

INIT = Path(faststream_sqlbroker.__file__)


OF_THE_LOADING = {"importlib", "importlib.util", "typing"}
"""What the package imports from for itself."""


def test_every_public_name_is_there_and_lives_where_type_checkers_look() -> None:
    """Type checkers read imports that are never run; a process reads a table."""
    homes = {}
    for node in ast.walk(ast.parse(INIT.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module not in OF_THE_LOADING:
            for alias in node.names:
                homes[alias.asname or alias.name] = (node.module, alias.name)
    assert homes.keys() == set(faststream_sqlbroker.__all__)
    for name, (module, original) in homes.items():
        __import__(str(module))
        expected = getattr(sys.modules[str(module)], original)
        assert getattr(faststream_sqlbroker, name) is expected
        assert name in dir(faststream_sqlbroker)


def test_modules_that_users_name_need_no_import_of_their_own() -> None:
    code = "import faststream_sqlbroker as it; it.exceptions.PublishError, it.testing, it.message"
    assert "faststream_sqlbroker.exceptions" in ours_after(code)


def test_names_that_users_try_are_there() -> None:
    """Those in the pattern of FastStream's brokers, and modules by what they hold."""
    assert faststream_sqlbroker.SqlRouter is faststream_sqlbroker.SqlBrokerRouter
    assert faststream_sqlbroker.SqlMessage is faststream_sqlbroker.SqlBrokerMessage
    assert faststream_sqlbroker.__version__ == metadata.version("sqlbroker")
    assert policies.Debounce is faststream_sqlbroker.Debounce
    assert retry.NoRetryStrategy is faststream_sqlbroker.NoRetryStrategy


def test_an_unknown_name_is_no_attribute() -> None:
    for name in ("SqlThing", "SqlSql", "RabbitRouter", "thing"):
        assert not hasattr(faststream_sqlbroker, name)


def test_the_package_alone_imports_nothing_else() -> None:
    """Spark imports it, below `faststream_sqlbroker.core`, in every Python worker."""
    assert ours_after("import faststream_sqlbroker") == {"faststream_sqlbroker"}


MOST_OF_A_BROKER = 147
"""Modules that `SqlBroker` may import; before a subscriber is declared."""
RARE = (
    "admin",
    "archive_reader",
    "cli",
    "client",
    "config",
    "database.bulk.store",
    "database.explain",
    "database.locks",
    "database.mysql.dialect",
    "database.overviews",
    "database.policies",
    "database.postgresql",
    "database.pull",
    "database.retention",
    "database.schedules",
    "database.verification",
    "fastapi",
    "flow.consumer",
    "flow.tasks.archive_upkeep",
    "flow.tasks.locks",
    "flow.tasks.pull_jobs",
    "http",
    "prometheus",
    "schema.functions",
    "schema.migrate",
    "subscriber.usecase",
    "testing",
)
"""Those that a broker imports when they are asked for."""


def test_a_broker_imports_little_and_nothing_rare() -> None:
    ours = ours_after("from faststream_sqlbroker import SqlBroker")
    assert len(ours) <= MOST_OF_A_BROKER
    for name in RARE:
        rare = f"faststream_sqlbroker.{name}"
        assert find_spec(rare), "it has another name now"
        assert not [module for module in ours if f"{module}.".startswith(f"{rare}.")]


def test_a_start_with_a_plain_subscriber_imports_no_other_database_and_no_policies(
    tmp_path: Path,
) -> None:
    """Nor anything of the rest that the loops of this subscriber never ask for."""
    program = """
import asyncio
from faststream_sqlbroker import SqlBroker
async def main():
    broker = SqlBroker("sqlite+aiosqlite:///FILE", logger=None)
    broker.subscriber("orders")(lambda message: None)
    async with broker:
        await broker.STEP()
asyncio.run(main())
""".replace("FILE", str(tmp_path / "broker.db"))
    ours_after(program.replace("STEP", "create_tables"))
    ours = ours_after(program.replace("STEP", "start"), "sqlalchemy.dialects.")
    assert "sqlalchemy.dialects.sqlite" in ours
    # SQLAlchemy's module of one database takes as long as a tenth of the start.
    assert not ours & {"sqlalchemy.dialects.mysql", "sqlalchemy.dialects.postgresql"}
    rare = {
        "core.health",
        "core.bulk_jobs",
        "admin.admin",
        "database.bulk.store",
        "database.explain",
        "database.locks",
        "database.mysql.dialect",
        "database.overviews",
        "database.policies.claims",
        "database.postgresql.dialect",
        "database.pull",
        "database.retention",
        "database.schedules",
        "database.verification",
        "flow.tasks.pull_jobs",
        "http",
    }
    for name in rare:
        assert find_spec(f"faststream_sqlbroker.{name}"), "it has another name now"
    assert ours.isdisjoint(f"faststream_sqlbroker.{name}" for name in rare)
    assert "faststream_sqlbroker.subscriber.usecase" in ours


def test_each_subject_of_the_store_is_where_it_is_said_to_be(tmp_path: Path) -> None:
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/broker.db")
    ours = Store(engine, build_tables(SqlBrokerSchemaConfig()))
    homes = [name for name, value in vars(Store).items() if isinstance(value, store._LazyAttribute)]
    assert homes
    for name in homes:
        assert type(getattr(ours, name)).__module__.startswith("faststream_sqlbroker.database.")


def test_each_dialect_is_where_it_is_said_to_be() -> None:
    for name, home in DIALECTS.items():
        dialect = pkgutil.resolve_name(home)
        assert issubclass(dialect, Dialect)
        assert dialect.name == name


def test_threads_that_ask_at_once_get_one_subject(tmp_path: Path) -> None:
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/broker.db")
    ours = Store(engine, build_tables(SqlBrokerSchemaConfig()))
    with ThreadPoolExecutor(8) as threads:
        subjects = set(threads.map(lambda _: ours.locks, range(64)))
    assert subjects == {ours.locks}


def ours_after(code: str, *others: str) -> set[str]:
    """The modules of the package, and those that begin as one of `others`, that `code` imports."""
    begins = ("faststream_sqlbroker", *others)
    show = f"import sys; print(*(m for m in sys.modules if m.startswith({begins})))"
    command = [sys.executable, "-c", f"{code}\n{show}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(faststream_sqlbroker, "Nothing")
