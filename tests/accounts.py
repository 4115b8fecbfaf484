"""Users of a test's database with the rights that a test gives them, and no others."""

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import URL, Engine, create_engine, make_url, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

NUMBERS = itertools.count()
PASSWORD = "Plain-1"
SYNCHRONOUS = {
    "postgresql": "postgresql+psycopg",
    "mariadb": "mariadb+pymysql",
    "mysql": "mysql+pymysql",
}


class Account:
    """One user; `owner` runs statements as who has made the database."""

    def __init__(self, owner: Engine, url: URL) -> None:
        self.owner = owner
        self.url = url
        self.name = f"sqlbroker_{os.getpid()}_{next(NUMBERS)}"
        self.postgresql = owner.dialect.name == "postgresql"
        self.who = self.name if self.postgresql else f"'{self.name}'@'%'"

    def execute(self, *statements: str) -> None:
        """Run `statements` as the owner; `{who}` is the user."""
        with self.owner.begin() as connection:
            for statement in statements:
                connection.execute(text(statement.replace("{who}", self.who).replace(":", "\\:")))

    def create(self) -> None:
        """Make the user, who may connect and nothing else."""
        if self.postgresql:
            self.execute(f"CREATE ROLE {{who}} LOGIN PASSWORD '{PASSWORD}'")
            return
        # Without any right on it, the database cannot be connected to.
        self.execute(
            f"CREATE USER {{who}} IDENTIFIED BY '{PASSWORD}'",
            "CREATE TABLE something_else (id INT)",
            "GRANT SELECT ON something_else TO {who}",
        )

    def drop(self) -> None:
        """Remove the user and its rights."""
        if self.postgresql:
            self.execute("DROP OWNED BY {who}", "DROP ROLE {who}")
        else:
            self.execute("DROP USER {who}")

    def engine(self) -> AsyncEngine:
        """An engine whose connections are the user's."""
        return create_async_engine(self.url.set(username=self.name, password=PASSWORD))

    def try_as(self, *statements: str) -> list[str]:
        """Run each of `statements` as the user, and undo it; those that were refused for a missing
        right."""
        url = self.url.set(
            drivername=self.owner.url.drivername, username=self.name, password=PASSWORD
        )
        engine = create_engine(url, poolclass=NullPool)
        refused = []
        for statement in statements:
            with engine.connect() as connection:
                try:
                    connection.execute(text(statement.replace(":", "\\:")))
                except Exception as error:
                    orig = getattr(error, "orig", None)
                    code = getattr(orig, "sqlstate", None) or (orig is not None and orig.args[0])
                    if code not in {"42501", 1142, 1143, 1044, 1227}:
                        raise
                    refused.append(statement)
        return refused


@contextmanager
def account(database_url: str) -> Iterator[Account]:
    """A user of the database at `database_url`, until the context ends."""
    url = make_url(database_url)
    owner = create_engine(
        url.set(drivername=SYNCHRONOUS[url.get_backend_name()]), poolclass=NullPool
    )
    user = Account(owner, url)
    user.create()
    try:
        yield user
    finally:
        user.drop()
