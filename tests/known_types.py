"""PostgreSQL's own types of arrays, about which asyncpg asks the server on each connection.

The question takes a server 4 ms, and a connection asks two: half of what the server does for a
small test. The answer is always the same.
"""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from asyncpg.connection import Connection

FIRST_OF_USERS = 16_384
"""The lowest number of a type that is not PostgreSQL's own."""


def keep_types() -> None:
    """Let each question be asked once, by this process and its forks."""
    method = "_introspect_types"
    ask = getattr(Connection, method)
    answers: dict[frozenset[int], Any] = {}

    async def find(connection: Any, numbers: Iterable[int], timeout: float) -> Any:
        asked = frozenset(numbers)
        if max(asked) >= FIRST_OF_USERS:
            return await ask(connection, asked, timeout)
        if asked not in answers:
            answers[asked], statement = await ask(connection, asked, timeout)
            return answers[asked], statement
        # asyncpg would prepare its own statement anew after one without a name.
        return answers[asked], SimpleNamespace(name="kept")

    setattr(Connection, method, find)
