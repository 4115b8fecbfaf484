"""MySQL where the system has none: Debian unstable's, unpacked once into a cache folder and run by
its own loader.

Nothing is installed. What is unpacked stays for the next time; remove the folder to get a newer
one.
"""

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PACKAGE = "mysql-server-core"
KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
SOURCES = Path("/etc/apt")
TIMEOUT = 300.0
"""Seconds that apt gets for one step."""
ATTEMPTS = 2


class DownloadError(Exception):
    """The packages cannot be had; the text says why, in one line."""


def cache() -> Path:
    """Where unpacked servers are kept. Root's is open to the users that servers run as; a home is
    not.
    """
    if os.geteuid() == 0:
        return Path("/var/cache/faststream-sqlbroker")
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "faststream-sqlbroker"


def mysqld() -> str:
    """Path of a MySQL server that was unpacked before, or is now; processes wait for one another.

    Raises:
        DownloadError: the packages cannot be had here.
    """
    place = cache() / "mysql-unstable"
    server = place / "mysqld"
    if not server.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        with _locked(place.parent / "mysql-unstable.lock"):
            if not server.exists():
                _unpack(place)
    return str(server)


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    with file.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _unpack(place: Path) -> None:
    """Fill a folder under another name first: `place` is whole, or it is not there."""
    source = mirror()
    print("unpacking Debian unstable's MySQL, about 60 MB ...", flush=True)
    with tempfile.TemporaryDirectory(prefix="mysql-", dir=place.parent) as name:
        folder = Path(name)
        folder.chmod(0o755)
        debs = _download(folder, source)
        root = folder / "unpacked" / "root"
        for part in ("lib", "lib64", "bin", "sbin"):
            (root / "usr" / part).mkdir(parents=True)
            (root / part).symlink_to(f"usr/{part}")
        for deb in debs:
            _run(["dpkg-deb", "-x", str(deb), str(root)])
        _write_starter(root)
        shutil.rmtree(place, ignore_errors=True)
        root.parent.rename(place)


def mirror() -> str:
    """The Debian mirror that this machine's own release comes from.

    Raises:
        DownloadError: this is no Debian, or its sources name none.
    """
    release = dict(
        line.split("=", 1)
        for line in Path("/etc/os-release").read_text().splitlines()
        if "=" in line
    )
    if release.get("ID") != "debian" or not shutil.which("apt-get") or not KEYS.exists():
        msg = "only Debian has packages that can be unpacked here"
        raise DownloadError(msg)
    suite = release.get("VERSION_CODENAME", "").strip('"')
    for address, suites, components in _sources():
        if suite in suites and "main" in components:
            return address
    msg = f"no source in {SOURCES} names a mirror of Debian {suite}"
    raise DownloadError(msg)


def _sources() -> Iterator[tuple[str, list[str], list[str]]]:
    """Each address with its suites and components, of both formats: lines, and paragraphs of
    fields.
    """
    for file in (SOURCES / "sources.list", *sorted((SOURCES / "sources.list.d").glob("*.list"))):
        for line in file.read_text().splitlines() if file.exists() else []:
            words = line.split("#")[0].split()
            start = next((n for n, word in enumerate(words) if "://" in word), None)
            if words[:1] == ["deb"] and start is not None:  # options in brackets may come between
                yield words[start], words[start + 1 : start + 2], words[start + 2 :]
    for file in sorted((SOURCES / "sources.list.d").glob("*.sources")):
        for paragraph in file.read_text().split("\n\n"):
            fields = dict(
                line.split(":", 1)
                for line in paragraph.splitlines()
                if ":" in line and line[0] != "#"
            )
            for address in fields.get("URIs", "").split():
                yield (
                    address,
                    fields.get("Suites", "").split(),
                    fields.get("Components", "").split(),
                )


def _download(folder: Path, source: str) -> list[Path]:
    """The packages of the server and of all it needs, with a package database of their own.

    Raises:
        DownloadError: it failed twice.
    """
    apt = folder / "apt"
    debs = folder / "debs"
    for part in (apt / "etc", apt / "state/lists/partial", apt / "cache/archives/partial", debs):
        part.mkdir(parents=True)
    (apt / "etc/sources.list").write_text(f"deb [signed-by={KEYS}] {source} sid main\n")
    (apt / "state/status").touch()
    options = {
        "Dir::Etc": apt / "etc",
        "Dir::Etc::sourcelist": apt / "etc/sources.list",
        "Dir::Etc::sourceparts": "-",
        "Dir::State": apt / "state",
        "Dir::State::status": apt / "state/status",
        "Dir::Cache": apt / "cache",
        "Acquire::Languages": "none",
        "APT::Sandbox::User": "root",
    }
    command = [
        "apt-get",
        "-qq",
        *(part for name, value in options.items() for part in ("-o", f"{name}={value}")),
    ]
    for attempt in range(1, ATTEMPTS + 1):
        try:
            _run([*command, "update", "--error-on=any"])
            plan = _run(
                [*command, "-s", "install", "--no-install-recommends", PACKAGE]
            ).splitlines()
            _run(
                [
                    *command,
                    "download",
                    *(line.split()[1] for line in plan if line.startswith("Inst ")),
                ],
                debs,
            )
        except DownloadError:
            if attempt == ATTEMPTS:
                raise
    return sorted(debs.glob("*.deb"))


def _run(command: list[str], cwd: Path | None = None) -> str:
    """What `command` prints.

    Raises:
        DownloadError: it failed, with the last line of what it said.
    """
    try:
        done = subprocess.run(
            command, cwd=cwd, capture_output=True, text=True, check=False, timeout=TIMEOUT
        )
    except subprocess.TimeoutExpired:
        msg = f"{command[0]} did not end in {TIMEOUT:.0f} s"
        raise DownloadError(msg) from None
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
        msg = f"{command[0]} failed: {said[-1]}"
        raise DownloadError(msg)
    return done.stdout


def _write_starter(root: Path) -> None:
    """A `mysqld` next to `root`: the unpacked one, with its own release's loader and libraries."""
    usr = root / "usr"
    loaders = sorted(usr.glob("lib*/**/ld-linux-*.so.*"))
    libraries = sorted(usr.glob("lib/*-linux-gnu*"))
    if not loaders or not libraries or not (usr / "sbin/mysqld").exists():
        msg = f"{PACKAGE} no longer brings a server, a loader and libraries"
        raise DownloadError(msg)
    loader, library = (
        f'"$here"/{found[0].relative_to(root.parent)}' for found in (loaders, libraries)
    )
    options = {
        "basedir": "",
        "lc-messages-dir": "/share/mysql",
        "character-sets-dir": "/share/mysql/charsets",
        "plugin-dir": "/lib/mysql/plugin",
    }
    placed = " ".join(f'--{name}="$here"/root/usr{value}' for name, value in options.items())
    starter = root.parent / "mysqld"
    starter.write_text(
        "#!/bin/sh\nhere=${0%/*}\n"
        f'exec {loader} --library-path {library}:"$here"/root/usr/lib/mysql/private '
        f'"$here"/root/usr/sbin/mysqld "$@" {placed}\n'
    )
    starter.chmod(0o755)
