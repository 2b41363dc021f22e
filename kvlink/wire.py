"""Control messages and their frames: bytes in, typed messages out. Pure; knows no socket.

A frame is 8 bytes of header and a body::

    magic "kv" | format version (1 byte) | 0 | body length (4 bytes, big endian) | body: one msgpack message

The length is checked against a cap before anything is kept, and the body can only become one of the message types
below: nothing is ever unpickled, and no field is larger than its frame. The frame format's version never changes within
a connection; what the two sides can say to each other is `PROTOCOL_VERSION`, a field of `Hello`, so that a peer of
another version is refused by name instead of misread.

Who says what:

========================  =========================================================================================
`Challenge`, `Sealed`     before and around the handshake, where there is a secret; see `links.seal`
`Hello`, `Refuse`         the handshake, both ways; `Refuse` ends it
`Ready`                   the handshake's end: which transport serves this link, and why not a better one
`Share`                   "this region of mine can be addressed so", for transports without a channel of their own
`LookUp`, `OpenRead`      "where is this cache?", without and with a read lease; answered by `Found` or `Failed`
`OpenWrite`               the same with a write lease
`CloseRead`               "I have read": gives the lease back and says what was read; no answer
`Recall`, `CloseWrite`    the owner wants a write lease back; the writer has stopped writing
`Claim`                   "I have this ticket": makes the sender its holder; answered by `Found` or `Failed`
`Filled`, `EndTicket`     what a ticket's holder has put in place; either side says how a ticket has ended
`Stage`, `Commit`         detours through the owner's pool, for memory that cannot be reached where it is
`Notify`, `Credit`        a few bytes for the application, answered by `Pong` when queued; room for more of them
`Ping`, `Pong`            liveness, and `check_link_status`
`LayerEvent`              a layer-wise push tells the receiver what has landed, or that it failed
`Goodbye`                 an orderly end
========================  =========================================================================================
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from kvlink.errors import ProtocolError
from kvlink.geometry import CacheGeometry
from kvlink.tokens import TicketEnding

PROTOCOL_VERSION: Final = 1
_FORMAT_VERSION: Final = 1
_HEADER: Final = struct.Struct(">2sBBI")
_MAGIC: Final = b"kv"
_TLS_RECORDS: Final = (b"\x15\x03", b"\x16\x03")  # an alert, a handshake message

HELLO_MAX_NBYTES: Final = 16 * 1024
"""Largest frame accepted from a peer that has not said who it is."""

MAX_BLOCKS: Final = 2**20
"""Blocks that one message names."""

UInt64 = Annotated[int, Meta(ge=0)]  # msgpack itself ends at 2**64 - 1
UInt32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Bytes16 = Annotated[bytes, Meta(min_length=16, max_length=16)]
Bytes32 = Annotated[bytes, Meta(min_length=32, max_length=32)]
Text = Annotated[str, Meta(max_length=1024)]
Card = Annotated[bytes, Meta(max_length=8192)]
"""What a transport says to its other half during the handshake; only that transport can read it."""


class Hello(Struct, frozen=True, tag="hello", kw_only=True):
    """Who I am, and, from the dialling side, whom I want (`expects`)."""

    version: UInt32 = PROTOCOL_VERSION
    cluster_id: UInt64
    incarnation: Bytes16
    role: UInt32
    transports: Annotated[tuple[Text, ...], Meta(max_length=16)]
    expects: UInt64 | None = None
    offers: Annotated[dict[Text, Card], Meta(max_length=16)] = {}
    """From the accepting side: how to attach, by transport; good for this handshake only."""


class Challenge(Struct, frozen=True, tag="challenge", kw_only=True):
    """Prove that you have the secret; from the accepting side, with the proof that it does."""

    version: UInt32 = PROTOCOL_VERSION
    nonce: Bytes32
    proof: Bytes32 = bytes(32)


class Sealed(Struct, frozen=True, tag="sealed"):
    """A message of the handshake, packed, and the proof that somebody with the secret has sent it just there."""

    body: bytes
    proof: Bytes32


class Refuse(Struct, frozen=True, tag="refuse", kw_only=True):
    """The handshake fails because of `field`; `text` has both values."""

    status: UInt32
    field: Text
    text: Text


class Ready(Struct, frozen=True, tag="ready", kw_only=True):
    """I am ready to serve this link over `transport` (empty: control messages only), chosen for `reason`."""

    transport: Text
    reason: Text = ""
    card: Card = b""
    """From the dialling side: what the transport's other half needs to know of it."""


