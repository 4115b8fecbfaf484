"""What each Spark needs of this machine."""

import os

import pytest

from faststream_sqlbroker.exceptions import SetupError
from pyspark_sqlbroker.drivers import need_jar, need_java
from tools.packages import JAVA, install

DRIVERS = {
    "postgresql": "libpostgresql-jdbc-java",
    "mysql": "libmariadb-java",
    "sqlite": "libxerial-sqlite-jdbc-java",
}


def need_spark(*kinds: str) -> None:
    """Install Java, and the drivers of `kinds`, where they are missing; skip without them, fail in
    CI."""
    problems = []
    for package in (None, JAVA, *(DRIVERS[kind] for kind in kinds)):
        if package is not None:
            problems.append(install(package) or "")
        try:
            need_java()
            for kind in kinds:
                need_jar(kind)
        except SetupError as error:
            problems.append(str(error))
        else:
            return
    reason = "; ".join(problem for problem in problems if problem)
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)
