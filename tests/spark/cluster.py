"""A standalone cluster of one worker on this machine, from pyspark's own classes."""

import asyncio
import os
import re
import subprocess
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import pyspark

from tests.helpers import eventually

SPARK_HOME = Path(pyspark.__file__).parent
START = 240.0
"""Seconds that Java may need on a busy machine."""
RUN = 900.0


class Cluster:
    """A master and a worker, in processes of their own."""

    def __init__(self, folder: Path, *, cores: int = 2, memory: str = "2g") -> None:
        """Logs and the executors' folders are in `folder`; the worker offers `cores` and `memory`,
        however many this machine has."""
        self.folder = folder
        self.offer = ("--cores", str(cores), "--memory", memory)
        self.master = ""
        self.env = os.environ | {
            "SPARK_HOME": str(SPARK_HOME),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_PUBLIC_DNS": "127.0.0.1",
            "SPARK_DAEMON_MEMORY": "256m",
        }
        # The tests set options for launchers, daemons and executors that live too briefly for
        # Java's slow compiler. Benchmarks set none.
        if options := os.environ.get("SPARK_SUBMIT_OPTS"):
            self.env["JDK_JAVA_OPTIONS"] = options
        # The executors' Python is said by each job; that of these tests has all that there is.
        self.env.pop("PYSPARK_PYTHON", None)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        try:
            # They choose their ports.
            self._start("master.Master", "--port", "0", "--webui-port", "0")
            self.master = asyncio.run(eventually(self._address, START, 0.1))
            options = (*self.offer, "--work-dir", str(self.folder / "work"))
            self._start("worker.Worker", *options, "--webui-port", "0", self.master)
            asyncio.run(eventually(self._registered, START, 0.1))
        except BaseException as error:
            self._stack.close()
            error.add_note(self.log("master.Master")[-2000:] + self.log("worker.Worker")[-2000:])
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()

    def log(self, name: str) -> str:
        """What the process has printed."""
        path = self.folder / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def _address(self) -> str:
        found = re.search(r"Starting Spark master at (spark://\S+)", self.log("master.Master"))
        return found[1] if found else ""

    def _registered(self) -> bool:
        return "Registering worker" in self.log("master.Master")

    def submit(
        self, job: Path, *options: str | Path, cwd: Path, env: Mapping[str, str]
    ) -> "subprocess.CompletedProcess[str]":
        """Run `job` by spark-submit in client mode, in the folder `cwd`."""
        ours = ["--conf", "spark.driver.host=127.0.0.1", "--conf", "spark.ui.enabled=false"]
        ours += ["--conf", "spark.log.level=ERROR", "--executor-memory", "1g"]
        submit = str(SPARK_HOME / "bin" / "spark-submit")
        command: list[str | Path] = [submit, "--master", self.master, *ours]
        return subprocess.run(
            [*command, *options, job],
            cwd=cwd,
            env=self.env | dict(env),
            capture_output=True,
            text=True,
            timeout=RUN,
            check=False,
        )

    def _start(self, name: str, *options: str) -> None:
        command = [str(SPARK_HOME / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}"]
        with (self.folder / f"{name}.log").open("w") as log:
            process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", *options],
                cwd=self.folder,
                env=self.env,
                stdout=log,
                stderr=log,
            )
        self._stack.callback(process.wait, 60)
        self._stack.callback(process.kill)
