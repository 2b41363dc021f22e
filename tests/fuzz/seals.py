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
    proof + body
    for body in (pack(hello(1)), pack(Ready(transport="shm")), pack(Challenge(nonce=bytes(32))), b"", b"\xc1")
    for proof in (_sealed(body)[1], bytes(32))
]


def one_input(given: bytes) -> None:
    """Open `given`, a proof and a message: if its proof is right it is the message or malformed, else nothing."""
    proof, body = given[:32], given[32:]
    acceptor, right = _sealed(body)
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
