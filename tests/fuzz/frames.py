"""Bytes on a control connection become messages, or a `ProtocolError`, however they are cut."""

from __future__ import annotations

from typing import Final

from kvlink.errors import ProtocolError
from kvlink.geometry import CacheGeometry, TensorRun
from kvlink.wire import (
    Challenge,
    CloseRead,
    Failed,
    Found,
    FrameDecoder,
    Goodbye,
    LookUp,
    Message,
    OpenRead,
    Ping,
    Ready,
    Refuse,
    Sealed,
    Stage,
    Target,
    encode,
    pack,
)
from tests.fuzz.driver import main
from tests.support.stranger import hello

_GEOMETRY = CacheGeometry(2, 3, 4, "float16", None, True, (TensorRun(0, 4096, 64, 2),))
SAMPLES: Final = [
    encode(message)
    for message in (
        hello(1, offers={"shm": b"card"}),
        Challenge(nonce=bytes(32)),
        Sealed(pack(Ping(1)), bytes(32)),
        Refuse(status=1, field="role", text="no"),
        Ready(transport="shm"),
        LookUp(1, Target("blocks", 0)),
        OpenRead(2, Target("request", 2**64 - 1), 1.5),
        Stage(3, Target("blocks", 0), (0, 1, 2), 0, 2, False),
        Found(seq=1, cache_id=2, slot=0, geometry=_GEOMETRY, word=4, generation=5, addresses=((0, 1),)),
        Failed(1, 2, "three"),
        CloseRead(1, (0, 2)),
        Goodbye("bye"),
    )
]


def one_input(given: bytes) -> None:
    """Read `given` in one piece and byte by byte: the same messages, each of which can be said again."""
    whole, message_bytes = _read([given])
    assert whole == _read([given[index : index + 1] for index in range(len(given))])[0]
    assert message_bytes <= len(given)


def _read(pieces: list[bytes]) -> tuple[list[Message | str], int]:
    decoder = FrameDecoder()
    heard: list[Message | str] = []
    nbytes = 0
    try:
        for piece in pieces:
            decoder.extend(piece)
            for message in decoder.messages():
                heard.append(message)
                nbytes += 8
                (again,) = FrameDecoder(2**20).feed(encode(message))
                assert again == message or again != again  # not-a-number is not equal to itself
    except ProtocolError:
        heard.append("refused")
    return heard, nbytes


if __name__ == "__main__":
    main(one_input, SAMPLES)
