"""Skip tests of Spark where Java or a JDBC driver cannot be installed."""

import os

import pytest

from tools.java import DRIVERS, install_spark

__all__ = ("DRIVERS", "need_spark")


def need_spark(*kinds: str) -> None:
    """Install Java and the drivers of `kinds`; skip without them, fail in CI."""
    reason = install_spark(*kinds)
    if reason is None:
        return
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)
