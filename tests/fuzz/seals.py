"""A sealed message is opened only with the right proof, whatever else is in it."""

from __future__ import annotations

from typing import Final

from kvlink.errors import ProtocolError
from kvlink.links.seal import Seal, WrongProofError
from kvlink.wire import Challenge, Ready, Sealed, pack
from tests.fuzz.driver import main
from tests.support.stranger import hello

_NONCES: Final = {"dialler_nonce": bytes(32), "acceptor_nonce": b"a" * 32}


def _seal(*, is_dialler: bool) -> Seal:
    return Seal(b"a secret of some length", is_dialler=is_dialler, binding=b"", **_NONCES)


def _sealed(message: bytes) -> tuple[Seal, bytes]:
    """Return who is to open, and the right proof of `message` as the first one of the dialler."""
    acceptor, dialler = _seal(is_dialler=False), _seal(is_dialler=True)
    dialler.check(acceptor.challenge(bytes(32)))
    return acceptor, dialler._proof(message, is_dialler=True)


SAMPLES: Final = [
    first + _sealed(body)[1] + body
    for first in (b"\x00", b"\x01")
    for body in (pack(hello(1)), pack(Ready(transport="shm")), pack(Challenge(nonce=bytes(32))), b"", b"\xc1")
]


def one_input(given: bytes) -> None:
    """Open `given`, a proof and a message: if its proof is right it is the message or malformed, else nothing.

    An odd byte before it makes the proof right: somebody with the secret can send rubbish too.
    """
    proof, body = given[1:33], given[33:]
    acceptor, right = _sealed(body)
    if given[:1] and given[0] % 2:
        proof = right
    try:
        message = acceptor.open(Sealed(body, proof))
    except WrongProofError:
        assert proof != right
    except ProtocolError:
        assert proof == right
    else:
        assert proof == right
        assert pack(message)


if __name__ == "__main__":
    main(one_input, SAMPLES)
