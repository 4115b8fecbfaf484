"""Here the tables are made as users make them."""

import pytest

from faststream_sqlbroker.database.server import DatabaseServer

AS_USERS = DatabaseServer.create_tables
"""Read while tests are collected, before a fixture of the whole run takes its place."""


@pytest.fixture(autouse=True)
def _slow_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DatabaseServer, "create_tables", AS_USERS)


@pytest.fixture
def new_tables() -> None:
    """For tests that read what the database counts of a table: no other test had these before."""
