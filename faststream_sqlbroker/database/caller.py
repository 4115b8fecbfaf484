"""Checks that a caller's connection leads to the broker's database."""

from sqlalchemy import Connection, Engine

from faststream_sqlbroker.exceptions import PublishError
from faststream_sqlbroker.schema.types import MYSQL


def check_same_database(connection: Connection | None, engine: Engine) -> None:
    """Refuse a connection that is closed, or that leads to another database than `engine`.

    Raises:
        PublishError: the connection is such a one; the text has both URLs without passwords.
    """
    if connection is None or connection.closed:
        msg = "the given connection is closed; publish while its transaction is open"
        raise PublishError(msg)
    if connection.engine.pool is engine.pool:
        return
    theirs = connection.engine.url
    ours = engine.url
    alike = _family(theirs.get_backend_name()) == _family(ours.get_backend_name())
    same_place = (theirs.host, theirs.port, theirs.database) == (
        ours.host,
        ours.port,
        ours.database,
    )
    if not (alike and same_place):
        msg = (
            f"the given connection leads to {theirs.render_as_string()!r}, but the broker's tables "
            f"are in {ours.render_as_string()!r}; use a connection to the broker's database"
        )
        raise PublishError(msg)


def _family(backend: str) -> str:
    return MYSQL[0] if backend in MYSQL else backend
