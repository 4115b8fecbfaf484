"""SQLite's file is deleted or replaced under a broker: nothing is written into the old one."""

import shutil
from pathlib import Path

import pytest
from sqlalchemy import make_url

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.core.rows import NewMessage
from faststream_sqlbroker.exceptions import TransientStoreError
from tests.contract.conftest import Bench

pytestmark = pytest.mark.parametrize("database", ["sqlite"], indirect=True)
SUFFIXES = ("", "-wal", "-shm")


@pytest.fixture
async def path(bench: Bench, database_url: str) -> Path:
    """The file, which holds one message and which no connection but those of the pool has open."""
    await bench.put()
    async with bench.store.engine.connect() as connection:
        await connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
    return Path(make_url(database_url).database or "")


def move(path: Path, to: Path) -> None:
    for suffix in SUFFIXES:
        if (there := Path(f"{path}{suffix}")).exists():
            there.replace(f"{to}{suffix}")


async def test_a_deleted_file_is_noticed_until_it_is_back(bench: Bench, path: Path) -> None:
    store = bench.store
    kept = path.with_suffix(".kept")
    assert await store.access.ping(60.0)
    move(path, kept)
    assert not await store.access.ping(60.0)
    with pytest.raises(TransientStoreError, match="was deleted or moved: put it back"):
        await store.insert([NewMessage("q", b"lost")])
    assert not path.exists(), "an empty file was made in its place"
    move(kept, path)
    assert await store.access.ping(60.0)
    await store.insert([NewMessage("q", b"kept")])
    assert await bench.count() == 2


async def test_a_replaced_file_is_used_from_then_on(bench: Bench, path: Path) -> None:
    """An operator puts a backup in the file's place."""
    backup = path.with_suffix(".backup")
    shutil.copy(path, backup)
    await bench.put()
    assert await bench.count() == 2
    for suffix in SUFFIXES:
        Path(f"{path}{suffix}").unlink(missing_ok=True)
    backup.replace(path)
    [written] = await bench.store.insert([NewMessage("q", b"after")])
    assert [row["payload"] for row in await bench.rows() if row["id"] == written] == [b"after"]
    assert await bench.count() == 2
    assert await bench.store.access.ping(60.0)


@pytest.mark.parametrize("deleted", [True, False])
async def test_a_broker_that_has_stopped_makes_a_new_file(
    database_url: str, tmp_path: Path, deleted: bool
) -> None:
    """Its engine's connections are closed, so none of them has the old one."""
    path = tmp_path / "other.db"
    broker = SqlBroker(f"sqlite+aiosqlite:///{path}")
    for _ in range(2):
        await broker.create_tables()
        await broker.start()
        await broker.publish("x", "q")
        await broker.stop()
        if deleted:
            for suffix in SUFFIXES:
                Path(f"{path}{suffix}").unlink(missing_ok=True)


async def test_a_database_in_memory_has_no_file(database_url: str) -> None:
    """SQLite gives it a name like a path."""
    broker = SqlBroker("sqlite+aiosqlite:///file:/never-there?vfs=memdb&uri=true")
    await broker.create_tables()
    await broker.start()
    await broker.publish("x", "q")
    assert await broker.ping(60.0)
    await broker.stop()
