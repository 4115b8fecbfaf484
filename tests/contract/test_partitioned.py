"""The contract's tests of the archive, once more with an archive in partitions."""

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker import SqlBrokerSchemaConfig
from faststream_sqlbroker.database.store import Store
from faststream_sqlbroker.schema.config import PARTITIONS_AHEAD
from faststream_sqlbroker.schema.partitions import convert_archive
from faststream_sqlbroker.schema.tables import build_tables
from tests.contract.conftest import Bench
from tests.contract.test_dead_letters import (
    test_a_group_can_be_listed,
    test_errors_with_one_fingerprint_are_one_group,
)
from tests.contract.test_jobs import (
    batch,
    test_a_message_that_fails_again_is_not_met_again,
    test_a_replay_publishes_each_once_for_its_name,
    test_all_that_match_are_cancelled_and_come_back,
    test_an_undone_replay_can_be_made_again,
    test_dead_letters_are_redriven_under_their_ids,
)
from tests.contract.test_message_lists import (
    limit,
    test_one_message_is_found_live_and_archived,
    test_the_archive_is_listed_from_the_last_archived,
)
from tests.contract.test_repairs import test_a_message_that_waits_is_cancelled_into_the_archive
from tests.contract.test_settle import (
    test_a_batch_of_all_outcomes_is_settled_at_once,
    test_a_late_settle_after_a_lost_lease_changes_nothing,
    test_a_settle_twice_counts_once,
    test_ack_archives_with_counters_and_times,
)
from tests.contract.test_units import test_a_unit_is_written_with_its_answers

pytestmark = [
    pytest.mark.capability("an archive in partitions of time (`archive_partitions`)"),
    pytest.mark.parametrize("database", ["postgresql"], indirect=True),
]
DAYS = SqlBrokerSchemaConfig(archive_partitions="day")
TABLES = build_tables(DAYS)
AGAIN = (
    batch,
    limit,
    test_a_batch_of_all_outcomes_is_settled_at_once,
    test_a_group_can_be_listed,
    test_a_late_settle_after_a_lost_lease_changes_nothing,
    test_a_message_that_fails_again_is_not_met_again,
    test_a_message_that_waits_is_cancelled_into_the_archive,
    test_a_replay_publishes_each_once_for_its_name,
    test_a_settle_twice_counts_once,
    test_a_unit_is_written_with_its_answers,
    test_ack_archives_with_counters_and_times,
    test_all_that_match_are_cancelled_and_come_back,
    test_an_undone_replay_can_be_made_again,
    test_dead_letters_are_redriven_under_their_ids,
    test_errors_with_one_fingerprint_are_one_group,
    test_one_message_is_found_live_and_archived,
    test_the_archive_is_listed_from_the_last_archived,
)
"""What pytest finds here, too."""


@pytest.fixture
async def store(engine: AsyncEngine, database: str) -> Store:
    """Its archive was converted; rows of today are in a partition of their own."""
    plain = Store(engine, build_tables(SqlBrokerSchemaConfig()))
    await plain.server.create_tables()
    alone = engine.execution_options(isolation_level="AUTOCOMMIT")
    async with alone.connect() as connection:
        assert await connection.run_sync(convert_archive, DAYS)
        # Nothing is in the first partition yet, so it may end earlier.
        for step in (
            "DETACH PARTITION message_archive_p0",
            "ATTACH PARTITION message_archive_p0 FOR VALUES FROM (MINVALUE) TO ('2020-01-01')",
        ):
            await connection.execute(text(f"ALTER TABLE message_archive {step}"))
    store = Store(engine, TABLES)
    await store.server.setup()
    while await store.partitions.add():
        pass
    return store


async def test_partitions_are_there(bench: Bench) -> None:
    count = "SELECT count(*) FROM pg_inherits WHERE inhparent = to_regclass('message_archive')"
    async with bench.store.engine.connect() as connection:
        assert await connection.scalar(text(count)) == 2 + PARTITIONS_AHEAD + 1
    assert await bench.store.server.find_differences() == []
