"""A token is what `Token.encode` made, to the bit, or it is refused."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from kvlink.errors import TicketError
from kvlink.tokens import Token, parse_token
from tests.fuzz.driver import main

SAMPLES: Final = [
    Token(is_write, cluster_id, bytes(16), number, b"s" * 16).encode()
    for is_write in (False, True)
    for cluster_id, number in ((1, 1), (2**64 - 1, 2**64 - 1))
]


def one_input(given: bytes) -> None:
    """Parse `given` as bytes and as text."""
    with suppress(TicketError):
        assert parse_token(given).encode() == given
    with suppress(TicketError):
        text = given.decode("utf-8", "replace")
        assert parse_token(text).encode().decode() == text


if __name__ == "__main__":
    main(one_input, SAMPLES)
