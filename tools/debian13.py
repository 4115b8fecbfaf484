"""README's two commands in a fresh Debian 13: a system in a folder, removed at the end.

    python -m tools.debian13 [ARGUMENTS...]

runs `./dev demo` and `./dev test ARGUMENTS...` in a clone of the last commit. It needs root. The
mirror, the settings of apt and pip, and the certificates are this machine's own.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from tools import servers
from tools.packages import install
from tools.unstable import DownloadError, mirror

ROOT = Path(__file__).parent.parent
SUITE = "trixie"
PACKAGES = ("python3", "python3-venv", "git", "ca-certificates")
PLACE = "/var/tmp"  # noqa: S108
"""Not in memory: the system has 420 MB, and with all that the tests install some 5 GB."""
PASSED = re.compile(r"CI|(PIP|SSL_CERT)_.*|.*_(proxy|PROXY)|.*_CA_BUNDLE")
"""Variables that the commands get, too; all others are not those of a fresh system."""
BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")

# The mounts go with their namespace, and so do all processes, whatever ends this one.
APART = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
MOUNTED = """
mount --rbind /dev "$0/dev"
mount --rbind /sys "$0/sys"
mount -t tmpfs shm "$0/dev/shm"
mount -t proc proc "$0/proc"
exec chroot "$0" "$@"
"""
# The shell is the first process, and reaps those that have lost their parent: it execs nothing.
COMMANDS = """
update-ca-certificates >/dev/null 2>&1
cd /work/main
./dev demo
./dev test "$@" || exit
"""


class CannotRunError(Exception):
    """The commands cannot be tried here; the text says why, in one line."""


def make(system: Path) -> None:
    """Fill the folder `system` with Debian 13, this machine's settings and the clone.

    Raises:
        CannotRunError: debootstrap is missing and cannot be installed, or has failed.
    """
    if not shutil.which("debootstrap") and (problem := install("debootstrap")):
        raise CannotRunError(problem)
    try:
        source = mirror()
    except DownloadError as error:
        raise CannotRunError(str(error)) from None
    print("making a Debian 13 ...", flush=True)
    included = f"--include={','.join(PACKAGES)}"
    command = [*APART, "debootstrap", "--variant=minbase", included, SUITE, str(system), source]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip().splitlines()[-1:]
        msg = f"debootstrap failed: {' '.join(said)}"
        raise CannotRunError(msg)
    copy_settings(system)
    work = system / "work"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(work / "main")], check=True)
    if (ROOT.parent / "shared").is_dir():
        shutil.copytree(ROOT.parent / "shared", work / "shared")


def copy_settings(system: Path) -> None:
    """How this machine fetches packages, and whom it trusts."""
    fetching = subprocess.run(["apt-config", "dump", "Acquire"], capture_output=True, check=True)
    (system / "etc/apt/apt.conf.d/machine").write_bytes(fetching.stdout)
    for name in ("etc/pip.conf", "etc/apt/auth.conf", "etc/apt/auth.conf.d"):
        path = Path("/", name)
        if path.is_dir():
            shutil.copytree(path, system / name, dirs_exist_ok=True)
        elif path.exists():
            shutil.copy(path, system / name)
    with (system / "etc/hosts").open("a") as hosts:
        hosts.write(f"127.0.1.1\t{socket.gethostname()}\n")  # as Debian's installer does
    if BUNDLE.exists():
        shutil.copy(BUNDLE, system / "usr/local/share/ca-certificates/machine.crt")


def run(system: Path, arguments: list[str]) -> int:
    """The exit code of the two commands."""
    passed = {name: value for name, value in os.environ.items() if PASSED.fullmatch(name)}
    fresh = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
    inside = ["sh", "-euc", COMMANDS, "dev", *arguments]
    command = [*APART, "sh", "-euc", MOUNTED, str(system), *inside]
    return subprocess.run(
        command, env={**passed, **fresh, "HOME": "/root", "LANG": "C.UTF-8"}, check=False
    ).returncode


def check() -> None:
    """The network is this machine's, and so would be servers that tests find there.

    Raises:
        CannotRunError: we are not root, or a server listens where tests look for one.
    """
    if os.geteuid() != 0:
        msg = "debootstrap and chroot need root"
        raise CannotRunError(msg)
    for kind, urls in servers.LISTENING.items():
        for url in urls:
            if servers.problem_of(kind, url) is None:
                msg = f"a {kind} server of this machine listens at {url}: stop it first"
                raise CannotRunError(msg)


def main(arguments: list[str]) -> int:
    """The command line."""
    servers.leave_in_order()
    try:
        check()
        with tempfile.TemporaryDirectory(prefix="debian13-", dir=PLACE) as name:
            system = Path(name)
            system.chmod(0o755)
            make(system)
            return run(system, arguments)
    except CannotRunError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
