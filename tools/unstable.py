"""Programs of a newer Debian, unpacked once into a cache folder and run by their own loader.

MySQL comes from there, which this Debian has not, and what `tools.versions` tries. Nothing is
installed. What is unpacked stays for the next time; remove the folder to get a newer one.
"""

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
SOURCES = Path("/etc/apt")
TIMEOUT = 300.0
"""Seconds that apt gets for one step."""
ATTEMPTS = 2
ALWAYS = ("sid", "unstable")
"""Suites of any mirror. Unstable's own sources name them; its code name is the next release's."""


@dataclass(frozen=True)
class Packages:
    """Packages of a Debian, and which of their programs are used.

    Attributes:
        folder: The folder's name in the cache.
        suite: Which Debian.
        names: The packages; what they depend on comes with them.
        programs: Paths below `usr`, with options and their paths below the folder that each start
            gets.
        megabytes: What is downloaded.
    """

    folder: str
    suite: str
    names: tuple[str, ...]
    programs: Mapping[str, Mapping[str, str]]
    megabytes: int


MYSQL = Packages(
    "mysql-unstable",
    "sid",
    ("mysql-server-core",),
    {
        "sbin/mysqld": {
            "basedir": "",
            "lc-messages-dir": "/share/mysql",
            "character-sets-dir": "/share/mysql/charsets",
            "plugin-dir": "/lib/mysql/plugin",
        }
    },
    60,
)
MARIADB = Packages(
    "mariadb-11.8",
    "trixie",
    ("mariadb-server-core", "mariadb-client-core"),
    {
        "sbin/mariadbd": {
            "basedir": "",
            "lc-messages-dir": "/share/mariadb",
            "character-sets-dir": "/share/mariadb/charsets",
            "plugin-dir": "/lib/mysql/plugin",
        },
        "bin/mariadb-install-db": {"basedir": ""},
        "bin/my_print_defaults": {},
        "bin/resolveip": {},
    },
    17,
)
PYTHONS = {
    version: Packages(name, suite, (name,), {f"bin/{name}": {}}, 17)
    for version, suite in (("3.13", "trixie"), ("3.14", "sid"))
    for name in (f"python{version}",)
}


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
    """Path of a MySQL server that was unpacked before, or is now.

    Raises:
        DownloadError: the packages cannot be had here.
    """
    return str(unpacked(MYSQL) / "mysqld")


def unpacked(packages: Packages) -> Path:
    """The folder with the programs of `packages`, unpacked before or now.

    Raises:
        DownloadError: the packages cannot be had here.
    """
    first = Path(next(iter(packages.programs))).name
    return kept(packages.folder, first, lambda folder: _unpack(folder, packages))


def kept(name: str, made: str, fill: Callable[[Path], None]) -> Path:
    """The folder `name` of the cache. Without a file `made` in it, `fill` makes its contents, in
    the folder `unpacked` of one that is its own: it is whole, or not there. Processes wait for one
    another.
    """
    place = cache() / name
    if not (place / made).exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        with _locked(place.with_name(f"{name}.lock")):
            if not (place / made).exists():
                with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=place.parent) as given:
                    folder = Path(given)
                    folder.chmod(0o755)
                    fill(folder)
                    shutil.rmtree(place, ignore_errors=True)
                    (folder / "unpacked").rename(place)
    return place


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    with file.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _unpack(folder: Path, packages: Packages) -> None:
    source = mirror()
    print(
        f"unpacking {packages.names[0]} of Debian {packages.suite}, about "
        f"{packages.megabytes} MB ...",
        flush=True,
    )
    debs = _download(folder, source, packages)
    root = folder / "unpacked" / "root"
    for part in ("lib", "lib64", "bin", "sbin"):
        (root / "usr" / part).mkdir(parents=True)
        (root / part).symlink_to(f"usr/{part}")
    for deb in debs:
        _run(["dpkg-deb", "-x", str(deb), str(root)])
    _write_starters(root, packages)


def mirror(release_file: Path = Path("/etc/os-release")) -> str:
    """The Debian mirror that this machine's own release comes from.

    Raises:
        DownloadError: this is no Debian, or its sources name none.
    """
    release = dict(
        line.split("=", 1) for line in release_file.read_text().splitlines() if "=" in line
    )
    if release.get("ID") != "debian" or not shutil.which("apt-get") or not KEYS.exists():
        msg = "only Debian has packages that can be unpacked here"
        raise DownloadError(msg)
    suite = release.get("VERSION_CODENAME", "").strip('"')
    for address, suites, components in _sources():
        if "main" in components and not {suite, *ALWAYS}.isdisjoint(suites):
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


def _download(folder: Path, source: str, packages: Packages) -> list[Path]:
    """The packages and all that they need, with a package database of their own.

    Raises:
        DownloadError: it failed twice.
    """
    apt = folder / "apt"
    debs = folder / "debs"
    for part in (apt / "etc", apt / "state/lists/partial", apt / "cache/archives/partial", debs):
        part.mkdir(parents=True)
    (apt / "etc/sources.list").write_text(
        f"deb [signed-by={KEYS}] {source} {packages.suite} main\n"
    )
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
                [*command, "-s", "install", "--no-install-recommends", *packages.names]
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


def _write_starters(root: Path, packages: Packages) -> None:
    """Each program next to `root`: the unpacked one, with its own release's loader and libraries.

    Links lead to the files that Python looks for next to itself, and MariaDB in its `--basedir`.
    """
    place = root.parent
    usr = root / "usr"
    loaders = sorted(usr.glob("lib*/**/ld-linux-*.so.*"))
    libraries = sorted(usr.glob("lib/*-linux-gnu*"))
    programs = {usr / path: options for path, options in packages.programs.items()}
    if not loaders or not libraries or not all(program.exists() for program in programs):
        msg = f"{packages.names[0]} no longer brings its programs, a loader and libraries"
        raise DownloadError(msg)
    loader, library = (f'"$here"/{found[0].relative_to(place)}' for found in (loaders, libraries))
    loading = f'{loader} --argv0 "$0" --library-path {library}:"$here"/root/usr/lib/mysql/private '
    for name, target in {
        "bin": ".",
        "sbin": ".",
        "lib": "root/usr/lib",
        "share": "root/usr/share",
    }.items():
        (place / name).symlink_to(target)
    for program, options in programs.items():
        placed = "".join(f' --{name}="$here"{path}' for name, path in options.items())
        script = program.read_bytes().startswith(b"#!")
        starter = place / program.name
        starter.write_text(
            '#!/bin/sh\nhere=$(readlink -f "$0")\nhere=${here%/*}\n'
            f'exec {"" if script else loading}"$here"/{program.relative_to(place)} "$@"{placed}\n'
        )
        starter.chmod(0o755)
