"""A TCP proxy between a test and its server, which can stall, refuse or swallow an answer."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sqlalchemy import URL, make_url

COMMIT = re.compile(rb"COMMIT(;|\0|$)")
"""The statement as the drivers send it, not the isolation level of that name."""
ROLLBACK = re.compile(rb"ROLLBACK")


class Proxy:
    """Passes bytes on until told otherwise."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self.port = 0
        self.swallow_answer_to: re.Pattern[bytes] | None = None
        """When a client sends this, it reaches the server, but the connection ends before the answer."""
        self.swallowed = 0
        self.die_at: re.Pattern[bytes] | None = None
        """When a client sends this, its connection passes nothing on any more, without a word."""
        self.died = 0
        self._flowing = asyncio.Event()
        self._flowing.set()

    async def start(self) -> None:
        """Listen, on the same port as before."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Refuse connections and end all."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._writers):
            writer.transport.abort()
        self._flowing.set()

    def stall(self) -> None:
        """Keep every connection open, but pass nothing on."""
        self._flowing.clear()

    def flow(self) -> None:
        """Pass bytes on again."""
        self._flowing.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            server_reader, server_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        pair = {writer, server_writer}
        self._writers |= pair
        cut = asyncio.Event()
        try:
            await asyncio.gather(
                self._pass(reader, server_writer, cut, outward=True),
                self._pass(server_reader, writer, cut, outward=False),
            )
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            for each in pair:
                each.transport.abort()
            self._writers -= pair

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, cut: asyncio.Event, *, outward: bool
    ) -> None:
        while data := await reader.read(65536):
            await self._flowing.wait()
            if outward and self.die_at and self.die_at.search(data):
                self.die_at = None
                self.died += 1
                await asyncio.Event().wait()
            if outward and self.swallow_answer_to and self.swallow_answer_to.search(data):
                self.swallow_answer_to = None
                cut.set()
            if not outward and cut.is_set():
                # The server has answered, so it has done what it was told.
                self.swallowed += 1
                raise ConnectionResetError
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError


@asynccontextmanager
async def proxied(url: str | URL) -> AsyncIterator[tuple[Proxy, URL]]:
    """A running proxy to the server of `url`, and the URL that leads through it."""
    url = make_url(url)
    default = 5432 if url.get_backend_name() == "postgresql" else 3306
    proxy = Proxy(url.host or "127.0.0.1", url.port or default)
    await proxy.start()
    try:
        yield proxy, url.set(host="127.0.0.1", port=proxy.port)
    finally:
        await proxy.stop()
