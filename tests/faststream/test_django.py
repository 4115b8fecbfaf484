"""`SqlProducer` in a Django project: messages are part of `transaction.atomic`."""

import asyncio
import json
from pathlib import Path

import pytest
from sqlalchemy import make_url

from faststream_sqlbroker import SqlBroker
from tests.faststream.conftest import Look
from tests.forked import finished
from tests.plans.conftest import SYNC_DRIVERS

SHOP = Path(__file__).parent / "django_shop.py"


@pytest.mark.capability("`SqlProducer`: publishing without a broker, Django too")
async def test_messages_are_part_of_djangos_transactions(
    broker: SqlBroker, look: Look, database: str, database_url: str
) -> None:
    url = make_url(database_url)
    name = url.get_backend_name()
    url = url.set(drivername=SYNC_DRIVERS.get(name, name))
    done = await asyncio.to_thread(finished, str(SHOP), url.render_as_string(hide_password=False))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found == {
        "first": True,
        "refused": False,
        "duplicate": None,
        "batch": [True, True, True],
        "whole": True,
        "autocommit": True,
        "broken": True,
        "own": True,
        "checked": True,
        "orders": ["after a duplicate", "tea é"],
    }
    rows = await look.rows()
    tea = json.dumps({"id": 1, "item": "tea é"}, ensure_ascii=False, separators=(",", ":"))
    threads = [] if database == "sqlite" else [b"thread"]
    assert [row["payload"] for row in rows if row["queue"] == "orders"] == [
        tea.encode(),
        b"outer",
        *threads,
    ]
    assert [row["payload"] for row in rows if row["queue"] == "batch"] == [b"a", b"b", b"c"]
