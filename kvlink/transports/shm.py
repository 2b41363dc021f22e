"""Shared memory: both processes map the other's pool, so a get or a put is a strided copy and nothing else.

Attaching: the accepting side listens on an abstract Unix socket whose name and a one-time token travel in its hello.
The dialling side connects, shows the token, and both hand over descriptors of their pools and state words (`Channel`).
That this works *is* the proof that the two are on one host; no names are compared. Descriptors are read-only at first;
one that can write follows over the same channel when a write lease is given (`share`), so a decoder's bug cannot damage
a prefill's memory that it was never asked to fill.

The peer plays no part in a transfer: its process may be stopped, its loop blocked. When it dies its memory stays mapped
here until we let go, and the kernel tells us at once (pidfd).
"""

from __future__ import annotations

import errno
import logging
import secrets
from typing import Final

import anyio
from anyio.abc import TaskGroup, UNIXSocketStream

from kvlink.acceptor import Acceptor, Complaints, Strangers
from kvlink.config import ClusterConfig
from kvlink.errors import KVLinkError, LinkError, ListenError
from kvlink.memory.copying import Copier
from kvlink.memory.regions import LocalMemory
from kvlink.transports.base import Endpoint, Offer, Transport
from kvlink.transports.shm_channel import TOKEN_NBYTES, Channel
from kvlink.transports.shm_endpoint import GONE, ShmEndpoint

_log = logging.getLogger(__name__)

_MAX_STRANGERS: Final = 256


class _Expectation:
    """A handshake that waits for its peer to attach."""

    def __init__(self) -> None:
        self.settled = anyio.Event()
        self.is_taken = False
        self.is_wanted = True
        self.endpoint: ShmEndpoint | None = None
        self.error: KVLinkError | None = None


class ShmTransport(Transport):
    """Shared memory for one cluster.

    Args:
        local: the cluster's regions.
        copier: the cluster's copy threads.
    """

    name = "shm"

    def __init__(self, local: LocalMemory, copier: Copier, config: ClusterConfig) -> None:
        self._local = local
        self._copier = copier
        self._config = config
        self._address = f"kvlink-{secrets.token_hex(16)}"
        self._expected: dict[bytes, _Expectation] = {}
        self._strangers = Strangers(max(_MAX_STRANGERS, config.max_links))
        self._complaints = Complaints(_log)
        self._tasks: TaskGroup | None = None
        self._acceptor: Acceptor | None = None

    async def start(self, tasks: TaskGroup) -> None:
        """See `Transport.start`.

        Raises:
            ListenError: there is no socket to be had.
        """
        self._tasks = tasks
        try:
            listener = await anyio.create_unix_listener("\0" + self._address)
        except OSError as exc:
            raise ListenError(f"cannot listen for peers of this host: {exc.strerror or exc}") from exc
        self._acceptor = Acceptor(listener, self._attach_peer, tasks)

    def offer(self) -> Offer | None:
        token = secrets.token_bytes(TOKEN_NBYTES)
        self._expected[token] = _Expectation()
        return Offer(token + self._address.encode())

    async def accept(self, offer: Offer, card: bytes) -> Endpoint:
        expectation = self._expected[offer.card[:TOKEN_NBYTES]]
        await expectation.settled.wait()
        if expectation.endpoint is None:
            raise expectation.error or LinkError("the peer could not attach to shared memory")
        endpoint, expectation.endpoint = expectation.endpoint, None
        return endpoint

    def withdraw(self, offer: Offer) -> None:
        expectation = self._expected.pop(offer.card[:TOKEN_NBYTES], None)
        if expectation is not None:
            expectation.is_wanted = False
            if expectation.endpoint is not None:
                expectation.endpoint.abort()

    async def dial(self, card: bytes) -> Endpoint:
        assert self._tasks is not None
        token, address = card[:TOKEN_NBYTES], card[TOKEN_NBYTES:]
        try:
            stream = await anyio.connect_unix("\0" + address.decode())
        except (OSError, UnicodeError) as exc:
            why = (isinstance(exc, OSError) and exc.strerror) or exc
            where = "" if _is_shortage(exc) else "the peer is not on this host "
            raise LinkError(f"no shared memory: {where}({why})") from exc
        channel = Channel(stream)
        try:
            channel.check_user(self._config.allowed_uids)  # before the token: it is for nobody else
            await channel.send_token(token)
            endpoint = ShmEndpoint(self._local, self._copier, channel, self._config)
            try:
                await endpoint.exchange(is_first=True)
            except BaseException:
                endpoint.abort()
                with anyio.CancelScope(shield=True):
                    await endpoint.aclose()
                raise
        except GONE as exc:
            await channel.aclose()
            why = str(exc) if _is_shortage(exc) else "the peer refused to exchange descriptors"
            raise LinkError(f"no shared memory: {why}") from exc
        except BaseException:
            await channel.aclose()
            raise
        self._tasks.start_soon(endpoint.run)
        return endpoint

    async def aclose(self) -> None:
        if self._acceptor is not None:
            await self._acceptor.aclose()

    async def _attach_peer(self, stream: anyio.abc.SocketStream) -> None:
        """Serve one connection: who it is, the exchange, then whatever is shared later, until the link ends."""
        assert isinstance(stream, UNIXSocketStream)
        channel = Channel(stream)
        expectation: _Expectation | None = None
        endpoint: ShmEndpoint | None = None
        is_attached = False
        try:
            with self._strangers.waiting(self._config.handshake_timeout_s):
                channel.check_user(self._config.allowed_uids)
                expectation = self._expected.get(await channel.receive_token())
                if expectation is None or expectation.is_taken:
                    expectation = None
                    self._complaints.say(
                        "refused to share memory with process %d: no handshake of ours has its token", channel.peer()[0]
                    )
                    return
                expectation.is_taken = True
                endpoint = ShmEndpoint(self._local, self._copier, channel, self._config)
                await endpoint.exchange(is_first=False)
                is_attached = True
            if expectation is None or endpoint is None or not is_attached or not expectation.is_wanted:
                return  # too slow, or nobody waits any more
            expectation.endpoint = endpoint
            expectation.settled.set()
            await endpoint.run()
            if expectation.endpoint is None:
                endpoint = None  # accepted: the link closes it
        except KVLinkError as exc:
            if expectation is not None:
                expectation.error = exc  # who waits for it complains
            else:
                self._complaints.say("refused to share memory: %s", str(exc))
        except GONE:
            pass
        except Exception as exc:  # a fault of ours costs this one handshake, and not the cluster
            self._complaints.say("failed to share memory with process %d", channel.peer()[0], cause=exc)
            if expectation is not None:
                expectation.error = LinkError(f"sharing memory failed: {type(exc).__name__}: {exc}")
        finally:
            if expectation is not None:
                expectation.settled.set()
            if endpoint is not None:
                endpoint.abort()
                with anyio.CancelScope(shield=True):
                    await endpoint.aclose()
            elif not is_attached:
                await channel.aclose()


def _is_shortage(error: Exception) -> bool:
    """Whether it is this process that lacks something."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)
