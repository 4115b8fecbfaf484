"""Java and the drivers: where they are searched, and the errors if they are missing."""

import os
import stat
from importlib import metadata
from pathlib import Path
from zipfile import ZipFile

import pytest
from typer.testing import CliRunner

from faststream_sqlbroker import SetupError
from faststream_sqlbroker.cli.app import app
from pyspark_sqlbroker import drivers, session
from pyspark_sqlbroker.session import build_session


@pytest.fixture(autouse=True)
def nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without drivers, whose Java only tells its version."""
    java(tmp_path / "java", 'openjdk version "17.0.9"')
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "java"))
    monkeypatch.setattr(drivers, "DEBIAN_JARS", tmp_path / "debian")
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    monkeypatch.delenv(drivers.JARS_VARIABLE, raising=False)
    (tmp_path / "debian").mkdir()
    return tmp_path


def jar(folder: Path, name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).touch()
    return folder / name


def java(home: Path, said: str) -> None:
    program = jar(home / "bin", "java")
    program.write_text(f"#!/bin/sh\necho '{said}' >&2\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)


def test_the_order_of_places(nothing_installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Argument, environment variable, Debian's folder, Maven's cache; the newest of a folder."""
    folder = nothing_installed
    assert drivers.find_jar("postgresql") is None
    cached = jar(
        folder / "home/.m2/repository/org/postgresql/postgresql/42.7.7", "postgresql-42.7.7.jar"
    )
    assert drivers.find_jar("postgresql").path == cached
    jar(folder / "debian", "postgresql-42.5.5.jar")
    newest = jar(folder / "debian", "postgresql-42.10.1.jar")
    jar(folder / "debian", "postgresql.jar")
    found = drivers.find_jar("postgresql")
    assert (found.path, found.version) == (newest, "42.10.1")
    named = jar(folder / "own", "postgresql-42.3.0.jar")
    monkeypatch.setenv(
        drivers.JARS_VARIABLE,
        f"{jar(folder / 'own', 'sqlite-jdbc-3.50.3.0.jar')}{os.pathsep}{named}",
    )
    assert drivers.find_jar("postgresql").path == named
    assert drivers.find_jar("sqlite").version == "3.50.3.0"
    given = jar(folder / "given", "postgresql-42.4.0.jar")
    assert drivers.find_jar("postgresql", [given]).source == "argument"


def test_a_jar_without_a_version_in_its_name_is_one(nothing_installed: Path) -> None:
    """It is used as given; it stays when one with a version is found, too."""
    own = jar(nothing_installed / "own", "postgresql.jar")
    found = drivers.require_jar("postgresql", [own])
    assert (found.path, found.version, found.source) == (own, "unknown", "argument")
    both = [own, jar(nothing_installed / "own", "postgresql-42.5.5.jar")]
    assert drivers.require_jar("postgresql", both).version == "42.5.5"
    for name in ("postgresql-42.7.7-sources.jar", "my-postgresql.jar"):
        assert drivers.find_jar("postgresql", [jar(nothing_installed / "own", name)]) is None


