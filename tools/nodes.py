"""Nodes of private clusters of MariaDB or MySQL: what Galera and group replication share."""

import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import pymysql

from tools.private import CannotStartError, Process

TIMEOUT = 60.0
"""Seconds in which a node that accepts connections must be part of its cluster."""
PROBES = ("CREATE DATABASE probes", "CREATE TABLE probes.probe (number bigint PRIMARY KEY)")
"""Statements of a new cluster, for `follow`."""


class Node(Process):
    """A server of a cluster, whose root needs no password.

    Start it in a thread that lives as long as the node: the server ends with the thread.
    """

    def execute(self, *statements: str, timeout: float = 10.0) -> list[tuple[object, ...]]:
        """Run `statements` in a session of their own, each by itself; the rows of the last one.

        Raises:
            pymysql.Error: one was refused, or got no answer within `timeout` seconds.
        """
        with (
            pymysql.connect(
                host="127.0.0.1",
                port=self.port,
                user="root",
                autocommit=True,
                connect_timeout=5,
                read_timeout=timeout,
            ) as session,
            session.cursor() as cursor,
        ):
            for statement in statements:
                cursor.execute(statement)
            return list(cursor.fetchall())

    def wait_until(self, check: Callable[[], bool], what: str, timeout: float = TIMEOUT) -> None:
        """Wait until `check` is true; an error of the server counts as false.

        Raises:
            CannotStartError: it is not within `timeout` seconds; with `what` it then does not do.
        """
        deadline = time.monotonic() + timeout
        while True:
            try:
                if check():
                    return
            except pymysql.Error:
                pass
            if time.monotonic() > deadline:
                raise CannotStartError(f"{self._folder.name} {what}: see {self.log}")
            time.sleep(0.05)


def wait_until_writable(node: Node) -> int:
    """Wait until a row can be written to `node`; its number.

    Raises:
        CannotStartError: it takes no writes in time.
    """
    number = random.randrange(2**62)  # noqa: S311
    statement = f"INSERT INTO probes.probe VALUES ({number})"

    def is_written() -> bool:
        with suppress(pymysql.IntegrityError):  # an earlier try, of which the answer was lost
            node.execute(statement)
        return True

    node.wait_until(is_written, "takes no writes")
    return number


def follow(writer: Node, followers: Sequence[Node]) -> None:
    """Wait until all `followers` follow: a row that is written to `writer` now has arrived there.

    Raises:
        CannotStartError: one does not in time.
    """
    number = wait_until_writable(writer)
    query = f"SELECT count(*) FROM probes.probe WHERE number = {number}"

    def has_arrived(node: Node) -> bool:
        return node.execute(query) == [(1,)]

    for node in followers:
        node.wait_until(partial(has_arrived, node), "does not follow")
