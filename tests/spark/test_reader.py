"""Spark as the reader of docs/howto/security.md, with its GRANTs and no other right."""

import pytest
from pyspark.sql import SparkSession

from pyspark_sqlbroker import read_archive
from tests.accounts import PASSWORD, account
from tests.docs.test_security import given, grants
from tests.spark.conftest import Archive


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
def test_a_reader_loads_the_archive(
    spark: SparkSession, archive: Archive, database: str, database_url: str
) -> None:
    """By JDBC, and by the data source, without any other right."""
    archive.add_many(5)
    with account(database_url) as user:
        given(user, *grants("reader", database)[""])
        url = user.url.set(username=user.name, password=PASSWORD)
        assert read_archive(spark, url).count() == 5
        frame = spark.read.format("sqlbroker").option(
            "url", url.render_as_string(hide_password=False)
        )
        assert frame.load().count() == 5
        assert user.try_as("DELETE FROM message_archive", "SELECT payload FROM message")
