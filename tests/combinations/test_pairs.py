"""Every pair of features works, or is refused with an error that says why."""

from collections import Counter

import pytest
from sqlalchemy import create_engine, make_url
from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker.exceptions import PublishError
from tests.combinations.covering import AT_A_PUBLISH, covering, pairs_of, refused
from tests.combinations.features import Case, case_of, pairs
from tests.combinations.page import PAGE, updated
from tests.combinations.running import BAD, GOOD, Row, Running, Seen

PARTS = 4
SYNCHRONOUS = {"sqlite": "sqlite", "postgresql": "postgresql+psycopg"}
"""Drivers of `SqlProducer`."""


def running(case: Case, engine: AsyncEngine) -> Running:
    """`case` on the database of `engine`."""
    url = engine.url.set(drivername=SYNCHRONOUS[engine.dialect.name])
    return Running(case, engine, create_engine(make_url(url)))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("database", ["sqlite", "postgresql"], indirect=True)
async def test_every_other_pair_works(engine: AsyncEngine, database: str, part: int) -> None:
    """A test broker has SQLite, whatever the broker's database is."""
    mistakes: dict[str, list[str]] = {}
    for case in covering()[part::PARTS]:
        if database == "sqlite" or case.broker == "database":
            of_case = running(case, engine)
            seen = await of_case(lambda seen, case=case: not compared(case, seen))
            mistakes[str(case)] = compared(case, seen)
            of_case.synchronous.dispose()
            await of_case.wipe()
    assert {case: found for case, found in mistakes.items() if found} == {}


def compared(case: Case, seen: Seen) -> list[str]:
    """What is not as it should be."""
    queue = "next" if case.mode == "forward_to" else "in"
    failed = Row(queue, BAD, "COMPLETED" if case.mode == "ACK_FIRST" else "FAILED")
    archived, waiting = [Row(queue, GOOD, "COMPLETED"), failed], []
    if case.dead_letters == "no archive":
        archived = []
    elif case.dead_letters == "dead_letter_queue":
        archived.remove(failed)
        waiting = [Row("dead", BAD, "PENDING")]
    answers = [row for row in (*seen.waiting, *seen.archived) if row.queue == "answers"]
    to_kafka = case.answer == "relay to Kafka"
    expected = {
        "runs": (seen.runs, Counter({GOOD: 1, BAD: case.attempts()})),
        "archived": (
            Counter(row for row in seen.archived if row.queue != "answers"),
            Counter(archived),
        ),
        "waiting": (
            [row for row in seen.waiting if row.queue not in {"answers", "joined"}],
            waiting,
        ),
        "answers": ([row.body for row in answers], ["answer"] * (case.answers() * (not to_kafka))),
        "relayed": (seen.relayed, ["answer"] * to_kafka),
        "work": (seen.work, [GOOD] * case.mode.startswith("transactional")),
        "joined": (
            [row.body for row in seen.waiting if row.queue == "joined"],
            [GOOD] * 2 * (case.mode == "transactional, publishes"),
        ),
    }
    found = [f"{name}: {was}, not {must}" for name, (was, must) in expected.items() if was != must]
    # A batch may have both messages; a test broker runs a subscriber of the answers, too.
    least = 1 if case.mode == "batch" else seen.runs.total()
    most = seen.runs.total() + case.answers()
    if case.middleware != "no middleware" and not least <= seen.watched["run"] <= most:
        found.append(f"the middleware saw {seen.watched['run']} runs of {least} to {most}")
    return found


@pytest.mark.parametrize("pair", AT_A_PUBLISH, ids=", ".join)
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_pair_that_is_refused_at_a_publish(
    engine: AsyncEngine, pair: tuple[str, str]
) -> None:
    case = case_of(*pair, *(["TestSqlBroker"] if "TestSqlBroker" not in pair else []))
    with pytest.raises(PublishError):
        await running(case, engine)()


def test_every_pair_is_refused_or_among_the_cases() -> None:
    covered = set().union(*(pairs_of(case.values()) for case in covering()))
    assert set(pairs()) - covered == set(refused())


def test_the_page_has_the_table() -> None:
    page = PAGE.read_text()
    assert updated(page) == page, "run python -m tests.combinations.page"
