"""The archive on a standalone cluster, as docs/howto/spark.md says."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from pyspark_sqlbroker.drivers import require_jar
from tests.spark.cluster import Cluster
from tests.spark.conftest import Archive
from tests.spark.java import need_spark
from tests.spark.test_stream import LATE

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "howto" / "spark.md").read_text()
SECTION = PAGE[PAGE.index("## On a cluster") : PAGE.index("## Time")]
BUILD, SUBMIT = re.findall(r"```sh\n(.*?)```", SECTION, re.DOTALL)[:2]
NIGHTLY = ROOT / "docs" / "examples" / "nightly.py"
MOST_BYTES = 85_000_000
"""Of the executors' environment, packed."""

pytestmark = pytest.mark.timeout(1500)  # four Java processes, and an installation by pip


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Running."""
    need_spark("postgresql")
    with Cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the page's commands have packed the executors' environment."""
    folder = tmp_path_factory.mktemp("environment")
    commands = BUILD.replace("sqlbroker[spark-executor]", f"{ROOT}[spark-executor]")
    assert commands != BUILD
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
    done = subprocess.run(
        ["sh", "-euc", commands], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder


def options() -> list[str]:
    """Those of the page's spark-submit, with the jar of this machine."""
    command = SUBMIT.replace("\\\n", " ").replace("$(command -v python)", sys.executable)
    words = shlex.split(command)
    assert words[0] == "spark-submit"
    given = words[1:-1]
    for name in ("--master", "--packages"):
        at = given.index(name)
        del given[at : at + 2]
    return [*given, "--jars", str(require_jar("postgresql").path.resolve())]


def three_days(new_database: Any) -> Archive:
    """72 rows of the last days, one an hour, of which every tenth has failed."""
    archive: Archive = new_database("postgresql")
    first = datetime.now(timezone.utc) - timedelta(days=4)
    archive.add(
        *(
            {
                "id": n,
                "archived_at": first + timedelta(hours=n),
                "state": "COMPLETED" if n % 10 else "FAILED",
            }
            for n in range(1, 73)
        )
    )
    return archive


def test_the_packed_environment_is_small(environment: Path) -> None:
    assert 0 < (environment / "job.tar.gz").stat().st_size <= MOST_BYTES
    packages = {path.name for path in environment.glob("job/lib/python3*/site-packages/*")}
    assert {"pyarrow", "faststream_sqlbroker", "pyspark_sqlbroker"} <= packages
    assert not {"pyspark", "pandas", "numpy", "pip"} & packages


def test_a_job_runs_as_the_page_says(
    cluster: Cluster, environment: Path, new_database: Any, tmp_path: Path
) -> None:
    archive = three_days(new_database)
    for number in range(3):
        env = {"DB_URL": archive.url, "LAKE": str(tmp_path / str(number))}
        done = cluster.submit(NIGHTLY, *options(), cwd=environment, env=env)
        if LATE not in done.stderr:
            break
    assert done.returncode == 0, done.stderr[-9000:]
    exported, *others = done.stdout.splitlines()
    # The day that runs is not exported yet: from the last one some rows may be.
    assert re.fullmatch(r"exported: (4[89]|[56]\d|7[012]) rows", exported)
    assert others == [
        "loaded: 72 rows",
        "streamed: 72 rows",
        "replayed: 7 messages, 0 before",
    ]
    with archive.engine.connect() as connection:
        copies = connection.execute(text("SELECT origin_id FROM message ORDER BY 1")).scalars()
        assert list(copies) == list(range(10, 73, 10))


def test_executors_without_our_package_read_by_jdbc(
    cluster: Cluster, new_database: Any, tmp_path: Path
) -> None:
    archive = three_days(new_database)
    nothing = tmp_path / "no-python"
    nothing.write_text("#!/bin/sh\nexit 1\n")
    nothing.chmod(0o755)
    env = {"DB_URL": archive.url, "LAKE": str(tmp_path), "PYTHON_IN_EXECUTORS": "no"}
    pythons = {"pyspark.python": nothing, "pyspark.driver.python": sys.executable}
    given = [word for name in pythons for word in ("--conf", f"spark.{name}={pythons[name]}")]
    jar = require_jar("postgresql").path.resolve()
    done = cluster.submit(NIGHTLY, *given, "--jars", jar, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr[-9000:]
    assert re.fullmatch(r"exported: \d\d rows\nloaded: 72 rows\n", done.stdout)


def test_a_cluster_refuses_to_run_the_driver_of_python(cluster: Cluster, tmp_path: Path) -> None:
    done = cluster.submit(NIGHTLY, "--deploy-mode", "cluster", cwd=tmp_path, env={})
    assert done.returncode != 0
    assert "Cluster deploy mode is currently not supported for python" in done.stderr