class Share(Struct, frozen=True, tag="share", kw_only=True):
    """You may address `nbytes` of my memory at `address` as region `region`, with `key`; or not, for `reason`.

    The memory may be a device's, which not every way of moving bytes reaches.

    For transports that have no channel of their own for this.
    """

    region: UInt64
    nbytes: UInt64
    address: UInt64
    key: Annotated[bytes, Meta(max_length=8192)]
    reason: Text = ""
    is_on_device: bool = False


class Target(Struct, frozen=True):
    """A cache of the receiver.

    By key (namespace ``request``, ``prefix`` or ``blocks``), by cache id and slot (``id``), or by an address of the
    receiver's that lies in it (``address``).
    """

    namespace: Text
    id: UInt64
    model_id: UInt64 = 0
    slot: UInt32 = 0


class LookUp(Struct, frozen=True, tag="look-up"):
    """Where is this cache?"""

    seq: UInt64
    target: Target


class OpenRead(Struct, frozen=True, tag="open-read"):
    """Where is this cache? Keep it for me while I read, at most `lease_s` seconds."""

    seq: UInt64
    target: Target
    lease_s: Annotated[float, Meta(gt=0, le=1e9)]


class OpenWrite(Struct, frozen=True, tag="open-write"):
    """Where is this cache? Keep it for me to write, until you recall it."""

    seq: UInt64
    target: Target


class Stage(Struct, frozen=True, tag="stage"):
    """I cannot reach this cache where it is: give me room in your pool for `slots` of tensors ``start..stop-1``.

    To read, the room is filled before the answer; to write, it is emptied into the cache by `Commit`. Answered by the
    `Found` of the room, under a lease that `CloseRead` ends either way.
    """

    seq: UInt64
    target: Target
    slots: Annotated[tuple[UInt32, ...], Meta(min_length=1, max_length=MAX_BLOCKS)]
    start: UInt32
    stop: UInt32
    is_write: bool


class Commit(Struct, frozen=True, tag="commit"):
    """What I have put into the room of `lease` belongs into the cache now. Answered by `Pong` when it is there."""

    seq: UInt64
    lease: UInt64


class Found(Struct, frozen=True, tag="found", kw_only=True):
    """The answer: what I told you is valid while word `word` of my state region holds `generation`."""

    seq: UInt64
    cache_id: UInt64
    slot: UInt32
    geometry: CacheGeometry
    word: UInt32
    generation: UInt64
    lease: UInt64 = 0
    addresses: tuple[tuple[UInt64, UInt64], ...] = ()
    """Where the cache's regions begin in the owner: ``(region, address)``; for targets by address."""
    blocks: Annotated[tuple[UInt32, ...], Meta(max_length=MAX_BLOCKS)] = ()
    """Which blocks a claimed ticket is about."""


class Failed(Struct, frozen=True, tag="failed"):
    """The answer to request `seq` is an error."""

    seq: UInt64
    status: UInt32
    text: Text


class CloseRead(Struct, frozen=True, tag="close-read"):
    """I have stopped reading under `lease`. `tensors` (first, stop) count towards the key's release; None: none do."""

    lease: UInt64
    tensors: tuple[UInt32, UInt32] | None = None


class Recall(Struct, frozen=True, tag="recall"):
    """Stop writing under `lease` and give it back: the cache has ended."""

    lease: UInt64


class CloseWrite(Struct, frozen=True, tag="close-write"):
    """No byte is written any more under `lease`."""

    lease: UInt64


class Claim(Struct, frozen=True, tag="claim"):
    """I have the token of ticket `number`: let me be its holder, and tell me where its blocks lie.

    Answered by a `Found` whose word is the ticket's own. Its `lease` is the claim, which `CloseRead` gives back unused;
    it is a write lease too where the ticket is for filling.
    """

    seq: UInt64
    number: UInt64
    secret: Bytes16
    is_write: bool


class Filled(Struct, frozen=True, tag="filled"):
    """Tensors ``start..stop-1`` of all blocks of ticket `number` are in place."""

    number: UInt64
    start: UInt32
    stop: UInt32


class EndTicket(Struct, frozen=True, tag="end-ticket"):
    """A ticket has ended: my ticket `number` that you hold (`is_mine`), or yours that I held."""

    number: UInt64
    kind: TicketEnding
    cause: Text = ""
    is_mine: bool = False


