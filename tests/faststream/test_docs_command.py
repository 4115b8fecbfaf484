"""`faststream docs gen` and `faststream docs serve` with an application of ours."""

import asyncio
import json
import socket
import urllib.request
from pathlib import Path

import pytest
import yaml

from tests.forked import finished, python
from tests.helpers import eventually

COMMAND = ["-m", "faststream", "docs"]
APP = """
from faststream import FastStream
from faststream_sqlbroker import SqlBroker

broker = SqlBroker("postgresql+asyncpg://ann:hunter2@db.example/shop")


@broker.subscriber("orders", "returns")
@broker.publisher("confirmed")
async def confirm(number: int) -> str:
    return f"confirmed {number}"


app = FastStream(broker)
"""
CHANNELS = {"orders:Confirm", "returns:Confirm", "confirmed:Publisher"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shop_app.py").write_text(APP)
    return tmp_path


@pytest.mark.parametrize("form", ["json", "yaml"])
def test_a_generated_document(folder: Path, form: str) -> None:
    option = ["--yaml"] if form == "yaml" else []
    command = [*COMMAND, "gen", "shop_app:app", *option, "--out", f"asyncapi.{form}"]
    done = finished(*command, folder=folder)
    assert done.returncode == 0, done.stderr
    text = (folder / f"asyncapi.{form}").read_text()
    document = json.loads(text) if form == "json" else yaml.safe_load(text)
    assert set(document["channels"]) == CHANNELS
    [server] = document["servers"].values()
    assert (server["host"], server["pathname"]) == ("db.example", "/shop")
    assert "hunter2" not in text


async def test_a_served_document(folder: Path) -> None:
    kept = socket.socket()
    # No other process is given the port. A server may listen at it, as both may use it again.
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind(("127.0.0.1", 0))
    port = kept.getsockname()[1]
    said = folder / "said"
    address = ("--host", "127.0.0.1", "--port", str(port))
    serving = python(*COMMAND, "serve", "shop_app:app", *address, said=said, folder=folder)

    def page() -> str:
        assert serving.poll() is None, said.read_text()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=60) as answer:
                return str(answer.read().decode())
        except OSError:
            return ""

    try:
        shown = await eventually(lambda: asyncio.to_thread(page), step=0.1)
    finally:
        serving.kill()
        kept.close()
    assert all(channel in shown for channel in CHANNELS)
