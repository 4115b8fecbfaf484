"""docs/howto/http_queues.md: the example in Node is run by Node."""

import asyncio
import os
import re
from pathlib import Path

import pytest

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.http import Queues, QueueTokens
from faststream_sqlbroker.http.server import ProbeServer
from tests.docs.test_other_languages import installed
from tests.faststream.conftest import Look, broker, heard, logger, look
from tests.http.conftest import logins

__all__ = ("broker", "heard", "logger", "look")
PAGE = Path(__file__).parent.parent.parent / "docs" / "howto" / "http_queues.md"
TOKENS = {"PUBLISH_TOKEN": "publish-token-1234", "CONSUME_TOKEN": "consume-token-1234"}


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_the_node_program(broker: SqlBroker, look: Look, tmp_path: Path) -> None:
    node = await asyncio.to_thread(installed, "node", "nodejs")
    [code] = re.findall(r"```js\n// client\n(.*?)```", PAGE.read_text(), re.DOTALL)
    tokens = QueueTokens(publish=TOKENS["PUBLISH_TOKEN"], consume=TOKENS["CONSUME_TOKEN"])
    app = broker.asgi(logins(), queues=Queues(queues={"orders": tokens}))
    server = ProbeServer(app, "127.0.0.1", 0)
    port = await server.start()
    program = tmp_path / "client.js"
    program.write_text(code)
    url = f"http://127.0.0.1:{port}"
    process = await asyncio.create_subprocess_exec(
        node,
        str(program),
        env={**os.environ, **TOKENS, "SERVER_URL": url},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    told, problems = await asyncio.wait_for(process.communicate(), 240)
    await server.stop()
    assert told == b"shipping tea\n", problems.decode()
    [row] = await look.rows(archive=True)
    assert (row["state"], row["key"]) == ("COMPLETED", "ann")
