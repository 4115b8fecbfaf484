"""A TCP proxy between a test and its server, which can stall, refuse or swallow an answer."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from sqlalchemy import URL, make_url

COMMIT = re.compile(rb"COMMIT(;|\0|$)")
"""The statement as the drivers send it, not the isolation level of that name; in PostgreSQL's
protocol also a prepared statement that writes outside of a transaction, and so commits by itself.
"""
ROLLBACK = re.compile(rb"ROLLBACK")


class Session:
    """What one PostgreSQL client has prepared, and whether it is in a transaction."""

    def __init__(self) -> None:
        self.round_trips = 0
        """Messages after which a client waits for the answer."""
        self._texts: dict[bytes, bytes] = {}
        self._sent = b""
        self._idle = False

    def commits(self, data: bytes) -> bool:
        """Whether `data` runs a prepared statement that writes and commits by itself."""
        found, self._sent = False, self._sent + data
        while len(self._sent) >= 5 and chr(self._sent[0]) in "PBDECHSQX":
            end = 1 + int.from_bytes(self._sent[1:5])
            if len(self._sent) < end:
                break
            kind, content, self._sent = self._sent[:1], self._sent[5:end], self._sent[end:]
            first, _, rest = content.partition(b"\0")
            self.round_trips += kind in {b"S", b"Q"}
            if kind == b"P":
                self._texts[first] = rest.partition(b"\0")[0]
            elif kind == b"B":
                text = self._texts.get(rest.partition(b"\0")[0], b"")
                found |= self._idle and bool(re.search(rb"\b(INSERT|UPDATE|DELETE)\b", text))
        else:
            if self._sent and chr(self._sent[0]) not in "PBDECHSQX":
                self._sent = b""  # the start of the connection, a password
        return found

    def answered(self, data: bytes) -> None:
        """Note from the server's `data` whether a transaction is open."""
        if data[-6:-1] == b"Z\0\0\0\x05":
            self._idle = data[-1:] == b"I"


class Proxy:
    """Passes bytes on until told otherwise."""

    def __init__(self, host: str, port: int, *, postgresql: bool = True) -> None:
        self._target = (host, port)
        self._postgresql = postgresql
        self._writers: set[asyncio.StreamWriter] = set()
        self._sessions: list[Session] = []
        self._server: asyncio.Server | None = None
        self.port = 0
        self.swallow_answer_to: re.Pattern[bytes] | None = None
        """When a client sends this, it reaches the server, but the connection ends before the
        answer."""
        self.swallowed = 0
        self.die_at: re.Pattern[bytes] | None = None
        """When a client sends this, its connection passes nothing on any more, without a word."""
        self.died = 0
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._vanished = False
        self._stopped = asyncio.Event()

    @property
    def round_trips(self) -> int:
        """Of all PostgreSQL clients so far."""
        return sum(session.round_trips for session in self._sessions)

    async def start(self) -> None:
        """Listen, on the same port as before."""
        self._vanished = False
        self._stopped.clear()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def lead_to(self, port: int) -> None:
        """Let new connections reach the server at `port` of the same machine."""
        self._target = (self._target[0], port)

    async def stop(self) -> None:
        """Refuse connections and end all; the server has been told when this returns."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self._flowing.set()
        self._stopped.set()
        writers = list(self._writers)
        for writer in writers:
            writer.transport.abort()
        for writer in writers:
            # The event loop closes an aborted socket in its next turn, which a caller may not give
            # it.
            with suppress(OSError):
                await writer.wait_closed()

    def vanish(self) -> None:
        """Pass nothing on, not even that a client has ended: the server keeps its connections until
        `stop`."""
        self._vanished = True
        self.stall()

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
        session = Session()
        self._sessions.append(session)
        try:
            await asyncio.gather(
                self._pass_out(reader, server_writer, cut, session),
                self._pass_back(server_reader, writer, cut, session),
            )
        except (OSError, asyncio.IncompleteReadError):
            if self._vanished:
                await self._stopped.wait()
        finally:
            for each in pair:
                each.transport.abort()
            self._writers -= pair

    async def _pass_out(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        cut: asyncio.Event,
        session: Session,
    ) -> None:
        while data := await reader.read(65536):
            await self._flowing.wait()
            commits = self._postgresql and session.commits(data)
            if self._is_in(self.die_at, data, commits=commits):
                self.die_at = None
                self.died += 1
                await self._stopped.wait()
                break
            if self._is_in(self.swallow_answer_to, data, commits=commits):
                self.swallow_answer_to = None
                cut.set()
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError

    async def _pass_back(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        cut: asyncio.Event,
        session: Session,
    ) -> None:
        while data := await reader.read(65536):
            await self._flowing.wait()
            if cut.is_set():
                # The server has answered, so it has done what it was told.
                self.swallowed += 1
                raise ConnectionResetError
            session.answered(data)
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError

    @staticmethod
    def _is_in(wanted: re.Pattern[bytes] | None, data: bytes, *, commits: bool) -> bool:
        return wanted is not None and bool(wanted.search(data) or (wanted is COMMIT and commits))


@asynccontextmanager
async def proxied(url: str | URL) -> AsyncIterator[tuple[Proxy, URL]]:
    """A running proxy to the server of `url`, and the URL that leads through it."""
    url = make_url(url)
    postgresql = url.get_backend_name() == "postgresql"
    default = 5432 if postgresql else 3306
    proxy = Proxy(url.host or "127.0.0.1", url.port or default, postgresql=postgresql)
    await proxy.start()
    try:
        yield proxy, url.set(host="127.0.0.1", port=proxy.port)
    finally:
        await proxy.stop()
