"""Sessions, and passwords that must never be shown."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from sqlalchemy import text

from faststream_sqlbroker import SetupError
from pyspark_sqlbroker import build_session, read_archive
from pyspark_sqlbroker.drivers import require_jar
from pyspark_sqlbroker.session import merge_settings, require_driver
from tests.spark.cluster import SPARK_HOME

SECRET = "s3cr3t@:/%'\"\\"


def test_a_running_session_is_used_if_it_has_the_drivers(spark: SparkSession) -> None:
    assert build_session(databases=["postgresql", "mariadb", "sqlite"]) is spark
    with pytest.raises(
        SetupError, match=r"started without the JDBC driver com\.mysql.*before Java starts"
    ):
        require_driver(spark, "com.mysql.cj.jdbc.Driver", "mysql")


def test_under_spark_submit(tmp_path: Path) -> None:
    """A session without drivers says so; ours keeps what spark-submit was given."""
    job = tmp_path / "job.py"
    job.write_text(
        "from pyspark.sql import SparkSession\n"
        "from pyspark_sqlbroker import build_session, read_archive\n"
        "s = SparkSession.builder.getOrCreate()\n"
        "import sqlite3; sqlite3.connect('x.db').close()\n"
        "try: read_archive(s, 'sqlite:///x.db')\n"
        "except Exception as error: print(type(error).__name__, error)\n"
        "s.stop()\n"
        "try: build_session(databases='sqlite')\n"
        "except Exception as error: print(type(error).__name__, error)\n"
        "s = build_session()\n"
        "for name in 'spark.jars', 'spark.executor.extraJavaOptions': print(s.conf.get(name))\n"
    )
    given = ("spark.executor.extraJavaOptions=-Dx=1", "spark.log.level=ERROR")
    options = [word for setting in given for word in ("--conf", setting)]
    given_jar = require_jar("mysql").path.resolve()
    submit = SPARK_HOME / "bin" / "spark-submit"
    done = subprocess.run(
        [submit, "--master", "local[1]", *options, "--jars", given_jar, job],
        env=os.environ | {"PYSPARK_PYTHON": sys.executable},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=280,
    )
    refused, still, jars, java = done.stdout.splitlines()
    assert (
        "SetupError this Spark session was started without the JDBC driver org.sqlite.JDBC"
        in refused
    )
    assert "restart the Python process or kernel" in refused
    # Java lives on, and has no more drivers than before.
    assert still == refused
    assert "sqlite-jdbc" in jars
    assert jars.endswith(f"file://{given_jar}")
    assert java == "-Duser.timezone=UTC -Dx=1"


@pytest.mark.parametrize("kind", ["postgresql", "mariadb"])
def test_no_password_is_seen(
    spark: SparkSession, new_database: Any, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """In plans, errors and logs; and one full of signs works."""
    archive = new_database(kind)
    archive.add_many(3)
    admin = archive.engine
    name = f"reader_{archive.engine.url.database}"[:60]
    with admin.connect().execution_options(no_parameters=True) as connection, connection.begin():
        if kind == "postgresql":
            connection.execute(text(f"DROP ROLE IF EXISTS {name}"))
            quoted = SECRET.replace("'", "''")
            connection.exec_driver_sql(f"CREATE ROLE {name} LOGIN PASSWORD '{quoted}'")
            connection.exec_driver_sql(f"GRANT SELECT ON message_archive TO {name}")
        else:
            quoted = SECRET.replace("\\", "\\\\").replace("'", "\\'")
            connection.exec_driver_sql(f"CREATE USER '{name}'@'%' IDENTIFIED BY '{quoted}'")
            connection.exec_driver_sql(f"GRANT SELECT ON *.* TO '{name}'@'%'")
    try:
        url = admin.url.set(username=name, password=SECRET)
        frame = read_archive(spark, url)
        assert frame.count() == 3
        seen = [frame._jdf.queryExecution().toString(), repr(frame)]
        spark.sparkContext.setLogLevel("INFO")
        for broken in (
            frame.filter("raise_error('no') = 1"),
            read_archive(spark, url, options={"sessionInitStatement": "SELECT nonsense("}),
        ):
            with pytest.raises(Exception) as caught:
                broken.collect()
            seen.append(str(caught.value))
    finally:
        spark.sparkContext.setLogLevel("ERROR")
        with admin.begin() as connection:
            if kind == "postgresql":
                connection.exec_driver_sql(f"DROP OWNED BY {name}")
                connection.exec_driver_sql(f"DROP ROLE {name}")
            else:
                connection.exec_driver_sql(f"DROP USER '{name}'@'%%'")
    with pytest.raises(Exception) as caught:
        read_archive(spark, url.set(username="no_such_user"))
    seen += [str(caught.value), *capfd.readouterr()]
    assert all(seen[:4])
    for part in seen:
        assert SECRET not in part
        assert "s3cr3t" not in part


def test_a_session_that_another_thread_started_is_used_as_it_is(spark: SparkSession) -> None:
    zone = spark.conf.get("spark.sql.session.timeZone")
    with ThreadPoolExecutor(1) as other:
        found = other.submit(build_session, databases=["postgresql"]).result()
        assert found is spark
        refused = other.submit(require_driver, found, "com.mysql.cj.jdbc.Driver", "mysql")
        assert isinstance(refused.exception(), SetupError)
    assert spark.conf.get("spark.sql.session.timeZone") == zone


def test_the_options_given_to_spark_submit_stay() -> None:
    ours = {
        "spark.jars": "/ours/postgresql.jar",
        "spark.executor.extraJavaOptions": "-Duser.timezone=UTC",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.sources.partitionOverwriteMode": "dynamic",
    }
    given = {
        "spark.jars": "/theirs.jar",
        "spark.executor.extraJavaOptions": "-Dx=1 -Duser.timezone=Asia/Tokyo",
        "spark.sql.session.timeZone": "Asia/Tokyo",
        "spark.app.id": "7",
    }
    assert merge_settings(ours, given) == {
        "spark.jars": "/ours/postgresql.jar,/theirs.jar",
        "spark.executor.extraJavaOptions": "-Duser.timezone=UTC -Dx=1 -Duser.timezone=Asia/Tokyo",
        "spark.sql.session.timeZone": "Asia/Tokyo",
        "spark.sql.sources.partitionOverwriteMode": "dynamic",
    }
    assert merge_settings(ours, {}) == ours
