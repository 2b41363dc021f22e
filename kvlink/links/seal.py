"""Proof that both sides of a handshake know one secret, which itself never travels. Pure.

::

    dialler                                 acceptor
      Challenge(nonce d)      ------------>
                              <------------   Challenge(nonce a, proof 0)
      Sealed(Hello, proof 1)  ------------>
                              <------------   Sealed(Hello, proof 2)
      Sealed(Ready, proof 3)  ------------>
                              <------------   Sealed(Ready, proof 4)

::

    key     = HMAC-SHA256(secret, context | channel binding | nonce d | nonce a)
    proof n = HMAC-SHA256(key, label of the sender | proof n-1 | message n)

Each proof covers everything that both sides have said so far, because it covers the proof before it: the two nonces,
and, once the hellos have been said, both cluster ids, both incarnations and everything that is offered and chosen. So a
recorded handshake cannot be played again (a fresh nonce of ours is in the key), what we said cannot be sent back to us
(the labels differ), and nobody in between can take a transport out of an offer or put another identity into a hello.
Where the connection is TLS, its channel binding is in the key: a proof is worth nothing on any other connection, so
that whoever ends our TLS connection and opens one of his own to our peer is noticed even where certificates are not
checked.

Cards, which say how a transport is attached to, are hidden from whoever reads along: the token that one of them holds
is shown on another socket, and would be as good in the hands of a relay. They are combined with a stream of
``HMAC-SHA256(key, "veil" | place | sender | transport)``, each place of which is used once.

The acceptor proves itself first, so that neither side says who it is, or what it has, to somebody without the secret.
What an outsider gets is one HMAC over known nonces, to try guesses on at home. A secret must be too long to guess:
``secrets.token_bytes(32)``.

Decision: the secret says who may link. It neither hides nor protects what is said over the link afterwards, and of the
handshake it hides the cards alone.
Because: on one host there is nobody in between, and across hosts TLS does that properly.
Instead of: encryption of our own.
Revisit when: somebody must cross a hostile network and cannot have certificates.
"""

from __future__ import annotations

import hmac
import secrets
from typing import Final

from msgspec import structs

from kvlink.wire import Challenge, Hello, Message, Ready, Sealed, pack, unpack

NONCE_NBYTES: Final = 32
_CONTEXT: Final = b"kvlink handshake 1"
_LABELS: Final = {True: b"dialler", False: b"acceptor"}


class WrongProofError(Exception):
    """The other side's proof is not what somebody with our secret would have sent."""


def make_nonce() -> bytes:
    """Return a number that is used once."""
    return secrets.token_bytes(NONCE_NBYTES)


class Seal:
    """One side's half of a handshake under a secret.

    Args:
        secret: shared by both sides.
        is_dialler: which side this is.
        binding: what identifies the TLS connection; empty where there is none.
        dialler_nonce, acceptor_nonce: what the two challenges said.
    """

    def __init__(
        self, secret: bytes, *, is_dialler: bool, binding: bytes, dialler_nonce: bytes, acceptor_nonce: bytes
    ) -> None:
        parts = (_CONTEXT, len(binding).to_bytes(4, "big"), binding, dialler_nonce, acceptor_nonce)
        self._key = hmac.digest(secret, b"".join(parts), "sha256")
        self._chain = b""
        self._is_dialler = is_dialler

    def challenge(self, nonce: bytes) -> Challenge:
        """Return the acceptor's challenge, with proof 0."""
        self._chain = self._proof(b"", is_dialler=False)
        return Challenge(nonce=nonce, proof=self._chain)

    def check(self, challenge: Challenge) -> None:
        """Check the acceptor's challenge.

        Raises:
            WrongProofError: it does not have our secret.
        """
        self._advance(challenge.proof, b"")

    def close(self, message: Message) -> Sealed:
        """Return our next message with its proof."""
        body = pack(self._veiled(message, is_dialler=self._is_dialler))
        self._chain = self._proof(body, is_dialler=self._is_dialler)
        return Sealed(body=body, proof=self._chain)

    def open(self, sealed: Sealed) -> Message:
        """Return the peer's next message; not a byte of it is interpreted before the proof has been checked.

        Raises:
            WrongProofError: the peer does not have our secret, or somebody has changed what either of us said.
            ProtocolError: the peer has, and what it says is malformed all the same.
        """
        self._advance(sealed.proof, sealed.body)
        return self._veiled(unpack(sealed.body), is_dialler=not self._is_dialler)

    def _veiled(self, message: Message, *, is_dialler: bool) -> Message:
        """Return a message with its cards hidden, or with hidden ones as they were."""
        label = _LABELS[is_dialler].decode()
        if isinstance(message, Hello):
            offers = {name: self._veil(card, f"{label} offers {name}") for name, card in message.offers.items()}
            return structs.replace(message, offers=offers)
        if isinstance(message, Ready):
            return structs.replace(message, card=self._veil(message.card, f"{label} answers"))
        return message

    def _veil(self, card: bytes, what: str) -> bytes:
        """Exclusive-or with a stream that is used for this one card of this one handshake."""
        blocks = range(0, len(card), 32)
        stream = b"".join([hmac.digest(self._key, b"veil %d " % block + what.encode(), "sha256") for block in blocks])
        return bytes([ours ^ theirs for ours, theirs in zip(card, stream, strict=False)])

    def _advance(self, proof: bytes, body: bytes) -> None:
        expected = self._proof(body, is_dialler=not self._is_dialler)
        if not hmac.compare_digest(proof, expected):
            raise WrongProofError
        self._chain = expected

    def _proof(self, body: bytes, *, is_dialler: bool) -> bytes:
        label = _LABELS[is_dialler]
        return hmac.digest(self._key, bytes([len(label)]) + label + self._chain + body, "sha256")
