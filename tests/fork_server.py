"""The last module that the fork server imports: it does what each fork would do anew."""

import importlib
import pkgutil

from sqlalchemy.ext.asyncio import create_async_engine

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.subscriber.pipeline import fingerprints
from faststream_sqlbroker.subscriber.pipeline.fingerprints import KNOWN
from tests import garbage, quick_tables
from tests.known_types import keep_types

PARTS = ("adapter", "broker", "core", "database", "flow", "publisher", "subscriber")
"""Packages whose modules are imported late, where a process uses them; most of its start would be
these imports."""
URLS = (
    "sqlite+aiosqlite:///never.db",
    "postgresql+asyncpg://nowhere/none",
    "mysql+aiomysql://nowhere/none",
    "mariadb+aiomysql://nowhere/none",
)

for part in PARTS:
    package = importlib.import_module(f"faststream_sqlbroker.{part}")
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
quick_tables.keep_built()
keep_types()
for url in URLS:
    # Never started: it connects to nothing.
    ready = SqlBroker(create_async_engine(url), logger=None)
    ready._store.tables.for_dialect(ready.engine.dialect.name)
# Each process that subscribes compares FastStream's functions with those that are known.
for group in KNOWN:
    fingerprints.find_unknown(group)
garbage.look_seldom()