class LayerEvent(Struct, frozen=True, tag="layer", kw_only=True):
    """A layer-wise push to cache `cache_id` has put layer `layer` (None: the whole push has ended, with `status`)."""

    push_id: UInt64
    cache_id: UInt64
    tag: Text = ""
    layer: UInt32 | None = None
    status: UInt32 = 0
    text: Text = ""


class Notify(Struct, frozen=True, tag="notify"):
    """Give `payload` to your application. Answered by `Pong` when it is in its queue, or by `Failed`."""

    seq: UInt64
    payload: bytes


class Credit(Struct, frozen=True, tag="credit"):
    """My application has taken `num` of your notifications; you may send as many more."""

    num: UInt32


class Ping(Struct, frozen=True, tag="ping"):
    """Are you there?"""

    seq: UInt64


class Pong(Struct, frozen=True, tag="pong"):
    """I am."""

    seq: UInt64


class Goodbye(Struct, frozen=True, tag="goodbye"):
    """The link ends in good order; what I wrote to you and read from you has ended.

    `is_closing`: because my cluster closes, not because somebody wants this link to end.
    """

    reason: Text = ""
    is_closing: bool = False


Message = (
    Challenge
    | Sealed
    | Hello
    | Refuse
    | Ready
    | Share
    | LookUp
    | OpenRead
    | OpenWrite
    | Stage
    | Commit
    | Found
    | Failed
    | CloseRead
    | Recall
    | CloseWrite
    | Claim
    | Filled
    | EndTicket
    | LayerEvent
    | Notify
    | Credit
    | Ping
    | Pong
    | Goodbye
)
Answer = Found | Failed | Pong

_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final[msgspec.msgpack.Decoder[Message]] = msgspec.msgpack.Decoder(Message)


def pack(message: Message) -> bytes:
    """Return the body of the frame of `message`."""
    return _ENCODER.encode(message)


def encode(message: Message) -> bytes:
    """Return the frame of `message`."""
    body = _ENCODER.encode(message)
    return _HEADER.pack(_MAGIC, _FORMAT_VERSION, 0, len(body)) + body


class FrameDecoder:
    """Turn a byte stream into messages, however the stream is cut.

    Args:
        max_nbytes: largest body accepted; may be raised once the peer has said who it is.
    """

    def __init__(self, max_nbytes: int = HELLO_MAX_NBYTES) -> None:
        self.max_nbytes = max_nbytes
        self._buffer = bytearray()

    def feed(self, received: bytes) -> list[Message]:
        """Return the messages that `received` completes.

        Raises:
            ProtocolError: these bytes cannot be a frame; the connection is of no further use.
        """
        self._buffer += received
        return list(self.messages())

    def extend(self, received: bytes) -> None:
        """Keep `received` for `messages`."""
        self._buffer += received

    def messages(self) -> Iterator[Message]:
        """Yield the complete messages, looking at `max_nbytes` anew before each; what is not taken stays."""
        while len(self._buffer) >= _HEADER.size:
            magic, version, zero, nbytes = _HEADER.unpack_from(self._buffer)
            if magic in _TLS_RECORDS:
                raise ProtocolError("not a kvlink frame but TLS: see ClusterConfig.tls_server and tls_client")
            if magic != _MAGIC or zero != 0:
                raise ProtocolError("not a kvlink frame")
            if version != _FORMAT_VERSION:
                raise ProtocolError(f"frame format version: ours is {_FORMAT_VERSION}, theirs is {version}")
            if nbytes > self.max_nbytes:
                raise ProtocolError(f"a frame of {nbytes} bytes; at most {self.max_nbytes} are accepted here")
            end = _HEADER.size + nbytes
            if len(self._buffer) < end:
                return
            body = bytes(memoryview(self._buffer)[_HEADER.size : end])
            del self._buffer[:end]
            yield unpack(body)

    @property
    def is_mid_frame(self) -> bool:
        """Whether the stream has ended inside a frame, if it has ended now."""
        return bool(self._buffer)


def unpack(body: bytes) -> Message:
    """Return the message that the body of a frame holds.

    Raises:
        ProtocolError: it holds none.
    """
    try:
        return _DECODER.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as exc:
        raise ProtocolError(f"a malformed message: {exc}") from exc
