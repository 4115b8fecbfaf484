"""Sessions, and what must never be seen: passwords."""

import subprocess
import sys
from typing import Any

import pytest
from pyspark.sql import SparkSession
from sqlalchemy import text

from faststream_sqlbroker import SetupError
from faststream_sqlbroker.spark import build_session, read_archive
from faststream_sqlbroker.spark.session import need_driver

SECRET = "s3cr3t@:/%'\"\\"


def test_a_running_session_is_used_if_it_has_the_drivers(spark: SparkSession) -> None:
    assert build_session(databases=["postgresql", "mariadb", "sqlite"]) is spark
    with pytest.raises(SetupError, match=r"started without the JDBC driver com\.mysql.*before Java starts"):
        need_driver(spark, "com.mysql.cj.jdbc.Driver", "mysql")


def test_a_session_without_the_driver_says_so() -> None:
    """In a process of its own, started as people do who did not read on."""
    code = (
        "from pyspark.sql import SparkSession\n"
        "from faststream_sqlbroker.spark import read_archive\n"
        "s = SparkSession.builder.master('local[1]').config('spark.ui.enabled', 'false').getOrCreate()\n"
        "import sqlite3; sqlite3.connect('x.db').close()\n"
        "try: read_archive(s, 'sqlite:///x.db')\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=100
    )
    assert "SetupError this Spark session was started without the JDBC driver org.sqlite.JDBC" in done.stdout


@pytest.mark.parametrize("kind", ["postgresql", "mariadb"])
def test_no_password_is_seen(
    spark: SparkSession, new_database: Any, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """In plans, errors and logs; and one full of signs works."""
    archive = new_database(kind)
    archive.add_many(3)
    admin, name = archive.engine, f"reader_{archive.engine.url.database}"[:60]
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
        read_archive(spark, url.set(username="nobody_knows"))
    seen += [str(caught.value), *capfd.readouterr()]
    assert all(seen[:4])
    for part in seen:
        assert SECRET not in part
        assert "s3cr3t" not in part
