"""`faststream docs gen` and `faststream docs serve` with an application of ours."""

import asyncio
import json
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from urllib.error import URLError

import pytest
import yaml

from tests.helpers import eventually

COMMAND = [sys.executable, "-m", "faststream", "docs"]
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
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=240)
    text = (folder / f"asyncapi.{form}").read_text()
    document = json.loads(text) if form == "json" else yaml.safe_load(text)
    assert set(document["channels"]) == CHANNELS
    [server] = document["servers"].values()
    assert (server["host"], server["pathname"]) == ("db.example", "/shop")
    assert "hunter2" not in text


async def test_a_served_document(folder: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serving = subprocess.Popen(
        [*COMMAND, "serve", "shop_app:app", "--host", "127.0.0.1", "--port", str(port)],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def page() -> str:
        assert serving.poll() is None, "the server has ended"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=60) as answer:
                return str(answer.read().decode())
        except URLError:
            return ""

    try:
        shown = await eventually(lambda: asyncio.to_thread(page), step=0.1)
    finally:
        serving.kill()
        serving.wait()
    assert all(channel in shown for channel in CHANNELS)
