"""The first messages of a connection, from both sides.

::

    dialler                               acceptor
      Hello(expects=B)      ------------>   checks versions, ids, room
                            <------------   Hello(offer of its transports), or Refuse
      checks id, version
      attaches a transport  <~~~~~~~~~~~>   (shm: descriptors over a Unix socket)
      Ready(transport, why) ------------>   takes its side of the transport
                            <------------   Ready

Where a secret is set, `Challenge` goes both ways first, and each message above travels in `Sealed` (see `links.seal`):
one round trip more, and nobody without the secret learns who we are, what we offer, or the token for the descriptors.

Whoever finds a mismatch sends `Refuse` with the field and both values and raises the same text, so that both sides
fail, and both say why. The checks are plain functions of the two hellos.
"""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import anyio
from anyio.abc import ByteStream
from anyio.streams.tls import TLSAttribute
from msgspec import structs

from kvlink.errors import HandshakeError, LinkError, ProtocolError, StatusCode, error_for
from kvlink.geometry import Role
from kvlink.links.seal import Seal, WrongProofError, make_nonce
from kvlink.loops import send_all, until_readable
from kvlink.transports.base import Endpoint, Offer, Transport
from kvlink.wire import PROTOCOL_VERSION, Challenge, FrameDecoder, Hello, Message, Ready, Refuse, Sealed, encode

_M = TypeVar("_M", Challenge, Hello, Ready)

_NO_FAILURES = frozenset({StatusCode.LLM_ALREADY_LINK, StatusCode.LLM_REPEAT_REQUEST})
_ROLES = frozenset(int(role) for role in Role)
SECRET = "secret"
CROSSED = "crossed"
"""The field of a `Refuse` that means: I am dialling you at this moment, and my connection is the one that stays."""


@dataclass(frozen=True, slots=True)
class Greeted:
    """What a handshake leaves behind: an open conversation with a known peer, and a transport between the two."""

    stream: ByteStream
    decoder: FrameDecoder
    hello: Hello
    endpoint: Endpoint
    reason: str


class RefusedError(HandshakeError):
    """One side refuses the handshake because of `field`."""

    def __init__(self, message: str, *, field: str, status: StatusCode | None = None, peer: int | None = None) -> None:
        super().__init__(message, status=status, peer=peer, phase="hello")
        self.field = field


def check_hello(ours: Hello, theirs: Hello, *, whom: str, expects: int | None) -> None:
    """Refuse a peer that speaks another protocol or is somebody else.

    Args:
        whom: how to name the peer in errors: its address, or where it came from.
        expects: the cluster id that we dialled; None on the accepting side.
    """
    if theirs.version != ours.version:
        raise _mismatch(whom, "protocol version", ours.version, theirs.version)
    if theirs.role not in _ROLES:
        raise RefusedError(f"{whom} has role {theirs.role}; roles are {sorted(_ROLES)}", field="role")
    if theirs.incarnation == ours.incarnation:
        raise RefusedError(f"{whom} is this very cluster {ours.cluster_id}; link to another one", field="incarnation")
    if expects is not None and theirs.cluster_id != expects:
        raise _mismatch(whom, "cluster id", f"{expects} (dialled)", f"{theirs.cluster_id} (it answered)")
    if theirs.expects is not None and theirs.expects != ours.cluster_id:
        raise _mismatch(whom, "cluster id", f"{ours.cluster_id} (it reached)", f"{theirs.expects} (it dialled)")
    if theirs.cluster_id == ours.cluster_id:
        raise RefusedError(
            f"{whom} also calls itself cluster {ours.cluster_id}; cluster ids must differ", field="cluster id"
        )


def _mismatch(whom: str, name: str, ours: object, theirs: object, *, field: str | None = None) -> RefusedError:
    return RefusedError(f"{whom}: {name} does not match: ours is {ours}, theirs is {theirs}", field=field or name)


def _binding(stream: ByteStream) -> bytes:
    """Return what identifies the TLS connection, the same on both sides of it; nothing where there is none.

    The Finished message of the client, which covers keys and certificates. RFC 5929 defines it up to TLS 1.2; in 1.3 it
    is the same message, over more.
    """
    return stream.extra(TLSAttribute.channel_binding_tls_unique, None) or b""


