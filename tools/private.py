"""Private servers: in a temporary folder, on a free port, stopped with their process."""

import ctypes
import fcntl
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import psycopg

from tools import unstable
from tools.packages import install

START_TIMEOUT = 60.0
PREFIX = "sqlbroker-"
"""Of the names of temporary folders."""
OWNED = "owned"
"""A file of each, which the process that made the folder locks while it lives."""
IN_MEMORY = "/dev/shm"  # noqa: S108
ENOUGH = 4 * 2**30
"""Bytes: several servers at a time have 200 to 500 MB each."""
PR_SET_PDEATHSIG = 1


class CannotStartError(Exception):
    """A private server cannot be started; the text says why, in one line."""


class CannotDownloadError(CannotStartError):
    """It is not on this machine, and what brings it cannot be downloaded."""


def find(program: str, *places: str) -> str | None:
    """Path of `program`: on PATH or in one of `places` (globs, the newest version first)."""
    found = shutil.which(program)
    if found:
        return found
    for place in places:
        found_there = sorted(Path("/").glob(f"{place.lstrip('/')}/{program}"), reverse=True)
        if found_there:
            return str(found_there[0])
    return None


def needed(program: str, package: str, *places: str) -> str:
    """Path of `program`, installing `package` with apt if it is missing and we may.

    Raises:
        CannotStartError: it is not there and cannot be installed.
    """
    path = find(program, *places)
    if path is None:
        problem = install(package)
        path = find(program, *places)
        if path is None:
            msg = f"{program} is not installed ({problem or f'{package} does not bring it'})"
            raise CannotStartError(msg)
    return path


def free_port() -> int:
    """A port on which no process listens now."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Different ports on which no process listens now."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def _owner(user: str) -> pwd.struct_passwd:
    """The account `user`, or `nobody` where the server was installed without making one.

    Raises:
        CannotStartError: there is neither; the servers refuse to run as root.
    """
    for name in (user, "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    msg = (
        f"neither of the users {user!r} and 'nobody' exists: the server refuses to run as root, "
        "create one"
    )
    raise CannotStartError(msg)


@contextmanager
def folder_of(user: str, *, on_disk: bool = False) -> Iterator[tuple[Path, Callable[[], None]]]:
    """A temporary folder, and what a child must do first: become `user` if we are root, end with
    us. `on_disk` keeps it out of the memory that has room for it.
    """
    owner = _owner(user) if os.geteuid() == 0 else None
    parent = os.getpid()

    def become() -> None:
        if owner is not None:
            os.setgroups([])
            os.setgid(owner.pw_gid)
            os.setuid(owner.pw_uid)
        # After the change of user, which clears it. A server that stands still needs SIGKILL.
        _end_with_parent(signal.SIGINT if user == "postgres" else signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    _remove_abandoned()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=None if on_disk else _memory()))
    try:
        with (folder / "new").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            (folder / "new").rename(folder / OWNED)
            if owner is not None:
                os.chown(folder, owner.pw_uid, owner.pw_gid)
            yield folder, become
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned() -> None:
    """Remove the folders of processes that were killed."""
    for parent in (IN_MEMORY, tempfile.gettempdir()):
        for folder in Path(parent).glob(f"{PREFIX}*"):
            try:
                with (folder / OWNED).open() as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:  # it is locked, or not ours
                continue
            shutil.rmtree(folder, ignore_errors=True)


def _end_with_parent(number: int) -> None:
    """Let this process get the signal `number` when its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def _memory() -> str | None:
    """A folder in memory, where there is enough of it: MariaDB and MySQL sync their files at each
    CREATE TABLE.
    """
    try:
        free = shutil.disk_usage(IN_MEMORY).free
    except OSError:
        return None
    return IN_MEMORY if free > ENOUGH and os.access(IN_MEMORY, os.W_OK) else None


