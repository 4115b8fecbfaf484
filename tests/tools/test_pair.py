"""The private pair of PostgreSQL servers: when its standby counts, and what a takeover loses."""

import os
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tools.pair import Pair, pair
from tools.private import CannotStartError


@pytest.fixture
def servers() -> Iterator[Pair]:
    with ExitStack() as stack:
        try:
            made = stack.enter_context(pair())
        except CannotStartError as error:
            if os.environ.get("CI"):
                pytest.fail(str(error))
            pytest.skip(str(error))
        yield made


def test_a_standby_that_gets_nothing_does_not_count_as_following(servers: Pair) -> None:
    servers.follow()
    servers.hold()
    with pytest.raises(CannotStartError, match="does not follow"):
        servers.follow(patience=0.5)


def test_a_takeover_loses_what_had_not_arrived_and_the_old_primary_follows(servers: Pair) -> None:
    old = servers.primary
    old.execute("CREATE TABLE orders (n int)", "INSERT INTO orders VALUES (2)")
    servers.follow()
    servers.hold()
    old.execute("INSERT INTO orders VALUES (3)")
    old.kill()
    assert not old.runs
    servers.promote()
    servers.rejoin()
    assert servers.standby is old
    for node in (servers.primary, servers.standby):
        assert node.execute("SELECT n FROM orders") == [(2,)]
