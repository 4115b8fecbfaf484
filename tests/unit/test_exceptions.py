"""Errors of the package are FastStream's, too: `except` of those catches ours."""

import ast
from pathlib import Path

import pytest
from faststream.exceptions import FastStreamException, FeatureNotSupportedException
from faststream.exceptions import SetupError as FastStreamSetupError

from faststream_sqlbroker import SetupError, SqlBroker, exceptions

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "faststream_sqlbroker"
ERRORS = [value for value in vars(exceptions).values() if isinstance(value, type)]
OURS = [error for error in ERRORS if error.__module__ == exceptions.__name__]
BELOW_THE_SHELL = (
    "core",
    "schema",
    "database",
    "flow",
    "admin",
)


@pytest.mark.parametrize("error", OURS, ids=lambda error: error.__name__)
def test_each_error_is_of_faststream(error: type[Exception]) -> None:
    assert issubclass(error, exceptions.SqlBrokerError)
    assert issubclass(error, FastStreamException)


def test_setup_errors_are_caught_as_those_of_faststream() -> None:
    with pytest.raises(FastStreamSetupError, match="engine must be") as caught:
        SqlBroker(5)  # type: ignore[arg-type]
    assert isinstance(caught.value, SetupError)
    assert isinstance(caught.value, ValueError)
    broker = SqlBroker("sqlite+aiosqlite:///never-made.db")
    with pytest.raises(FastStreamSetupError, match="max_workers"):
        broker.subscriber("q", max_workers=0)


async def test_unsupported_features_raise_the_error_of_other_brokers() -> None:
    broker = SqlBroker("sqlite+aiosqlite:///never-made.db")
    with pytest.raises(FeatureNotSupportedException):
        await broker.subscriber("q", ordered=True).get_one()


def test_only_the_errors_import_faststream_below_the_shell() -> None:
    """For base classes, and from one module of it."""
    folders = [*(PACKAGE / name for name in BELOW_THE_SHELL), ROOT / "pyspark_sqlbroker"]
    paths = [path for folder in folders for path in folder.rglob("*.py")]
    paths.append(PACKAGE / "exceptions.py")
    found = {
        (path.name, module)
        for path in paths
        for node in ast.walk(ast.parse(path.read_text()))
        for module in _modules(node)
        if module.partition(".")[0] == "faststream"
    }
    assert found == {("exceptions.py", "faststream.exceptions")}


def _modules(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
