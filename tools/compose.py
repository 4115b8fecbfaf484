"""Servers from docker-compose.yml, where a container engine runs."""

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tools.private import CannotStartError

URLS = {
    "postgresql": "postgresql+psycopg://postgres@127.0.0.1:15432/postgres",
    "mariadb": "mariadb+pymysql://root@127.0.0.1:13306/mysql",
    "mysql": "mysql+pymysql://root@127.0.0.1:13307/mysql",
}
FILE = Path(__file__).parent.parent / "docker-compose.yml"
START_TIMEOUT = 120.0


@contextmanager
def start(kind: str, answers: Callable[[str], bool]) -> Iterator[str]:
    """Start the service and leave it running for the next time.

    Raises:
        CannotStartError: no engine answers, or the server does not.
    """
    docker = shutil.which("docker")
    command = [docker or "", "compose", "-f", str(FILE)]
    if (
        docker is None
        or subprocess.run([docker, "info"], check=False, capture_output=True).returncode
    ):
        msg = "no container engine answers"
        raise CannotStartError(msg)
    if subprocess.run([*command, "up", "-d", kind], check=False, capture_output=True).returncode:
        msg = f"docker compose up {kind} failed"
        raise CannotStartError(msg)
    deadline = time.monotonic() + START_TIMEOUT
    while not answers(URLS[kind]):
        if time.monotonic() > deadline:
            msg = f"the {kind} container does not let us in"
            raise CannotStartError(msg)
        time.sleep(0.5)
    yield URLS[kind]
