"""Faults inside of the transactions that handlers work in."""

from sqlalchemy import make_url

from tests.faults.cell import Cell
from tests.faults.faults.fault import SERVERS, fault
from tests.proxy import Proxy


async def quick_search(cell: Cell) -> None:
    """PostgreSQL looks for a deadlock after a second, unless it is told; the others at once."""
    if cell.store.dialect_name == "postgresql":
        name = make_url(cell.straight).database
        await cell.execute(f"ALTER DATABASE {name} SET deadlock_timeout = '50ms'")


@fault(
    "deadlocks that handlers catch",
    short=("mariadb",),
    databases=SERVERS,
    prepare=quick_search,
    queues=("catching", "catching", "batch", "plain"),
)
async def caught(cell: Cell, _proxy: Proxy | None) -> None:
    """They repeat the statement and go on, as if the transaction were still there."""
    await cell.publish(10)


@fault("transactions that handlers end", short=(), queues=("ending", "ending", "tx", "plain"))
async def ended(cell: Cell, _proxy: Proxy | None) -> None:
    """By ROLLBACK, by COMMIT, and by what commits without a word: DDL on MySQL and MariaDB."""
    await cell.publish(10)
