"""Control messages and frames: what goes in comes out, and whatever else goes in does no harm."""

from __future__ import annotations

import itertools
import math
import struct
import tracemalloc
from collections.abc import Iterable
from typing import Any, Final, NamedTuple, get_args

import msgspec
import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from kvlink.errors import KVLinkError, ProtocolError
from kvlink.geometry import CacheGeometry, TensorRun
from kvlink.tokens import TicketEnding
from kvlink.wire import (
    HELLO_MAX_NBYTES,
    PROTOCOL_VERSION,
    Answer,
    Challenge,
    Claim,
    CloseRead,
    CloseWrite,
    Commit,
    Credit,
    EndTicket,
    Failed,
    Filled,
    Found,
    FrameDecoder,
    Goodbye,
    Hello,
    LayerEvent,
    LookUp,
    Message,
    Notify,
    OpenRead,
    OpenWrite,
    Ping,
    Pong,
    Ready,
    Recall,
    Refuse,
    Sealed,
    Share,
    Stage,
    Target,
    encode,
)

HEADER_NBYTES: Final = 8
LARGE: Final = 2**30
UINT32 = st.integers(0, 2**32 - 1)
UINT64 = st.integers(0, 2**64 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(max_size=40)

RUNS = st.builds(TensorRun, INT64, INT64, INT64, INT64)
PARTS: Final[dict[type, dict[str, st.SearchStrategy[Any]]]] = {
    Target: {"namespace": TEXT, "id": UINT64, "model_id": UINT64, "slot": UINT32},
    CacheGeometry: {
        "num_tensors": INT64,
        "num_slots": INT64,
        "slot_nbytes": INT64,
        "data_type": TEXT,
        "layout": st.none() | TEXT,
        "is_blocks": st.booleans(),
        "runs": st.lists(RUNS, max_size=4).map(tuple),
    },
}
TARGETS = st.builds(Target, **PARTS[Target])
FIELDS: Final[dict[type, dict[str, st.SearchStrategy[Any]]]] = {
    Hello: {
        "version": UINT32,
        "cluster_id": UINT64,
        "incarnation": st.binary(min_size=16, max_size=16),
        "role": UINT32,
        "transports": st.lists(TEXT, max_size=16).map(tuple),
        "expects": st.none() | UINT64,
        "offers": st.dictionaries(TEXT, st.binary(max_size=100), max_size=4),
    },
    Challenge: {
        "version": UINT32,
        "nonce": st.binary(min_size=32, max_size=32),
        "proof": st.binary(min_size=32, max_size=32),
    },
    Sealed: {"body": st.binary(max_size=200), "proof": st.binary(min_size=32, max_size=32)},
    Refuse: {"status": UINT32, "field": TEXT, "text": TEXT},
    Ready: {"transport": TEXT, "reason": TEXT, "card": st.binary(max_size=100)},
    Share: {
        "region": UINT64,
        "nbytes": UINT64,
        "address": UINT64,
        "key": st.binary(max_size=100),
        "reason": TEXT,
        "is_on_device": st.booleans(),
    },
    LookUp: {"seq": UINT64, "target": TARGETS},
    OpenRead: {"seq": UINT64, "target": TARGETS, "lease_s": st.floats(0, 1e9, exclude_min=True)},
    OpenWrite: {"seq": UINT64, "target": TARGETS},
    Stage: {
        "seq": UINT64,
        "target": TARGETS,
        "slots": st.lists(UINT32, min_size=1, max_size=5).map(tuple),
        "start": UINT32,
        "stop": UINT32,
        "is_write": st.booleans(),
    },
    Commit: {"seq": UINT64, "lease": UINT64},
    Found: {
        "seq": UINT64,
        "cache_id": UINT64,
        "slot": UINT32,
        "geometry": st.builds(CacheGeometry, **PARTS[CacheGeometry]),
        "word": UINT32,
        "generation": UINT64,
        "lease": UINT64,
        "addresses": st.lists(st.tuples(UINT64, UINT64), max_size=3).map(tuple),
        "blocks": st.lists(UINT32, max_size=4).map(tuple),
    },
    Failed: {"seq": UINT64, "status": UINT32, "text": TEXT},
    CloseRead: {"lease": UINT64, "tensors": st.none() | st.tuples(UINT32, UINT32)},
    Recall: {"lease": UINT64},
    CloseWrite: {"lease": UINT64},
    Claim: {
        "seq": UINT64,
        "number": UINT64,
        "secret": st.binary(min_size=16, max_size=16),
        "is_write": st.booleans(),
    },
    Filled: {"number": UINT64, "start": UINT32, "stop": UINT32},
    EndTicket: {"number": UINT64, "kind": st.sampled_from(TicketEnding), "cause": TEXT, "is_mine": st.booleans()},
    LayerEvent: {
        "push_id": UINT64,
        "cache_id": UINT64,
        "tag": TEXT,
        "layer": st.none() | UINT32,
        "status": UINT32,
        "text": TEXT,
    },
    Notify: {"seq": UINT64, "payload": st.binary(max_size=64)},
    Credit: {"num": UINT32},
    Ping: {"seq": UINT64},
    Pong: {"seq": UINT64},
    Goodbye: {"reason": TEXT, "is_closing": st.booleans()},
}
STRATEGIES: Final[dict[type, st.SearchStrategy[Any]]] = {
    kind: st.builds(kind, **fields) for kind, fields in FIELDS.items()
}
MESSAGES = st.one_of(*STRATEGIES.values())
KINDS = sorted(STRATEGIES, key=lambda kind: kind.__name__)


class Heard(NamedTuple):
    """All that a decoder made of a stream."""

    messages: list[Message]
    error: str | None
    is_mid_frame: bool


def listen(pieces: Iterable[bytes], max_nbytes: int = LARGE) -> Heard:
    """Give a decoder the pieces of a stream; stop where it refuses. Anything but a `ProtocolError` is let through."""
    decoder = FrameDecoder(max_nbytes)
    messages: list[Message] = []
    for piece in pieces:
        decoder.extend(piece)
        try:
            messages.extend(decoder.messages())
        except ProtocolError as exc:
            return Heard(messages, str(exc), True)
    return Heard(messages, None, decoder.is_mid_frame)


def single_bytes(stream: bytes) -> list[bytes]:
    return [stream[index : index + 1] for index in range(len(stream))]


def frame(body: bytes, *, magic: bytes = b"kv", version: int = 1, zero: int = 0, nbytes: int | None = None) -> bytes:
    """A frame made by hand, from what the module's text says of it."""
    return magic + bytes([version, zero]) + struct.pack(">I", len(body) if nbytes is None else nbytes) + body


def hello(**changes: Any) -> Hello:
    fields: dict[str, Any] = {"cluster_id": 1, "incarnation": b"i" * 16, "role": 1, "transports": ("shm",)}
    return Hello(**(fields | changes))


# ---- round trips


def test_every_field_of_every_message_has_a_strategy() -> None:
    """The tests below speak for every type that a frame can carry and all of its fields, and answers are messages."""
    assert set(FIELDS) == set(get_args(Message))
    for kind, fields in (FIELDS | PARTS).items():
        assert set(fields) == {field.name for field in msgspec.structs.fields(kind)}, kind.__name__
    assert set(get_args(Answer)) < set(get_args(Message))


@pytest.mark.parametrize("kind", KINDS)
def test_every_message_comes_back_equal(kind: type) -> None:
    """A message of any type, with any values that its fields allow, is the same after `encode` and decoding."""

    @settings(max_examples=60, deadline=None)
    @given(STRATEGIES[kind])
    def check(message: Message) -> None:
        decoder = FrameDecoder(LARGE)
        (back,) = decoder.feed(encode(message))
        assert back == message
        assert type(back) is kind
        assert not decoder.is_mid_frame

    check()


@settings(deadline=None)
@given(st.lists(MESSAGES, max_size=6), st.lists(st.integers(0, 400), max_size=8))
def test_the_cut_of_the_stream_does_not_matter(messages: list[Message], cuts: list[int]) -> None:
    """However a stream of frames is cut into pieces, empty ones included, the same messages come out in order."""
    stream = b"".join(map(encode, messages))
    ends = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    pieces = [stream[start:end] for start, end in itertools.pairwise(ends)]
    assert listen(pieces) == Heard(messages, None, False)
    assert listen(single_bytes(stream)) == Heard(messages, None, False)


@pytest.mark.parametrize("kind", KINDS)
def test_the_frame_is_as_documented(kind: type) -> None:
    """A frame is "kv", the format version, a zero, the body's length in big endian, and one msgpack map."""

    @settings(max_examples=10, deadline=None)
    @given(STRATEGIES[kind])
    def check(message: Message) -> None:
        sent = encode(message)
        body = sent[HEADER_NBYTES:]
        assert sent == frame(body)
        assert isinstance(msgspec.msgpack.decode(body), dict)

    check()


def test_unknown_fields_are_passed_over() -> None:
    """A later minor version may add fields: they do not disturb this one."""
    body = msgspec.msgpack.encode({"type": "ping", "seq": 7, "mood": [1, {"a": None}], "z": b"z"})
    assert listen([frame(body)]) == Heard([Ping(7)], None, False)


def test_the_protocol_version_is_what_a_hello_says() -> None:
    """A hello made without a version carries ours, and one of another version is decoded, to be refused by name."""
    assert hello().version == PROTOCOL_VERSION
    assert listen([encode(hello(version=999))]).messages == [hello(version=999)]


# ---- truncation


@pytest.mark.parametrize("kind", KINDS)
def test_every_truncation_is_waited_out(kind: type) -> None:
    """No prefix of a frame, of any length, gives a message or an error; the rest then completes it."""

    @settings(max_examples=8, deadline=None)
    @given(STRATEGIES[kind])
    def check(message: Message) -> None:
        stream = encode(message)
        for length in range(len(stream)):
            decoder = FrameDecoder(LARGE)
            assert decoder.feed(stream[:length]) == []
            assert decoder.is_mid_frame is (length > 0)
            assert decoder.feed(stream[length:]) == [message]
            assert not decoder.is_mid_frame

    check()


@given(MESSAGES, st.data())
def test_a_frame_that_ends_inside_its_message_is_refused(message: Message, data: st.DataObject) -> None:
    """A body that is cut short, in a frame of matching length, is a protocol error and no message."""
    body = encode(message)[HEADER_NBYTES:]
    short = body[: data.draw(st.integers(0, len(body) - 1))]
    heard = listen([frame(short)])
    assert heard.messages == []
    assert heard.error is not None
    assert heard.error.startswith("a malformed message: ")


@given(MESSAGES, st.binary(min_size=1, max_size=8))
def test_bytes_after_the_message_are_refused(message: Message, extra: bytes) -> None:
    """A body holds one message and nothing behind it."""
    heard = listen([frame(encode(message)[HEADER_NBYTES:] + extra)])
    assert heard.messages == []
    assert heard.error is not None


def test_is_mid_frame_says_whether_an_end_now_would_tear_a_frame() -> None:
    """It is false before, between and after whole frames, and true from the first byte of a header to the last."""
    decoder = FrameDecoder()
    assert not decoder.is_mid_frame
    stream = encode(Ping(1))
    decoder.extend(stream + stream[:1])
    assert decoder.is_mid_frame
    assert list(decoder.messages()) == [Ping(1)]
    assert decoder.is_mid_frame
    assert decoder.feed(stream[1:]) == [Ping(1)]
    assert not decoder.is_mid_frame


# ---- anything at all

FRAME_LIKE = st.builds(
    frame,
    st.binary(max_size=40),
    magic=st.sampled_from([b"kv", b"kv", b"kv", b"vk", b"\0\0"]),
    version=st.sampled_from([1, 1, 1, 0, 2, 255]),
    zero=st.sampled_from([0, 0, 0, 1]),
    nbytes=st.none() | st.integers(0, 60) | UINT32,
)


@st.composite
def damaged_streams(draw: st.DrawFn) -> bytes:
    """Frames with bits flipped, bytes lost and bytes added."""
    stream = bytearray(b"".join(map(encode, draw(st.lists(MESSAGES, min_size=1, max_size=3)))))
    for _ in range(draw(st.integers(1, 4))):
        position = draw(st.integers(0, len(stream) - 1))
        damage = draw(st.sampled_from(["flip", "flip", "flip", "lose", "add"]))
        if damage == "flip":
            stream[position] ^= 1 << draw(st.integers(0, 7))
        elif damage == "lose" and len(stream) > 1:
            del stream[position]
        else:
            stream.insert(position, draw(st.integers(0, 255)))
    return bytes(stream)


HOSTILE = st.one_of(
    st.binary(max_size=200), st.lists(FRAME_LIKE, min_size=1, max_size=3).map(b"".join), damaged_streams()
)


@settings(max_examples=500, deadline=None)
@given(HOSTILE)
@example(frame(b""))
@example(frame(b"\xc1"))  # the one byte that msgpack never uses
@example(frame(b"\xa4\xff\xfe\xfd\xfc"))  # text that is not UTF-8
@example(frame(b"\xd6\xff\0\0\0\0"))  # a timestamp
@example(frame(b"\xc7\x02\x05ab"))  # an extension of msgpack
def test_any_bytes_give_messages_or_a_protocol_error(stream: bytes) -> None:
    """Random, bit-flipped, torn and padded input gives messages or `ProtocolError`, alike whole and byte by byte."""
    whole = listen([stream], HELLO_MAX_NBYTES)
    assert listen(single_bytes(stream), HELLO_MAX_NBYTES) == whole
    event("refused" if whole.error else "waits" if whole.is_mid_frame else "accepted")
    for message in whole.messages:
        assert type(message) in STRATEGIES
        assert listen([encode(message)]).messages == [message]


@settings(deadline=None)
@given(HOSTILE)
def test_feed_says_what_messages_says(stream: bytes) -> None:
    """`feed` returns the messages of a good stream, and raises for one that `messages` refuses."""
    heard = listen([stream], HELLO_MAX_NBYTES)
    decoder = FrameDecoder()
    if heard.error is None:
        assert decoder.feed(stream) == heard.messages
    else:
        with pytest.raises(ProtocolError):
            decoder.feed(stream)


@pytest.mark.parametrize(
    "body",
    [
        {"type": "no such message"},
        {"seq": 1},
        {"type": 7, "seq": 1},
        ["ping", 1],
        7,
        None,
        {"type": "ping"},
        {"type": "ping", "seq": -1},
        {"type": "ping", "seq": "1"},
        {"type": "ping", "seq": 1.5},
        {"type": "ping", "seq": True},
        {"type": "look-up", "seq": 1, "target": {"namespace": "n" * 1025, "id": 1}},
        {"type": "look-up", "seq": 1, "target": {"namespace": "n", "id": 1, "slot": 2**32}},
        {"type": "open-read", "seq": 1, "target": {"namespace": "n", "id": 1}, "lease_s": 0.0},
        {"type": "open-read", "seq": 1, "target": {"namespace": "n", "id": 1}, "lease_s": -1.0},
        {"type": "open-read", "seq": 1, "target": {"namespace": "n", "id": 1}, "lease_s": math.nan},
        {"type": "open-read", "seq": 1, "target": {"namespace": "n", "id": 1}, "lease_s": math.inf},
        {"type": "open-read", "seq": 1, "target": {"namespace": "n", "id": 1}, "lease_s": 2e9},
        {"type": "close-read", "lease": 1, "tensors": [0]},
        {"type": "close-read", "lease": 1, "tensors": [0, 1, 2]},
        {"type": "close-read", "lease": 1, "tensors": [-1, 1]},
        {"type": "close-read", "lease": 1, "tensors": [0, 2**32]},
        {"type": "hello", "cluster_id": 1, "incarnation": b"i" * 15, "role": 1, "transports": []},
        {"type": "hello", "cluster_id": 1, "incarnation": b"i" * 17, "role": 1, "transports": []},
        {"type": "hello", "cluster_id": 1, "incarnation": b"i" * 16, "role": 1, "transports": ["t"] * 17},
        {"type": "hello", "cluster_id": 1, "incarnation": b"i" * 16, "role": 1, "transports": [1]},
        {
            "type": "hello",
            "cluster_id": 1,
            "incarnation": b"i" * 16,
            "role": 1,
            "transports": [],
            "offers": {"t": b"c" * 8193},
        },
        {
            "type": "stage",
            "seq": 1,
            "target": {"namespace": "n", "id": 1},
            "slots": [],
            "start": 0,
            "stop": 1,
            "is_write": True,
        },
        {"type": "refuse", "status": 2**32, "field": "f", "text": "t"},
        {"type": "ready", "transport": "t" * 1025},
    ],
    ids=repr,
)
def test_a_field_outside_its_range_is_refused(body: object) -> None:
    """A message with a wrong tag, a missing field, or a value of a wrong type, width or length is a protocol error."""
    heard = listen([frame(msgspec.msgpack.encode(body))])
    assert heard.messages == []
    assert heard.error is not None
    assert heard.error.startswith("a malformed message: ")


@pytest.mark.parametrize("depth", [10**3, 10**4, 10**6])
@pytest.mark.parametrize("opener", [b"\x91", b"\x81\xa1k"], ids=["arrays", "maps"])
@pytest.mark.parametrize("where", ["in an unknown field", "in a known field", "as the body"])
def test_deep_nesting_is_a_protocol_error(depth: int, opener: bytes, where: str) -> None:
    """Values nested so deeply that decoding them would exhaust the stack are refused like any other bad body."""
    nest = opener * depth + b"\xc0"
    if where == "in an unknown field":
        body = b"\x83\xa4type\xa4ping\xa3seq\x01\xa1z" + nest
    elif where == "in a known field":
        body = b"\x83\xa4type\xa7look-up\xa3seq\x01\xa6target" + nest
    else:
        body = nest
    heard = listen([frame(body)])
    assert heard.messages == []
    assert heard.error is not None


@pytest.mark.parametrize(
    "body",
    [
        b"\x83\xa4type\xa4ping\xa3seq\x01\xa1z\xdd\xff\xff\xff\xff",
        b"\x83\xa4type\xa4ping\xa3seq\x01\xa1z\xdf\xff\xff\xff\xff",
        b"\x83\xa4type\xa4ping\xa3seq\x01\xa1z\xdb\xff\xff\xff\xff",
        b"\x83\xa4type\xa4ping\xa3seq\x01\xa1z\xc6\xff\xff\xff\xff",
        b"\x85\xa4type\xa5hello\xaatransports\xdd\xff\xff\xff\xff",
        encode(
            Found(
                seq=1,
                cache_id=1,
                slot=0,
                geometry=CacheGeometry(1, 1, 1, "int8", None, True, (TensorRun(0, 0, 0, 1),)),
                word=0,
                generation=1,
            )
        )[HEADER_NBYTES:].replace(b"runs\x91", b"runs\xdd\xff\xff\xff\xff"),
    ],
    ids=["array", "map", "text", "bytes", "transports", "runs"],
)
def test_a_length_that_is_only_claimed_takes_no_memory(body: bytes) -> None:
    """A small body that claims 2**32 elements or bytes is refused without room being made for them."""
    tracemalloc.start()
    try:
        heard = listen([frame(body)], HELLO_MAX_NBYTES)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert heard.error is not None
    assert peak < 2**20


# ---- headers


def test_oversize_is_refused_by_the_header_alone() -> None:
    """A frame above the cap is refused when its header is there, before a byte of its body has come."""
    decoder = FrameDecoder(100)
    assert decoder.feed(frame(b"", nbytes=100)) == []
    assert decoder.is_mid_frame
    decoder = FrameDecoder(100)
    assert decoder.feed(frame(b"", nbytes=101)[:7]) == []
    with pytest.raises(ProtocolError, match=r"^a frame of 101 bytes; at most 100 are accepted here$"):
        decoder.feed(frame(b"", nbytes=101)[7:])


def test_a_stranger_gets_little_room() -> None:
    """Until the peer has said who it is, a frame may have 16 KiB, and the longest hello fits."""
    assert HELLO_MAX_NBYTES == 16384
    with pytest.raises(ProtocolError, match="16385 bytes; at most 16384"):
        FrameDecoder().feed(frame(b"", nbytes=16385))
    longest = hello(
        version=2**32 - 1,
        cluster_id=2**64 - 1,
        transports=("transport-name",) * 16,
        expects=2**64 - 1,
        offers={"shm": b"t" * 139, "ucx": b"c" * 8192},
    )
    assert FrameDecoder().feed(encode(longest)) == [longest]


def test_the_cap_is_looked_at_before_each_frame() -> None:
    """Raising the cap between two messages of one piece counts for the second of them."""
    large = Goodbye(reason="r" * 200)
    decoder = FrameDecoder(100)
    decoder.extend(encode(Ping(1)) + encode(large))
    messages = decoder.messages()
    assert next(messages) == Ping(1)
    decoder.max_nbytes = 1000
    assert list(messages) == [large]

    decoder = FrameDecoder(100)
    with pytest.raises(ProtocolError):
        decoder.feed(encode(Ping(1)) + encode(large))


def test_a_taken_message_leaves_the_rest() -> None:
    """A reader that stops after one message finds the next ones, in order, when it comes back."""
    decoder = FrameDecoder()
    decoder.extend(encode(Ping(1)) + encode(Ping(2)) + encode(Ping(3)))
    assert next(decoder.messages()) == Ping(1)
    assert list(decoder.messages()) == [Ping(2), Ping(3)]


@pytest.mark.parametrize("stream", [b"GET / HTTP/1.1\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01", frame(b"", zero=1)])
def test_other_protocols_are_told_apart(stream: bytes) -> None:
    """Bytes that do not begin as a frame does are refused as such, and TLS by name."""
    with pytest.raises(ProtocolError, match=r"^not a kvlink frame") as caught:
        FrameDecoder().feed(stream)
    assert ("TLS" in str(caught.value)) == stream.startswith(b"\x16")


def test_another_format_version_is_named() -> None:
    """A frame of another format version is refused with both versions."""
    with pytest.raises(ProtocolError, match=r"^frame format version: ours is 1, theirs is 2$"):
        FrameDecoder().feed(frame(b"", version=2))


def test_a_refusal_is_a_kvlink_error_with_its_cause() -> None:
    """A malformed body is a `KVLinkError`, and what was wrong with it is its cause."""
    with pytest.raises(KVLinkError) as caught:
        FrameDecoder().feed(frame(b"\xc0"))
    assert isinstance(caught.value, ProtocolError)
    assert isinstance(caught.value.__cause__, msgspec.ValidationError)


def test_header_errors_repeat() -> None:
    """A decoder that has refused a header goes on refusing: nothing behind the bad bytes becomes a message."""
    decoder = FrameDecoder()
    for _ in range(3):
        with pytest.raises(ProtocolError, match="not a kvlink frame"):
            decoder.feed(b"x" * 8 + encode(Ping(1)))
