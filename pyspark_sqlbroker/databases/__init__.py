"""Differences between the databases, for readers: one class each."""

from pyspark_sqlbroker.address import Address
from pyspark_sqlbroker.databases.base import ArchiveDatabase
from pyspark_sqlbroker.databases.mysql import MySQL
from pyspark_sqlbroker.databases.postgresql import PostgreSQL
from pyspark_sqlbroker.databases.sqlite import SQLite

__all__ = ("ArchiveDatabase", "get_database")

_CLASSES: dict[str, type[ArchiveDatabase]] = {
    "postgresql": PostgreSQL,
    "mysql": MySQL,
    "sqlite": SQLite,
}


def get_database(address: Address) -> ArchiveDatabase:
    """Return the dialect of the database at `address`."""
    return _CLASSES[address.kind](address)
