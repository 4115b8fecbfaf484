"""The readers' names: users have them by `faststream_sqlbroker.spark`, Spark by its own module."""

import pickle
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import pyspark_sqlbroker
from faststream_sqlbroker import spark
from faststream_sqlbroker.spark import analytics
from pyspark_sqlbroker import analytics as readers_analytics

ROOT = Path(__file__).parent.parent.parent
IMPORT = re.compile(
    r"^from (faststream_sqlbroker\.spark[\w.]*) import (?:\(([^)]+)\)|(.+))$", re.MULTILINE
)
DOTTED = re.compile(r"\bfaststream_sqlbroker\.spark(?:\.\w+)*")


def printed(code: str) -> str:
    """What `code` prints in a process of its own."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.parametrize("name", ["pyspark_sqlbroker", "faststream_sqlbroker.spark"])
def test_spark_is_imported_only_where_it_is_used(name: str) -> None:
    """Half a gigabyte: neither the broker nor the package's own import needs it."""
    told = printed(
        "import sys, faststream_sqlbroker, faststream_sqlbroker.cli;"
        f"import {name} as s;"
        "assert 'pyspark' not in sys.modules and 'typer' not in sys.modules;"
        "sys.modules['pyspark'] = None;"
        "from faststream_sqlbroker import MissingExtraError\n"
        "try: s.read_archive\n"
        "except MissingExtraError as error: print(error)\n"
    )
    assert "pip install 'sqlbroker[spark]'" in told


def test_reading_the_archive_without_spark_imports_none(tmp_path: Path) -> None:
    told = printed(
        "import sys; sys.modules['pyspark'] = None\n"
        "from faststream_sqlbroker import SqlBroker\n"
        f"broker = SqlBroker('sqlite+aiosqlite:///{tmp_path / 'a.db'}', logger=None)\n"
        "assert not any(name.startswith('pyspark_') for name in sys.modules)\n"
        "import asyncio\n"
        "async def main():\n"
        "    await broker.create_tables()\n"
        "    reader = broker.archive.read()\n"
        "    print([batch async for batch in reader], reader.horizon.source)\n"
        "    await broker.stop()\n"
        "asyncio.run(main())\n"
    )
    assert told == "[] transactions\n"


def test_the_module_that_spark_finds_imports_nothing() -> None:
    """Sessions that name any format written in Python pay for it."""
    loaded = printed("import sys, pyspark_sqlbroker; print(*sys.modules)").split()
    ours = [name for name in loaded if "sqlbroker" in name]
    assert ours == ["pyspark_sqlbroker"]
    assert not {"pyspark", "pyarrow", "sqlalchemy", "faststream"} & set(loaded)


@pytest.mark.parametrize("package", [pyspark_sqlbroker, spark])
def test_every_public_name_can_be_had(package: object) -> None:
    for name in package.__all__:
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match=f"{package.__name__}.* no attribute 'nothing'"):
        package.nothing  # noqa: B018


def test_users_get_the_same_objects() -> None:
    assert sorted(pyspark_sqlbroker._HOMES) == sorted(pyspark_sqlbroker.__all__)
    assert spark.__all__ == pyspark_sqlbroker.__all__
    for name in spark.__all__:
        assert getattr(spark, name) is getattr(pyspark_sqlbroker, name)
    assert analytics.__all__ == readers_analytics.__all__
    for name in analytics.__all__:
        assert getattr(analytics, name) is getattr(readers_analytics, name)


@pytest.mark.parametrize("name", pyspark_sqlbroker.__all__)
def test_workers_find_what_is_pickled(name: str) -> None:
    """Spark sends classes and functions to its workers by their modules' names."""
    value = getattr(spark, name)
    again = pickle.loads(pickle.dumps(value))
    assert again is value or again == value
    if callable(value):
        assert value.__module__.split(".")[0] == "pyspark_sqlbroker"


def test_every_name_of_the_docs_is_there() -> None:
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.py"), ROOT / "README.md"]
    text = "\n".join(page.read_text() for page in pages)
    imports = {
        (module, name)
        for module, many, one in IMPORT.findall(text)
        for name in re.findall(r"\w+", many or one)
    }
    assert len(imports) > 5
    for module, name in imports:
        assert hasattr(import_module(module), name), f"{module} has no {name}"
    for dotted in set(DOTTED.findall(text)):
        _resolve(dotted)


def _resolve(dotted: str) -> object:
    """A module, or a name of one."""
    try:
        return import_module(dotted)
    except ModuleNotFoundError:
        module, _, name = dotted.rpartition(".")
        return getattr(import_module(module), name)
