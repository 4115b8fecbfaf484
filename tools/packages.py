"""System packages, where we may install them."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

POLICY = Path("/usr/sbin/policy-rc.d")
"""Asked by Debian's packages before they start their service; 101 forbids it."""


JAVA = "default-jre-headless"
"""The Java of this Debian: 17 in Debian 12, 21 in Debian 13."""

WAIT = ("-o", "DPkg::Lock::Timeout=300")
"""Another test process may be installing."""


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


def unpack(package: str, place: Path) -> str | None:
    """Unpack `package` into the new folder `place` without installing it; None, or why not in one
    line. Another process may do the same at the same time.
    """
    apt = shutil.which("apt-get")
    if apt is None:
        return f"install {package} yourself, there is no apt-get here"
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{package}-", dir=place.parent) as name:
        folder = Path(name)
        command = [apt, "download", "-qq", package]
        sudo = _sudo()
        if _run(command, folder) and (sudo is None or _update(sudo, apt) or _run(command, folder)):
            return f"apt-get download {package} failed"
        root = folder / "root"
        for deb in folder.glob("*.deb"):
            if _run(["dpkg-deb", "-x", str(deb), str(root)]):
                return f"dpkg-deb cannot unpack {deb.name}"
        root.chmod(0o755)
        if not place.exists():
            root.rename(place)
    return None


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
