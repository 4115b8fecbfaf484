"""What `broker.admin.policies` reads of a crowded queue: no more messages than it counts."""

import asyncio
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, text

from faststream_sqlbroker.core.policies import Debounce, Throttle
from faststream_sqlbroker.core.policy_waits import MAX_SCANNED
from faststream_sqlbroker.core.status import build_description
from faststream_sqlbroker.database.explain.explanations import Explanations
from faststream_sqlbroker.database.parts.live_subscribers import renew_registrations
from tests.helpers import MYSQL
from tests.plans.conftest import DUE, TABLES, DatabaseOf
from tests.plans.test_mysql import reads
from tests.plans.test_postgresql import check, explain

NOW = 1_893_456_000_000_000
"""Microseconds since 1970, in 2030: of the statements that are explained by themselves."""
postgresql = pytest.mark.parametrize("database", ["postgresql"], indirect=True)


def explanations_on(connection: Connection) -> Explanations:
    database: Any = DatabaseOf(connection)
    return Explanations(database)


def register(connection: Connection, **options: Any) -> None:
    """A live subscriber of the crowded queue."""
    told = build_description(
        queues=["q"],
        max_workers=1,
        policies=[Debounce("1s"), Throttle(1, "1h")],
        paused=False,
        stopping=False,
        **options,
    )
    renew_registrations(connection, TABLES.policy_state, {"w": told}, {"w"}, 3600.0)


def forget(connection: Connection) -> None:
    """The crowd is again as other tests expect it."""
    connection.execute(TABLES.policy_state.delete())


@postgresql
@pytest.mark.parametrize(
    ("name", "index"), [("policy_waits_due", "ready"), ("policy_waits_later", "ready")]
)
def test_a_look_reads_a_range_up_to_its_limit(crowded: Engine, name: str, index: str) -> None:
    with crowded.connect() as connection:
        plan = explain(connection, name, queue="q", priority=1, now=NOW, size=MAX_SCANNED)
        check(plan, indexes={f"message_{index}"}, buffers=2 * MAX_SCANNED)


@postgresql
def test_the_first_of_a_key_is_one_step(crowded: Engine) -> None:
    with crowded.connect() as connection:
        connection.execute(text("UPDATE message SET key = 'k' WHERE queue = 'q' AND id % 50 = 0"))
        rows = '[{"k": "k"}, {"k": "none"}]'
        plan = explain(connection, "policy_firsts", queue="q", rows=rows)
        check(plan, indexes={"message_key"}, buffers=40)


@pytest.mark.parametrize("database", MYSQL, indirect=True)
@pytest.mark.parametrize("ordered", [False, True])
def test_mysql_reads_as_little(crowded: Engine, ordered: bool) -> None:
    some = "WHERE queue = 'q' AND id % 7 = 0"
    with crowded.begin() as connection:
        register(connection, ordered=ordered)
        connection.execute(text(f"UPDATE message SET `key` = 'k' {some}"))
    with crowded.connect() as connection:
        explanations = explanations_on(connection)
        asyncio.run(explanations.list_policied_queues("q", None, 1))  # what is read once
        connection.rollback()
        with reads(connection, at_most=3 * (DUE + MAX_SCANNED) + 300):
            [queue] = asyncio.run(explanations.list_policied_queues("q", None, 1))
        assert queue.due == DUE
    with crowded.begin() as connection:
        connection.execute(text(f"UPDATE message SET `key` = NULL {some}"))
        forget(connection)


@pytest.mark.parametrize("database", ["postgresql", *MYSQL], indirect=True)
def test_a_queue_costs_few_statements(crowded: Engine) -> None:
    with crowded.begin() as connection:
        register(connection, ordered=True)
    seen: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        seen.append(statement)

    with crowded.connect() as connection:
        event.listen(connection, "before_cursor_execute", note)
        [queue] = asyncio.run(explanations_on(connection).list_policied_queues(None, None, 100))
        assert queue.due == DUE
    # Two for each of the three priorities; the time, the subscribers, the pairs, the policies.
    assert len(seen) <= 16, seen
    with crowded.begin() as connection:
        forget(connection)
