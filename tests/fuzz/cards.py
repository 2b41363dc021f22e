"""What a peer says of how UCX reaches it is taken apart, or refused; none of it reaches libucp by accident."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from kvlink.errors import KVLinkError
from kvlink.transports.ucx.cards import pack_key, unpack_card, unpack_key
from tests.fuzz.driver import main

SAMPLES: Final = [pack_key(b"key" * 20), pack_key(b"\x00" * 300), b"", b"KVUC" + bytes(64)]


def one_input(given: bytes) -> None:
    """Take `given` apart as a card, and as a key, which must be what was packed."""
    with suppress(KVLinkError):
        unpack_card(given)
    with suppress(KVLinkError):
        assert pack_key(unpack_key(given)) == given


if __name__ == "__main__":
    main(one_input, SAMPLES)
