"""The compiled pipeline, whatever the environment of the tests asks for."""

import pytest

from faststream_sqlbroker.subscriber.pipeline.choice import VARIABLE


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask for nothing."""
    monkeypatch.delenv(VARIABLE, raising=False)
