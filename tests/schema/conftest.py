"""Here the tables are made as users make them."""

import pytest

from faststream_sqlbroker.database import server
from faststream_sqlbroker.schema.migrate import create_all


@pytest.fixture(autouse=True)
def _slow_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "create_all", create_all)
