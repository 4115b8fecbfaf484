"""What differs between the databases, for readers: one class each."""

from faststream_sqlbroker.spark.address import Address
from faststream_sqlbroker.spark.databases.base import ArchiveDatabase
from faststream_sqlbroker.spark.databases.mysql import MySQL
from faststream_sqlbroker.spark.databases.postgresql import PostgreSQL
from faststream_sqlbroker.spark.databases.sqlite import SQLite

__all__ = ("ArchiveDatabase", "database_of")

_CLASSES: dict[str, type[ArchiveDatabase]] = {
    "postgresql": PostgreSQL,
    "mysql": MySQL,
    "sqlite": SQLite,
}


def database_of(address: Address) -> ArchiveDatabase:
    """The class for the database at `address`."""
    return _CLASSES[address.kind](address)