def test_mavens_cache_is_looked_into_last_and_only_where_the_driver_is(
    nothing_installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = nothing_installed / "home/.m2/repository/org"
    jar(cache / "other/postgresql/42.9.9", "postgresql-42.9.9.jar")
    assert drivers.find_jar("postgresql") is None
    for kind, place in (
        ("postgresql", "postgresql/postgresql/42.7.7/postgresql-42.7.7.jar"),
        ("mysql", "mariadb/jdbc/mariadb-java-client/3.5.3/mariadb-java-client-3.5.3.jar"),
        ("sqlite", "xerial/sqlite-jdbc/3.50.3.0/sqlite-jdbc-3.50.3.0.jar"),
    ):
        cached = jar((cache / place).parent, Path(place).name)
        assert drivers.require_jar(kind).path == cached
    installed = jar(nothing_installed / "debian", "postgresql-42.5.5.jar")
    monkeypatch.delattr(Path, "home")
    assert drivers.require_jar("postgresql").path == installed


def test_a_missing_driver_is_reported_with_the_remedy(nothing_installed: Path) -> None:
    with pytest.raises(
        SetupError,
        match=r"PostgreSQL was found: install the Debian package libpostgresql-jdbc-java, give",
    ):
        drivers.require_jar("postgresql")
    with pytest.raises(SetupError, match="which is not a file"):
        drivers.find_jar("postgresql", ["/nowhere/postgresql-42.7.7.jar"])
    old = jar(nothing_installed / "debian", "mariadb-java-client-2.2.3.jar")
    with pytest.raises(
        SetupError, match=rf"{old} is too old for MySQL and MariaDB: use version 2\.7 or newer"
    ):
        drivers.require_jar("mysql")


def test_a_jar_that_is_too_old_is_refused_where_it_was_asked_for(
    nothing_installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session for whatever drivers are found goes without one that a folder has."""
    old = jar(nothing_installed / "debian", "mariadb-java-client-2.2.3.jar")
    new = jar(nothing_installed / "debian", "postgresql-42.5.5.jar")
    kinds = ["postgresql", "mysql"]
    assert session._resolve(kinds, [], packages=False, strict=False) == ([str(new)], [])
    fetched = session._resolve(kinds, [], packages=True, strict=True)
    assert fetched == ([str(new)], [drivers.DRIVERS["mysql"].coordinate])
    for given, strict in (([], True), ([old], False)):
        with pytest.raises(SetupError, match="too old for MySQL"):
            session._resolve(kinds, given, packages=False, strict=strict)
    monkeypatch.setenv(drivers.JARS_VARIABLE, str(old))
    with pytest.raises(SetupError, match="too old for MySQL"):
        drivers.find_jar("mysql")


def test_one_database_and_one_jar_need_no_list(nothing_installed: Path) -> None:
    assert drivers.parse_kinds("mariadb") == ["mysql"]
    with pytest.raises(SetupError, match=r"databases must contain only .*mariadb, got 'oracle'"):
        drivers.parse_kinds("oracle")
    own = jar(nothing_installed / "own", "postgresql.jar")
    for given in (own, str(own)):
        assert drivers.find_jar("postgresql", given).path == own
        assert drivers.require_jar("postgresql", given).path == own


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (None, "found none"),
        ('openjdk version "11.0.2" 2019-01-15', "is version 11"),
        ('java version "1.8.0_292"', "is version 8"),
        ("what?", "found none"),
    ],
)
def test_missing_and_old_java_are_reported(
    nothing_installed: Path, monkeypatch: pytest.MonkeyPatch, said: str | None, words: str
) -> None:
    home = nothing_installed / "jdk"
    monkeypatch.setenv("JAVA_HOME", str(home))
    if said is not None:
        java(home, said)
    with pytest.raises(SetupError, match=words) as caught:
        drivers.require_java()
    assert "default-jre-headless" in str(caught.value)
    if said == "what?":
        java(home, 'openjdk version "21.0.1"')
        assert drivers.require_java().version == 21


@pytest.mark.parametrize(
    ("said", "has_class", "refused"),
    [
        ('openjdk version "25.0.1" 2025-10-21', False, True),
        ('openjdk version "25-ea" 2025-09-16', False, True),
        ('openjdk version "25.0.1" 2025-10-21', True, False),
        ('openjdk version "23.0.2" 2025-01-21', False, False),
    ],
)
def test_a_java_without_what_hadoop_calls_is_named(
    nothing_installed: Path,
    monkeypatch: pytest.MonkeyPatch,
    said: str,
    has_class: bool,
    refused: bool,
) -> None:
    """Spark 4.1 would start it, and fail with "getSubject is not supported"."""
    home, spark = nothing_installed / "jdk", nothing_installed / "spark"
    java(home, said)
    jars = spark / "jars"
    jars.mkdir(parents=True)
    (jars / "spark-core_2.13-4.1.4.jar").touch()
    with ZipFile(jars / "hadoop-client-api-3.4.2.jar", "w") as classes:
        classes.writestr(drivers.SUBJECT_CLASS if has_class else "another.class", "")
    monkeypatch.setenv("JAVA_HOME", str(home))
    monkeypatch.setenv("SPARK_HOME", str(spark))
    if not refused:
        assert drivers.require_java().path == f"{home}/bin/java"
        return
    with pytest.raises(SetupError, match=r"Spark 4\.1\.4 does not start on Java 25") as caught:
        drivers.require_java()
    assert "Java 17 to 23" in str(caught.value)


def test_a_session_is_refused_before_java_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_get_running", lambda: None)
    with pytest.raises(SetupError, match="'oracle'"):
        build_session(databases=["oracle"])
    with pytest.raises(SetupError, match="libmariadb-java"):
        build_session(databases=["mariadb"])
    monkeypatch.setenv("JAVA_HOME", "/nonexistent")
    with pytest.raises(SetupError, match=r"JAVA_HOME=/nonexistent"):
        build_session()


def version(name: str) -> str:
    if name == "pyarrow":
        raise metadata.PackageNotFoundError(name)
    return "4.1.4"


def test_check_tells_what_is_there_and_what_is_not(
    nothing_installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`sqlbroker spark check`."""
    monkeypatch.setenv("COLUMNS", "300")
    found = jar(nothing_installed / "debian", "postgresql-42.5.5.jar")
    done = CliRunner().invoke(app, ["spark", "check", "--database", "postgresql"])
    assert done.exit_code == 0, done.output
    for word in ("Java", "pyspark", "42.5.5", str(found)):
        assert word in done.output
    monkeypatch.setattr(metadata, "version", version)
    done = CliRunner().invoke(app, ["spark", "check"])
    assert done.exit_code == 1
    assert "pip install 'sqlbroker[spark]'" in done.output
    assert "libxerial-sqlite-jdbc-java" in done.output
    monkeypatch.setenv("JAVA_HOME", "/nonexistent")
    done = CliRunner().invoke(app, ["spark", "check", "--database", "postgresql"])
    assert (done.exit_code, "JAVA_HOME=/nonexistent" in done.output) == (1, True)
    wrong = CliRunner().invoke(app, ["spark", "check", "--database", "oracle"])
    assert isinstance(wrong.exception, SetupError)
