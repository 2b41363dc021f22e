"""What a ticket is called on its way, and how it can end. Pure values.

A token is 54 bytes as 72 characters of base64url: text that fits into JSON, a header or a URL as it is::

    version (1) | kind (1) | owner's cluster id (8) | owner's incarnation (16) | number (8) | secret (16) | CRC-32 (4)

The checksum is not there to keep anybody out: it lets the side that was handed a damaged token say so without asking.
The incarnation does the same for tokens of an owner that has restarted since. The right itself is the secret, 128
random bits that only the owner can compare.
"""

from __future__ import annotations

import base64
import binascii
import struct
import zlib
from enum import Enum
from typing import Final, NamedTuple

from kvlink.errors import ParameterTypeError, TicketError

_VERSION: Final = 1
_BODY: Final = struct.Struct(">BBQ16sQ16s")
_CHECKSUM: Final = struct.Struct(">I")
TOKEN_LENGTH: Final = (_BODY.size + _CHECKSUM.size) * 4 // 3

_KINDS: Final = {False: ord("r"), True: ord("w")}


class TicketEnding(Enum):
    """How a ticket has ended. Each ends in exactly one of these ways."""

    DONE = "done"
    """Everything was delivered, and the receiver can see it."""
    FAILED = "failed"
    """Its holder tried and could not."""
    DROPPED = "dropped"
    """Its holder gave it back unused, or used in part."""
    REVOKED = "revoked"
    """Its owner took it back, or the owner's cache or cluster was closed."""
    EXPIRED = "expired"
    """Nobody claimed it within its lease."""
    PEER_LOST = "peer lost"
    """The link between the two ended."""


class TicketOutcome(NamedTuple):
    """The end of a ticket, as one side knows it.

    Attributes:
        kind: how it ended.
        cause: why, in words; empty where the kind says it all.
        peer: the other side's cluster id; None where nobody had claimed it.
    """

    kind: TicketEnding
    cause: str
    peer: int | None

    @property
    def is_done(self) -> bool:
        """Whether it ended well."""
        return self.kind is TicketEnding.DONE

    def __str__(self) -> str:
        return f"{self.kind.value} ({self.cause})" if self.cause else self.kind.value


class Token(NamedTuple):
    """A ticket's name and secret.

    Attributes:
        is_write: whether it is a right to fill blocks rather than to read them.
        cluster_id, incarnation: the owner, and which life of it.
        number: of the ticket, in that life.
        secret: 16 random bytes.
    """

    is_write: bool
    cluster_id: int
    incarnation: bytes
    number: int
    secret: bytes

    def encode(self) -> bytes:
        """Return the token as it travels: ASCII."""
        body = _BODY.pack(_VERSION, _KINDS[self.is_write], self.cluster_id, self.incarnation, self.number, self.secret)
        return base64.urlsafe_b64encode(body + _CHECKSUM.pack(zlib.crc32(body)))

    def __repr__(self) -> str:  # the secret is nobody's business
        return f"<Token of ticket {self.number} of cluster {self.cluster_id}>"


def parse_token(token: bytes | str) -> Token:
    """Return what a token says.

    Raises:
        TicketError: it is truncated, damaged, or of a version that is not known here.
    """
    if isinstance(token, str):
        token = token.encode("ascii", "replace")
    elif not isinstance(token, (bytes, bytearray)):
        raise ParameterTypeError(f"a ticket's token is bytes or text, got {type(token).__name__}")
    if len(token) != TOKEN_LENGTH:
        raise _unusable(f"it has {len(token)} characters instead of {TOKEN_LENGTH}")
    try:
        packed = base64.b64decode(token, b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise _unusable("it has characters that no token has") from None
    # Only one spelling counts: the decoder also takes characters of the other alphabet.
    if len(packed) != _BODY.size + _CHECKSUM.size or base64.urlsafe_b64encode(packed) != token:
        raise _unusable("it has characters that no token has")
    body = packed[: _BODY.size]
    if _CHECKSUM.unpack_from(packed, _BODY.size)[0] != zlib.crc32(body):
        raise _unusable("its checksum is wrong")
    version, kind, cluster_id, incarnation, number, secret = _BODY.unpack(body)
    if version != _VERSION or kind not in _KINDS.values():
        raise _unusable(f"its version is {version}, ours is {_VERSION}")
    return Token(kind == _KINDS[True], cluster_id, incarnation, number, secret)


def _unusable(why: str) -> TicketError:
    return TicketError(f"this is no token of a ticket: {why}; pass it on unchanged, or ask for a new one")
