"""Where the tests' servers come from, and the message if one is missing."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

from tests.conftest import Servers
from tools import compose, galera, packages, private, servers, unstable

SOURCES = {
    "lines.list": """
# deb http://commented.example/debian bookworm main
deb [signed-by=/k.gpg arch=amd64] http://other.example/apt tool-bookworm main
deb-src http://src.example/debian bookworm main
deb [signed-by=/k.gpg] http://lines.example/debian bookworm main contrib # the usual
""",
    "fields.sources": """
Types: deb
# URIs: http://commented.example/debian
URIs: http://security.example/debian-security
Suites: bookworm-security
Components: main

Types: deb
URIs: http://fields.example/debian
Suites: bookworm bookworm-updates
Components: main
""",
}


@pytest.fixture
def nothing_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """No server listens, none is installed, and none can be downloaded."""

    @contextmanager
    def no_engine(*_: object) -> Iterator[str]:
        raise private.CannotStartError("no container engine answers")
        yield ""

    def no_packages() -> str:
        raise unstable.DownloadError("apt-get failed: no route")

    for kind, variable in servers.VARIABLES.items():
        monkeypatch.delenv(variable, raising=False)
        monkeypatch.setitem(servers.LISTENING, kind, ())
    monkeypatch.setattr(compose, "start", no_engine)
    monkeypatch.setattr(private, "find", lambda *_: None)
    monkeypatch.setattr(private, "install", lambda _package: "apt-get needs root")
    monkeypatch.setattr(unstable, "mysqld", no_packages)


@pytest.mark.usefixtures("nothing_there")
@pytest.mark.parametrize(
    ("kind", "excused"), [("mysql", True), ("mariadb", False), ("postgresql", False)]
)
def test_only_a_failed_download_is_an_excuse(
    kind: str, excused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In CI the tests of the one are skipped with the reason; without the others nothing starts."""
    monkeypatch.setenv("CI", "true")
    monkeypatch.delenv(f"{servers.VARIABLES[kind]}_MISSING", raising=False)
    with pytest.raises(
        servers.NoServerError, match=f"no {kind} server: set SQLBROKER_TEST_"
    ) as raised:
        with servers.server(kind):
            pass
    assert raised.value.excused is excused
    assert ("apt-get failed: no route" in str(raised.value)) is excused
    with pytest.raises(
        pytest.skip.Exception if excused else pytest.fail.Exception, match=f"no {kind} server"
    ):
        Servers().admin(kind)


