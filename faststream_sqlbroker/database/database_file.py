"""SQLite: notice that the database's file was deleted or replaced.

A connection goes on with the file that it has opened, even after that has lost its name. What it
writes there is lost when the process ends.
"""

import os
from contextlib import suppress
from typing import Any

from sqlalchemy import Engine, event
from sqlalchemy.ext.asyncio import AsyncConnection

from faststream_sqlbroker.exceptions import TransientStoreError

Identity = tuple[int, int]
"""Device and inode."""
_OPENED = "sqlbroker_file"
"""The key in a connection's `info` with the identity of the file that it has opened."""


class DatabaseFile:
    """The file of one engine; nothing is watched where the database has none."""

    def __init__(self) -> None:
        self._path = ""

    def watch(self, engine: Engine) -> None:
        """Record which file each new connection of `engine` opens, until its pool is disposed of:
        no connection is then left that has another one.
        """
        event.listen(engine, "connect", self._opened)
        event.listen(engine, "engine_disposed", self._forget)

    def identity(self) -> Identity | None:
        """Which file has the name now; None if that is not known.

        Raises:
            TransientStoreError: there is none. A new connection would create an empty one.
        """
        if not self._path:
            return None
        try:
            found = os.stat(self._path)  # noqa: PTH116 - a Path takes longer than the look
        except FileNotFoundError as error:
            raise TransientStoreError(
                f"the database file {self._path!r} was deleted or moved: put it back, or dispose "
                "of the engine in each process; until then nothing is read or written"
            ) from error
        except OSError:
            return None
        return found.st_dev, found.st_ino

    @staticmethod
    def is_other(connection: AsyncConnection, identity: Identity | None) -> bool:
        """Whether `connection` has opened another file than that of `identity`."""
        sync: Any = connection.sync_connection
        return identity is not None and sync.info.get(_OPENED, identity) != identity

    def _opened(self, dbapi_connection: Any, record: Any) -> None:
        # In memory there is none, whatever name the connection tells.
        if not self._path and os.path.exists(path := _path_of(dbapi_connection)):  # noqa: PTH110
            self._path = path
        with suppress(TransientStoreError):
            record.info[_OPENED] = self.identity()

    def _forget(self, _engine: Engine) -> None:
        self._path = ""


def _path_of(dbapi_connection: Any) -> str:
    """The absolute path; empty in memory."""
    cursor = dbapi_connection.cursor()
    cursor.execute("PRAGMA database_list")
    paths = {name: path for _, name, path in cursor.fetchall()}
    cursor.close()
    return str(paths["main"] or "")
