"""Any text is an address or a `ParameterError`; and where one may listen is known for each."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from kvlink.config import ClusterConfig, check_listen, parse_address
from kvlink.errors import ParameterError
from tests.fuzz.driver import main

SAMPLES: Final = [
    b"127.0.0.1:7000",
    b"[::1]:0",
    b"[fe80::1%eth0]:65535",
    b"unix:/run/kvlink.sock",
    b"0.0.0.0:1",
    b"localhost:7",
    b"[[]]:9",
]


def one_input(given: bytes) -> None:
    """Parse `given`, write it, parse it again, and ask whether it is open to strangers."""
    text = given.decode("utf-8", "surrogateescape")
    with suppress(ParameterError):
        address = parse_address(text)
        assert parse_address(str(address)) == address
        check_listen(text, ClusterConfig())


if __name__ == "__main__":
    main(one_input, SAMPLES)
