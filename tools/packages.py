"""System packages, where we may install them."""

import os
import shutil
import subprocess
from pathlib import Path

from tools.unstable import DownloadError, kept

POLICY = Path("/usr/sbin/policy-rc.d")
"""Asked by Debian's packages before they start their service; 101 forbids it."""


JAVA = "default-jre-headless"
"""The Java of this Debian: 17 in Debian 12, 21 in Debian 13."""

WAIT = ("-o", "DPkg::Lock::Timeout=300")
"""Another test process may be installing."""


class UnpackError(Exception):
    """A package cannot be unpacked, for another reason than a failed download."""


def install(package: str) -> str | None:
    """Install `package` with apt, without starting its service; None, or why not in one line."""
    apt = shutil.which("apt-get")
    if apt is None:
        return f"install {package} yourself, there is no apt-get here"
    sudo = _sudo()
    if sudo is None:
        return f"apt-get install {package} needs root or sudo without a password"
    print(f"installing {package} ...", flush=True)
    forbid = not sudo and not POLICY.exists()
    if forbid:
        POLICY.write_text("#!/bin/sh\nexit 101\n")
        POLICY.chmod(0o755)
    try:
        command = [*sudo, apt, "install", "-y", "-qq", *WAIT, "--no-install-recommends", package]
        if _run(command) and (_update(sudo, apt) or _run(command)):
            return f"apt-get install {package} failed"
    finally:
        if forbid:
            POLICY.unlink()
    return None


def unpack(package: str, made: str) -> Path:
    """The cache's folder with the files of `package`, unpacked before or now without installing it;
    `made` is one of them.

    Raises:
        DownloadError: the package cannot be downloaded.
        UnpackError: it cannot be unpacked, or does not bring `made`.
    """
    place = kept(package, made, lambda folder: _unpack(folder, package))
    if not (place / made).exists():
        raise UnpackError(f"{package} does not bring {made}")
    return place


def _unpack(folder: Path, package: str) -> None:
    apt = shutil.which("apt-get")
    if apt is None:
        raise UnpackError(f"install {package} yourself, there is no apt-get here")
    command = [apt, "download", "-qq", package]
    sudo = _sudo()
    if _run(command, folder) and (sudo is None or _update(sudo, apt) or _run(command, folder)):
        raise DownloadError(f"apt-get download {package} failed")
    root = folder / "unpacked"
    for deb in folder.glob("*.deb"):
        if _run(["dpkg-deb", "-x", str(deb), str(root)]):
            raise UnpackError(f"dpkg-deb cannot unpack {deb.name}")
    root.chmod(0o755)


def _sudo() -> list[str] | None:
    """What goes before a command that needs root."""
    if os.geteuid() == 0:
        return []
    sudo = shutil.which("sudo")
    if (
        sudo
        and subprocess.run([sudo, "-n", "true"], check=False, capture_output=True).returncode == 0
    ):
        return [sudo, "-n"]
    return None


def _update(sudo: list[str], apt: str) -> int:
    return _run([*sudo, apt, "update", "-qq", *WAIT])


def _run(command: list[str], cwd: Path | None = None) -> int:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    return subprocess.run(
        command, cwd=cwd, env=environment, check=False, capture_output=True
    ).returncode
