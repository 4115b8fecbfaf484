"""A transaction of one statement, which can also run in autocommit on the driver's connection."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from sqlalchemy import Connection, TextClause

T = TypeVar("T")
T2 = TypeVar("T2")

Work = Callable[[Connection], T]
"""The body of a transaction, which the caller begins and commits."""


@dataclass(slots=True)
class Query(Generic[T]):
    """A statement with binds and a reader of the rows.

    Called with a connection it runs through SQLAlchemy like any other work of a transaction;
    `database.driver` may send it on the driver's own connection instead, without BEGIN and COMMIT.
    """

    clause: TextClause
    binds: dict[str, Any]
    read: Callable[[Iterable[Sequence[Any]]], T]

    def __call__(self, connection: Connection) -> T:
        """Run the statement in the transaction of `connection`."""
        return self.read(connection.execute(self.clause, self.binds))

    def map_result(self, convert: Callable[[Any], T2]) -> "Query[T2 | None]":
        """Return the same statement with `convert` applied to the result; None stays None."""

        def read_rows(rows: Iterable[Sequence[Any]]) -> T2 | None:
            result = self.read(rows)
            return None if result is None else convert(result)

        return Query(self.clause, self.binds, read_rows)