async def greet_as_dialler(
    stream: ByteStream,
    ours: Hello,
    transports: Sequence[Transport],
    *,
    whom: str,
    expects: int,
    hand_over: Callable[[Hello], Awaitable[None]],
    secret: bytes | None = None,
) -> Greeted:
    """Run the dialling side. The stream is the caller's to close when this fails.

    Args:
        hand_over: awaited with the peer's hello before our `Ready`: when it returns, nothing is written over older
            links to that life any more.

    Raises:
        HandshakeError: a mismatch, found here or there.
        LinkError: the peer hung up, or no transport reaches it.
    """
    talk = _Conversation(stream, whom)
    async with talk:
        if secret is not None:
            await talk.prove_as_dialler(secret)
        await talk.send(structs.replace(ours, expects=expects))
        hello = await talk.receive(Hello)
        check_hello(ours, hello, whom=whom, expects=expects)
        endpoint, reason = await _attach(transports, hello, whom)
        try:
            await hand_over(hello)
            await talk.send(Ready(transport=endpoint.name, reason=reason[:1000], card=endpoint.card))
            await talk.receive(Ready)
        except BaseException:
            endpoint.abort()
            with anyio.CancelScope(shield=True):
                await endpoint.aclose()
            raise
    return Greeted(stream, talk.decoder, hello, endpoint, reason)


async def greet_as_acceptor(
    stream: ByteStream,
    ours: Hello,
    transports: Sequence[Transport],
    *,
    whom: str,
    admit: Callable[[Hello], None],
    settle: Callable[[Hello], Awaitable[None]],
    hand_over: Callable[[Hello], Awaitable[None]],
    enter: Callable[[Greeted], None],
    secret: bytes | None = None,
) -> None:
    """Run the accepting side. The stream is the caller's to close when this fails.

    Args:
        admit: raises `RefusedError` for a peer that may not link now.
        settle: awaited with the peer's hello before ours is sent: the last look at an older link of that peer.
        hand_over: as for `greet_as_dialler`.
        enter: called before our `Ready` with what the handshake leaves behind, which is the caller's from then on,
            also when this fails afterwards: once the dialler knows that it is linked, so are we.
    """
    talk = _Conversation(stream, whom)
    offers = {transport.name: (transport, transport.offer()) for transport in transports}
    try:
        async with talk:
            if secret is not None:
                await talk.prove_as_acceptor(secret)
            hello = await talk.receive(Hello)
            check_hello(ours, hello, whom=whom, expects=None)
            admit(hello)
            await settle(hello)
            await talk.send(_with_offers(ours, {name: offer for name, (_, offer) in offers.items()}))
            ready = await talk.receive(Ready)
            transport, offer = offers.get(ready.transport, (None, None))
            if transport is None or offer is None:
                raise RefusedError(
                    f"{whom} chose a transport {ready.transport!r} that was not offered", field="transport"
                )
            endpoint = await transport.accept(offer, ready.card)
            try:
                await hand_over(hello)
                enter(Greeted(stream, talk.decoder, hello, endpoint, ready.reason))
            except BaseException:
                endpoint.abort()
                with anyio.CancelScope(shield=True):
                    await endpoint.aclose()
                raise
            await talk.send(Ready(transport=endpoint.name))
    finally:
        for transport, offer in offers.values():
            if offer is not None:
                transport.withdraw(offer)


def _with_offers(ours: Hello, offers: dict[str, Offer | None]) -> Hello:
    cards = {name: offer.card for name, offer in offers.items() if offer is not None}
    return structs.replace(ours, transports=tuple(cards), offers=cards)


async def _attach(transports: Sequence[Transport], hello: Hello, whom: str) -> tuple[Endpoint, str]:
    """Return the first transport that reaches the peer, and why no earlier one does."""
    reasons: list[str] = []
    for transport in transports:
        card = hello.offers.get(transport.name)
        if card is None:
            reasons.append(f"{transport.name}: the peer does not offer it")
            continue
        try:
            endpoint = await transport.dial(card)
        except LinkError as exc:
            reasons.append(f"{transport.name}: {exc}")
            continue
        return endpoint, "; ".join([*reasons, f"{transport.name} reaches the peer"])
    raise RefusedError(f"no transport reaches {whom}: {'; '.join(reasons) or 'none is configured'}", field="transport")


