"""Here the tables are made as users make them."""

import pytest

from faststream_sqlbroker.schema.migrate import create_all
from faststream_sqlbroker.store import store


@pytest.fixture(autouse=True)
def _slow_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "create_all", create_all)
