"""Files of YAML, and a broker over an empty database."""

from collections.abc import Callable
from pathlib import Path

import pytest

from faststream_sqlbroker.exceptions import ConfigError
from tests.faststream.conftest import broker, heard, logger, look

__all__ = ("broker", "heard", "logger", "look")

on_sqlite = pytest.mark.parametrize("database", ["sqlite"], indirect=True)
SERVICE = """\
broker:
  url: sqlite+aiosqlite:///service.db
"""
"""The least file."""


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a file and gives its path."""

    def write(text: str) -> Path:
        path = tmp_path / "service.yaml"
        path.write_text(text)
        return path

    return write


def told(error: ConfigError) -> list[str]:
    """The mistakes as `line:column where: text`."""
    return [f"{m.line}:{m.column} {m.where}: {m.text}" for m in error.mistakes]