class _Conversation:
    """Messages one at a time, while nobody reads in the background yet. Leaving it with a refusal tells the peer."""

    def __init__(self, stream: ByteStream, whom: str) -> None:
        self.decoder = FrameDecoder()
        self._stream = stream
        self._whom = whom
        self._seal: Seal | None = None

    async def __aenter__(self) -> _Conversation:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        refusal = error if isinstance(error, RefusedError) and not isinstance(error, _ToldError) else None
        if refusal is None and not isinstance(error, ProtocolError):
            return
        status = StatusCode.LLM_LINK_FAILED if refusal is None else refusal.status
        field = "message" if refusal is None else refusal.field
        with anyio.move_on_after(0.5):
            with suppress(LinkError):  # it has gone already
                await self.send(Refuse(status=status, field=field, text=str(error)[:1000]))

    async def prove_as_dialler(self, secret: bytes) -> None:
        """Show that we have the secret, and see that the peer does; all that follows is sealed."""
        nonce = make_nonce()
        await self.send(Challenge(nonce=nonce))
        theirs = await self._receive_challenge()
        seal = Seal(
            secret,
            is_dialler=True,
            binding=_binding(self._stream),
            dialler_nonce=nonce,
            acceptor_nonce=theirs.nonce,
        )
        try:
            seal.check(theirs)
        except WrongProofError:
            raise self._wrong_proof() from None
        self._seal = seal

    async def prove_as_acceptor(self, secret: bytes) -> None:
        """The same from the other side; the dialler's proof comes with its hello."""
        theirs = await self._receive_challenge()
        nonce = make_nonce()
        seal = Seal(
            secret,
            is_dialler=False,
            binding=_binding(self._stream),
            dialler_nonce=theirs.nonce,
            acceptor_nonce=nonce,
        )
        await self.send(seal.challenge(nonce))
        self._seal = seal

    async def _receive_challenge(self) -> Challenge:
        theirs = await self.receive(Challenge)
        if theirs.version != PROTOCOL_VERSION:
            raise _mismatch(self._whom, "protocol version", PROTOCOL_VERSION, theirs.version)
        return theirs

    def _wrong_proof(self) -> RefusedError:
        return RefusedError(
            f"{self._whom} could not prove that it has our secret; set the same ClusterConfig.secret on both sides",
            field=SECRET,
        )

    def _open(self, message: Message) -> Message:
        """Return what stands in a sealed message, where they must be."""
        if self._seal is None or isinstance(message, Refuse):  # a refusal can only end this, which anybody there can
            return message
        if not isinstance(message, Sealed):
            raise ProtocolError(f"{self._whom} sent {type(message).__name__} without a proof")
        try:
            return self._seal.open(message)
        except WrongProofError:
            raise self._wrong_proof() from None

    async def send(self, message: Message) -> None:
        if self._seal is not None and not isinstance(message, Refuse):
            message = self._seal.close(message)
        try:
            await send_all(self._stream, encode(message))
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, ssl.SSLError) as exc:
            raise LinkError(f"{self._whom} hung up during the handshake", phase="hello") from exc

    async def receive(self, kind: type[_M]) -> _M:
        """Return the next message, which must be of `kind`; its bytes are the last that are read."""
        while True:
            for received in self.decoder.messages():
                message = self._open(received)
                if isinstance(message, kind):
                    return message
                if isinstance(message, Refuse):
                    status = error_for(message.status, "").status
                    if status in _NO_FAILURES:  # a refusal is one, whatever number comes with it
                        status = StatusCode.LLM_LINK_FAILED
                    raise _ToldError(f"{self._whom} refuses: {message.text}", field=message.field, status=status)
                if self._seal is None and isinstance(message, (Hello, Challenge)) and kind in (Hello, Challenge):
                    told = ("set", "not set") if isinstance(message, Hello) else ("not set", "set")
                    raise _mismatch(self._whom, "ClusterConfig.secret", *told, field=SECRET)
                raise ProtocolError(f"{self._whom} sent {type(message).__name__} where {kind.__name__} was due")
            try:
                await until_readable(self._stream)
                piece = await self._stream.receive()
            except anyio.EndOfStream as exc:
                has_tls = self._stream.extra(TLSAttribute.ssl_object, None) is not None
                hint = "; does it accept our certificate, the one in ClusterConfig.tls_client?" if has_tls else ""
                raise LinkError(
                    f"{self._whom} closed the connection during the handshake{hint}", phase="hello"
                ) from exc
            except (anyio.BrokenResourceError, anyio.ClosedResourceError, ssl.SSLError) as exc:
                raise LinkError(f"{self._whom} hung up during the handshake", phase="hello") from exc
            self.decoder.extend(piece)


class _ToldError(RefusedError):
    """The peer has refused us; it need not be told."""