@pytest.mark.usefixtures("nothing_there")
@pytest.mark.parametrize(("kind", "code"), [("mysql", 0), ("mariadb", 1)])
def test_the_command_hears_of_what_is_excused(
    kind: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", "true")
    said: list[str] = []
    missing = f"{servers.VARIABLES[kind]}_MISSING"
    check = f"import os, sys; sys.exit('no route' not in os.environ['{missing}'])"
    assert servers.run([kind], [sys.executable, "-c", check], said.append) == code
    [line] = said
    assert line.startswith(f"no {kind} server")


def test_a_reason_in_the_environment_is_a_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `servers.run` leaves it."""
    monkeypatch.setenv("CI", "true")
    monkeypatch.setenv("SQLBROKER_TEST_MYSQL_URL_MISSING", "no mysql server: no route")
    with pytest.raises(pytest.skip.Exception, match="no route"):
        Servers().admin("mysql")


def test_an_unreachable_url_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "SQLBROKER_TEST_MYSQL_URL", f"mysql+pymysql://root@127.0.0.1:{private.free_port()}/x"
    )
    with pytest.raises(
        servers.NoServerError, match="the mysql server of SQLBROKER_TEST_MYSQL_URL cannot be used"
    ):
        with servers.server("mysql"):
            pass


@pytest.mark.parametrize(("kind", "other"), [("mysql", "mariadb"), ("mariadb", "mysql")])
def test_mariadb_and_mysql_are_told_apart(kind: str, other: str, servers: Servers) -> None:
    """They share a port and a protocol."""
    from tools.servers import problem_of

    url = servers.admin(other).url
    for scheme in ("mysql+pymysql", "mariadb+pymysql"):
        given = url.set(drivername=scheme).render_as_string(hide_password=False)
        assert problem_of(kind, given) is not None
    given = url.set(drivername="mysql+pymysql").render_as_string(hide_password=False)
    assert problem_of(other, given) is None


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("suite", ["bookworm", "sid"])
def test_the_mirror_is_the_machines_own(
    name: str, suite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unstable's code name is that of the next release, which its sources do not name."""
    if not unstable.KEYS.exists():
        pytest.skip("only Debian has packages that can be unpacked here")
    codename = "bookworm" if suite == "bookworm" else "forky"
    (tmp_path / "os-release").write_text(f"ID=debian\nVERSION_CODENAME={codename}\n")
    (tmp_path / "sources.list.d").mkdir()
    told = SOURCES[name].replace("bookworm", suite)
    (tmp_path / "sources.list.d" / name).write_text(told)
    monkeypatch.setattr(unstable, "SOURCES", tmp_path)
    assert unstable.mirror(tmp_path / "os-release") == (
        f"http://{name.partition('.')[0]}.example/debian"
    )


def test_programs_start_with_their_own_loader(tmp_path: Path) -> None:
    """Also by a link, as in an environment of Python; a script starts as it is."""
    place = tmp_path / "place"
    usr = place / "root" / "usr"
    loader = usr / "lib" / "x86_64-linux-gnu" / "ld-linux-x86-64.so.2"
    for path, content in {
        loader: '#!/bin/sh\necho "loaded $@"\n',
        usr / "bin" / "tool": "\x7fELF",
        usr / "sbin" / "script": '#!/bin/sh\necho "script $@"\n',
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        path.chmod(0o755)
    programs = {"bin/tool": {}, "sbin/script": {"basedir": "", "share": "/share/x"}}
    unstable._write_starters(
        place / "root", unstable.Packages("place", "sid", ("tool",), programs, 1)
    )
    link = tmp_path / "link"
    link.symlink_to(place / "tool")
    said = subprocess.check_output([link, "a b"], text=True)
    library = f"{loader.parent}:{usr}/lib/mysql/private"
    assert said == f"loaded --argv0 {link} --library-path {library} {usr}/bin/tool a b\n"
    said = subprocess.check_output([place / "sbin" / "script", "x"], text=True)
    assert said == f"script x --basedir={place} --share={place}/share/x\n"
    gone = unstable.Packages("place", "sid", ("tool",), {"bin/gone": {}}, 1)
    with pytest.raises(unstable.DownloadError, match="tool no longer brings its programs"):
        unstable._write_starters(place / "root", gone)


@pytest.mark.parametrize(
    ("module", "use", "wanted"),
    [
        (unstable, unstable.mysqld, unstable.MYSQL),
        (packages, lambda: packages.unpack("tool", "mysqld"), "tool"),
    ],
)
def test_a_download_is_unpacked_once_for_all_processes(
    module: ModuleType,
    use: Callable[[], object],
    wanted: object,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unpacked: list[Path] = []

    def unpack(folder: Path, packages: object) -> None:
        assert packages == wanted
        unpacked.append(folder)
        time.sleep(0.2)
        (folder / "unpacked").mkdir()
        (folder / "unpacked" / "mysqld").touch()

    monkeypatch.setattr(unstable, "cache", lambda: tmp_path / "cache")
    monkeypatch.setattr(module, "_unpack", unpack)
    threads = [threading.Thread(target=use) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(unpacked) == 1


@pytest.mark.parametrize(
    ("failed", "raised"),
    [
        (unstable.DownloadError("no route"), private.CannotDownloadError),
        (packages.UnpackError("no dpkg-deb"), private.CannotStartError),
    ],
)
def test_only_a_failed_download_excuses_a_missing_library_of_galera(
    failed: Exception, raised: type[Exception]
) -> None:
    def unpack(_package: str, _made: str) -> Path:
        raise failed

    with pytest.raises(private.CannotStartError, match=str(failed)) as error:
        galera._library((), unpack)
    assert type(error.value) is raised


@pytest.mark.parametrize("failures", [1, 2])
def test_a_download_is_tried_twice(
    failures: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def run(command: list[str], _cwd: Path | None = None) -> str:
        ran.append(command[-1])
        if len(ran) <= failures:
            raise unstable.DownloadError("no route")
        return "Inst mysql-server-core (9)\n"

    monkeypatch.setattr(unstable, "_run", run)
    if failures == 1:
        unstable._download(tmp_path, "http://mirror.example/debian", unstable.MYSQL)
        assert ran == ["--error-on=any", "--error-on=any", "mysql-server-core", "mysql-server-core"]
    else:
        with pytest.raises(unstable.DownloadError, match="no route"):
            unstable._download(tmp_path, "http://mirror.example/debian", unstable.MYSQL)
        assert ran == ["--error-on=any"] * 2