def run(command: list[str], become: Callable[[], None], cwd: Path) -> None:
    """Run a preparing step.

    Raises:
        CannotStartError: with the last line of what it said.
    """
    done = subprocess.run(
        command, preexec_fn=become, cwd=cwd, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
        msg = f"{Path(command[0]).name} failed: {said[-1]}"
        raise CannotStartError(msg)


class Process:
    """A server's process on a port; `crash` and `start` may follow each other."""

    def __init__(
        self,
        command: list[str],
        become: Callable[[], None],
        folder: Path,
        port: int,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """`env` is added to our environment."""
        self._command = command
        self._env = env or {}
        self._become = become
        self._folder = folder
        self.port = port
        self._server: subprocess.Popen[bytes] | None = None
        self._postgresql = "postgres" in command[0]
        self._crash = signal.SIGQUIT if self._postgresql else signal.SIGKILL

    @property
    def log(self) -> Path:
        """The file of what it says."""
        return self._folder / "log"

    def start(self) -> None:
        """Start it, and wait until it accepts connections.

        Raises:
            CannotStartError: it ended, or does not accept in time.
        """
        with self.log.open("ab") as log:
            server = self._server = subprocess.Popen(
                self._command,
                preexec_fn=self._begin,  # noqa: PLW1509
                cwd=self._folder,
                env={**os.environ, **self._env},
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + START_TIMEOUT
        while not _accepts(self.port):
            if server.poll() is not None or time.monotonic() > deadline:
                last = self.log.read_text(errors="replace").strip().splitlines()[-1:]
                msg = f"{Path(self._command[0]).name} did not start: {' '.join(last)}"
                raise CannotStartError(msg)
            time.sleep(0.05)

    def _begin(self) -> None:
        """Do what the new process must do first."""
        self._become()
        if self._postgresql:
            # SIGQUIT makes it kill its children by SIGKILL, which also ends those that are stopped.
            _end_with_parent(self._crash)

    @property
    def runs(self) -> bool:
        """Whether its main process has been started and has not ended."""
        return self._server is not None and self._server.poll() is None

    def stop(self) -> None:
        """Shut it down in order."""
        self._end(signal.SIGINT if self._postgresql else signal.SIGTERM)

    def crash(self) -> None:
        """End it without a chance to write anything. PostgreSQL's children would outlive a SIGKILL
        for a while.
        """
        self._end(self._crash)

    def _end(self, number: int) -> None:
        if self._server is None:
            return
        self._server.send_signal(number)
        try:
            self._server.wait(20)
        except subprocess.TimeoutExpired:
            self._server.send_signal(self._crash)
            try:
                self._server.wait(20)
            except subprocess.TimeoutExpired:  # it has been stopped, and hears nothing else
                self._server.kill()
                self._server.wait()


@contextmanager
def running(
    command: list[str], become: Callable[[], None], folder: Path, port: int
) -> Iterator[Process]:
    """A server process that accepts connections on `port`.

    Raises:
        CannotStartError: it ended, or does not accept in time.
    """
    process = Process(command, become, folder, port)
    try:
        process.start()
        yield process
    finally:
        process.stop()


def _accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


POSTGRESQL_PLACES = ("/usr/lib/postgresql/*/bin", "/usr/local/pgsql/bin")


@contextmanager
def postgresql(*, durable: bool = False, **settings: str) -> Iterator[tuple[str, Process]]:
    """A PostgreSQL that commits to memory, unless it is `durable`: a crash of the machine may lose
    it, a crash of a client not.
    """
    initdb = needed("initdb", "postgresql", *POSTGRESQL_PLACES)
    if durable:
        settings = {"fsync": "on", "full_page_writes": "on", **settings}
    with folder_of("postgres", on_disk=durable) as (folder, become):
        data = folder / "data"
        options = ["-A", "trust", "-U", "postgres", "-E", "UTF8", "--no-sync"]
        run([initdb, "-D", str(data), *options], become, folder)
        with serving(data, become, settings) as served:
            yield served


@contextmanager
def serving(
    data: Path, become: Callable[[], None], settings: Mapping[str, str]
) -> Iterator[tuple[str, Process]]:
    """The server of the folder `data`, and the URL of its administrator."""
    folder = data.parent
    port = free_port()
    options = {
        "listen_addresses": "127.0.0.1",
        "unix_socket_directories": str(folder),
        "max_connections": 300,
        "fsync": "off",
        "full_page_writes": "off",
        "shared_buffers": "128MB",
        **settings,
    }
    chosen = [part for name, value in options.items() for part in ("-c", f"{name}={value}")]
    server = str(
        Path(needed("initdb", "postgresql", *POSTGRESQL_PLACES)).resolve().parent / "postgres"
    )
    with running(
        [server, "-D", str(data), "-p", str(port), *chosen], become, folder, port
    ) as process:
        url = f"postgresql+psycopg://postgres@127.0.0.1:{port}/postgres"
        wait_until_ready(url)
        yield url, process


def wait_until_ready(url: str) -> None:
    """It accepts connections a moment before it lets anybody in."""
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        try:
            psycopg.connect(url.replace("+psycopg", ""), connect_timeout=2).close()
        except psycopg.OperationalError:
            time.sleep(0.05)
        else:
            return


DURABLE_BINLOG = (
    "--innodb-flush-log-at-trx-commit=1",
    "--log-bin=binlog",
    "--sync-binlog=1",
)
"""Options of a MariaDB or MySQL that loses no commit: they undo what the others save."""
MARIADB_PLACES = ("/usr/sbin", "/usr/bin", "/usr/local/bin")


def mariadb_server(folder: Path, port: int) -> list[str]:
    """The command of a MariaDB server whose files are in `folder`, and which has no data yet."""
    data = folder / "data"
    temporary = folder / "tmp"
    for made in (data, temporary):
        made.mkdir()
        shutil.chown(made, folder.owner())
    return [
        needed("mariadbd", "mariadb-server", *MARIADB_PLACES),
        "--no-defaults",
        f"--datadir={data}",
        # A server that starts removes every temporary table in its tmpdir: in a shared one those of
        # other servers too, which end.
        f"--tmpdir={temporary}",
        f"--port={port}",
        "--bind-address=127.0.0.1",
        f"--socket={folder}/socket",
        f"--pid-file={folder}/pid",
        "--innodb-flush-log-at-trx-commit=2",
        "--max-connections=300",
        # A client may stand still while it logs in.
        "--connect-timeout=60",
        "--skip-log-bin",
        "--max-allowed-packet=64M",
        "--innodb-buffer-pool-size=256M",
    ]


def install_mariadb(folder: Path, become: Callable[[], None]) -> None:
    """Make the first data of the server in `folder`: its root needs no password."""
    installer = needed("mariadb-install-db", "mariadb-server", *MARIADB_PLACES)
    # The installer runs a server as well.
    files = [f"--datadir={folder / 'data'}", f"--tmpdir={folder / 'tmp'}"]
    options = ["--auth-root-authentication-method=normal", "--skip-test-db"]
    run([installer, "--no-defaults", *files, *options], become, folder)


@contextmanager
def mariadb(*more: str, durable: bool = False) -> Iterator[tuple[str, Process]]:
    """A MariaDB whose root needs no password, reachable from this machine only; `more` are options
    of the server.
    """
    if durable:
        more = (*DURABLE_BINLOG, *more)
    with folder_of("mysql", on_disk=durable) as (folder, become):
        port = free_port()
        command = mariadb_server(folder, port)
        install_mariadb(folder, become)
        with running([*command, *more], become, folder, port) as process:
            yield mariadb_url(port), process


def mariadb_url(port: int) -> str:
    """The URL of the administrator of a private MariaDB."""
    return f"mariadb+pymysql://root@127.0.0.1:{port}/mysql"


OLDEST_MYSQL = (8, 0, 19)


def mysql_server(folder: Path, port: int) -> list[str]:
    """The command of a MySQL server whose files are in `folder`, and which has no data yet.

    Raises:
        CannotDownloadError: there is none on PATH, and none can be downloaded.
    """
    temporary = folder / "tmp"
    temporary.mkdir()
    shutil.chown(temporary, folder.owner())
    return [
        *_mysql_common(folder),
        f"--port={port}",
        "--bind-address=127.0.0.1",
        f"--socket={folder}/socket",
        f"--pid-file={folder}/pid",
        "--mysqlx=OFF",
        "--innodb-flush-log-at-trx-commit=2",
        "--max-connections=300",
        # A client may stand still while it logs in.
        "--connect-timeout=60",
        "--skip-log-bin",
        "--innodb-buffer-pool-size=256M",
        f"--tmpdir={temporary}",
        # What serves many cores and a monitor costs two cores a fifth of their time.
        "--loose-innodb-log-writer-threads=OFF",
        "--loose-performance-schema-consumer-global-instrumentation=OFF",
    ]


def _mysql_common(folder: Path) -> list[str]:
    return [_mysqld(), "--no-defaults", f"--datadir={folder / 'data'}", "--secure-file-priv="]


def install_mysql(folder: Path, become: Callable[[], None]) -> None:
    """Make the first data of the server in `folder`: its root needs no password."""
    run([*_mysql_common(folder), "--initialize-insecure"], become, folder)


@contextmanager
def mysql(*more: str, durable: bool = False) -> Iterator[tuple[str, Process]]:
    """A MySQL whose root needs no password, reachable from this machine only; `more` are options of
    the server.
    """
    if durable:
        more = (*DURABLE_BINLOG, *more)
    with folder_of("mysql", on_disk=durable) as (folder, become):
        port = free_port()
        command = mysql_server(folder, port)
        install_mysql(folder, become)
        with running([*command, *more], become, folder, port) as process:
            yield f"mysql+pymysql://root@127.0.0.1:{port}/mysql", process


def _mysqld() -> str:
    """Path of a MySQL server that is installed and new enough, else of an unpacked one.

    MariaDB's packages bring a `mysqld`, too; its version says what it is.
    """
    installed = find(
        "mysqld", "/usr/sbin", "/usr/local/bin", "/usr/local/mysql/bin", "/opt/mysql*/bin"
    )
    if installed:
        said = subprocess.run(
            [installed, "--version"], capture_output=True, text=True, check=False
        ).stdout
        version = re.search(r"Ver (\d+)\.(\d+)\.(\d+)", said)
        if version and "MariaDB" not in said and tuple(map(int, version.groups())) >= OLDEST_MYSQL:
            return installed
    try:
        return unstable.mysqld()
    except unstable.DownloadError as error:
        msg = f"no mysqld of MySQL is installed, and none can be downloaded ({error})"
        raise CannotDownloadError(msg) from None


class PgBouncer(Process):
    """A PgBouncer in transaction mode before a PostgreSQL whose users need no password."""

    def __init__(self, folder: Path, become: Callable[[], None]) -> None:
        """Start it after `lead_to`."""
        server = needed("pgbouncer", "pgbouncer", "/usr/sbin", "/usr/bin", "/usr/local/bin")
        self._config = folder / "pgbouncer.ini"
        super().__init__([server, str(self._config)], become, folder, free_port())

    def lead_to(self, host: str, port: int, user: str) -> None:
        """Send all users to the server at `host` and `port`, as `user`; also while it runs."""
        self._config.write_text(
            f"""[databases]
* = host={host} port={port} user={user}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {self.port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
max_client_conn = 500
default_pool_size = 20
server_login_retry = 0.1
ignore_startup_parameters = extra_float_digits
"""
        )
        if self._server is not None:
            self._server.send_signal(signal.SIGHUP)


@contextmanager
def bouncer(host: str, port: int, user: str) -> Iterator[PgBouncer]:
    """A PgBouncer that leads to the PostgreSQL at `host` and `port`."""
    with folder_of("postgres") as (folder, become):
        process = PgBouncer(folder, become)
        process.lead_to(host, port, user)
        try:
            process.start()
            yield process
        finally:
            process.stop()


@contextmanager
def pgbouncer(url: str) -> Iterator[int]:
    """The port of a PgBouncer in transaction mode before the PostgreSQL of `url` (whose user needs
    no password).
    """
    target = psycopg.conninfo.conninfo_to_dict(url.replace("+psycopg", ""))
    host, port, user = (str(target[name]) for name in ("host", "port", "user"))
    with bouncer(host, int(port), user) as process:
        yield process.port


@contextmanager
def redis() -> Iterator[str]:
    """A Redis that keeps nothing on disk."""
    server = needed("redis-server", "redis-server", "/usr/bin", "/usr/local/bin")
    with folder_of("redis") as (folder, become):
        port = free_port()
        command = [
            server,
            "--port",
            str(port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--appendonly",
            "no",
        ]
        with running(command, become, folder, port):
            yield f"redis://127.0.0.1:{port}"


STARTERS: dict[str, Callable[..., AbstractContextManager[tuple[str, Process]]]] = {
    "postgresql": postgresql,
    "mariadb": mariadb,
    "mysql": mysql,
}
