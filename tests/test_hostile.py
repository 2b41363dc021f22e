"""Peers that are broken or hostile: they lose their own connection, and nobody else notices."""

from __future__ import annotations

import math
import os
import random
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress

import msgspec
import pytest

import kvlink as kv
from kvlink.geometry import CacheGeometry
from kvlink.memory.regions import POOL, STATE
from kvlink.transports.shm_channel import SharedRegion
from kvlink.wire import (
    HELLO_MAX_NBYTES,
    CloseRead,
    CloseWrite,
    Found,
    Goodbye,
    Hello,
    LookUp,
    Message,
    OpenRead,
    Ping,
    Pong,
    Ready,
    Recall,
    Refuse,
    Target,
    encode,
)
from tests.support.loops import until
from tests.support.pattern import expect
from tests.support.peer import Peer, spawn_peer
from tests.support.stranger import Stranger, dial_channel, hear_hang_up, hello, memfds, send_regions, token_of

SHAPE = (64, 4096)
DESC = kv.CacheDesc(4, SHAPE, "uint8")
ON_ANY_LOOP = pytest.mark.parametrize("victim_loop", ["asyncio", "uvloop", "trio"])


class Scene:
    """A victim in a process of its own, and a good peer of it here that must never notice anything."""

    def __init__(self, victim: Peer, handle: int, good: kv.Cluster) -> None:
        self.victim = victim
        self.good = good
        self._handle = handle
        self._cache = good.kv_cache_manager.allocate_blocks_cache(DESC)
        self._num_fds = 0

    async def serves_old_link(self) -> None:
        """Pull over the link that was there before, and ask for a sign of life."""
        await self._pull()
        (await self.good.check_link_status(self.victim.cluster_id, timeout_s=5)).raise_for_status()

    async def serves_new_link(self) -> None:
        """Unlink, link again, pull."""
        (await self.good.unlink_clusters([self.victim.cluster_id])).raise_for_status()
        (await self.good.link_clusters([self.victim.info])).raise_for_status()
        await self._pull()

    async def begin(self) -> None:
        """Serve both ways, and count the descriptors."""
        await self.serves_old_link()
        await self.serves_new_link()
        self._num_fds = len(await self._descriptors())

    async def is_unharmed(self) -> None:
        """Serve both ways, and hold no descriptor more than at the beginning."""
        await self.serves_old_link()
        await self.serves_new_link()
        await until(self._descriptors, lambda descriptors: len(descriptors) <= self._num_fds, within_s=3)

    async def _descriptors(self) -> list[str]:
        await self.victim.call("usage")  # collects garbage
        return self.victim.fd_targets()

    async def _pull(self) -> None:
        for tensor in self._cache.tensors:
            tensor[...] = 0
        blocks = list(range(SHAPE[0]))
        key = kv.BlocksCacheKey(self.victim.cluster_id)
        await self.good.kv_cache_manager.pull_blocks(key, self._cache, blocks, blocks, timeout_s=5)
        expect(self._cache.tensors, self.victim.stamp(self._handle))

    def close(self) -> None:
        """Give the cache back."""
        self.good.kv_cache_manager.deallocate_cache(self._cache)


@asynccontextmanager
async def scene(victim_loop: str = "asyncio", **options: object) -> AsyncIterator[Scene]:
    """Set the scene: victim 1, good cluster 2, linked, a cache to pull from. At the end all must be unharmed."""
    config = {"handshake_timeout_s": 2.0, **dict(options.pop("config", {}))}  # type: ignore[call-overload]  # a dict
    async with spawn_peer(1, "MIX", pool="8MiB", loop_name=victim_loop, config=config, **options) as victim:  # type: ignore[arg-type]  # as spawn_peer's
        handle = await victim.call("allocate_blocks", num_tensors=DESC.num_tensors, shape=SHAPE, model_id=0)
        async with kv.Cluster(cluster_id=2, role=kv.Role.DECODER, pool="8MiB") as good:
            (await good.link_clusters([victim.info])).raise_for_status()
            made = Scene(victim, handle, good)
            try:
                await made.begin()
                yield made
                await made.is_unharmed()
            finally:
                made.close()


@ON_ANY_LOOP
async def test_random_garbage_costs_its_own_connection_alone(victim_loop: str) -> None:
    """Whatever bytes a stranger sends, its connection is closed and the good peer is served."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    async with scene(victim_loop) as here:
        for index in range(60):
            with Stranger.dial(here.victim.address) as stranger:
                head = chance.choice([b"", b"kv", b"kv\x01\x00", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01"])
                stranger.say(head + chance.randbytes(chance.randrange(1, 9000)))
                if chance.random() < 0.7:
                    stranger.sock.shutdown(socket.SHUT_WR)
                    stranger.hear_end()
            if index % 20 == 0:
                await here.serves_old_link()


@pytest.mark.parametrize("nbytes", [HELLO_MAX_NBYTES + 1, 2**20, 2**31, 2**32 - 1])
async def test_an_oversized_frame_is_refused_before_it_is_read(nbytes: int) -> None:
    """The length in the header is enough: the connection ends without waiting for the body."""
    async with scene() as here:
        with Stranger.dial(here.victim.address) as stranger:
            stranger.say(struct.pack(">2sBBI", b"kv", 1, 0, nbytes))
            answer = stranger.hear_end()
            assert isinstance(answer, Refuse)
            assert str(nbytes) in answer.text


async def test_a_hello_cut_short_anywhere_is_forgotten() -> None:
    """A stranger that hangs up in the middle of its hello leaves nothing behind."""
    async with scene() as here:
        frame = encode(hello(expects=1))
        for length in range(len(frame)):
            with Stranger.dial(here.victim.address) as stranger:
                stranger.say(frame[:length])


def _reset(stranger: Stranger) -> None:
    stranger.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stranger.close()


@ON_ANY_LOOP
async def test_connections_that_are_reset_at_once_do_no_harm(victim_loop: str) -> None:
    """A port scanner's resets, before and during the handshake, do not end the listener."""
    async with scene(victim_loop) as here:
        for index in range(60):
            stranger = Stranger.dial(here.victim.address)
            if index % 2:
                stranger.say(hello(expects=1))
            _reset(stranger)


@pytest.mark.parametrize(
    "words",
    [
        pytest.param([hello(expects=1), b"garbage garbage"], id="garbage after hello"),
        pytest.param([hello(expects=1), hello(expects=1)], id="hello twice"),
        pytest.param([Ping(1)], id="ping before hello"),
        pytest.param([Ready(transport="shm")], id="ready before hello"),
        pytest.param([LookUp(1, Target("blocks", 0))], id="look-up before hello"),
        pytest.param([OpenRead(1, Target("blocks", 0), 1.0)], id="open-read before hello"),
        pytest.param([hello(expects=1), LookUp(1, Target("blocks", 0))], id="look-up before ready"),
        pytest.param([hello(expects=1), Ready(transport="carrier pigeon")], id="transport that was not offered"),
        pytest.param([hello(expects=1), Goodbye("bye")], id="goodbye before ready"),
        pytest.param([struct.pack(">2sBBI", b"kv", 1, 0, 4000) + b"\x91" * 4000], id="deeply nested"),
        pytest.param([struct.pack(">2sBBI", b"kv", 9, 0, 1) + b"\xc0"], id="frame format from the future"),
        pytest.param([struct.pack(">2sBBI", b"kv", 1, 0, 5) + b"\xdd\xff\xff\xff\xff"], id="array of 4 billion"),
    ],
)
async def test_a_conversation_out_of_order_is_ended(words: list[Message | bytes]) -> None:
    """Messages in the wrong place end the connection, with a refusal that says why."""
    async with scene() as here:
        with Stranger.dial(here.victim.address) as stranger:
            stranger.say(*words)
            assert isinstance(stranger.hear_end(), Refuse)
        assert [link["peer"] for link in await here.victim.call("links")] == [2]


@pytest.mark.parametrize("victim_loop", ["asyncio", "trio"])
async def test_300_idle_connections_keep_nobody_out(victim_loop: str) -> None:
    """Strangers that connect and say nothing, more than there is room for, do not keep a good peer from linking."""
    async with scene(victim_loop) as here, _many(300, here.victim):
        await here.serves_old_link()
        await here.serves_new_link()


@asynccontextmanager
async def _many(number: int, victim: Peer) -> AsyncIterator[None]:
    with ExitStack() as stack:
        for _ in range(number):
            stack.enter_context(Stranger.dial(victim.address))
        await victim.call("links")  # a turn of its loop: it has seen them
        yield


async def test_an_idle_stranger_is_closed_by_its_deadline() -> None:
    """A connection that says nothing ends when the handshake's time is up."""
    async with scene(config={"handshake_timeout_s": 0.3}) as here:
        with Stranger.dial(here.victim.address) as stranger:
            stranger.hear_end()


async def test_a_hello_byte_by_byte_is_closed_by_its_deadline() -> None:
    """A stranger that always has one more byte to say is given no more time than a silent one."""
    async with scene(config={"handshake_timeout_s": 0.3}) as here:
        with Stranger.dial(here.victim.address) as stranger:
            stranger.sock.settimeout(0.02)
            frame = encode(hello(expects=1, transports=("x" * 1000,)))
            for start in range(len(frame)):
                stranger.say(frame[start : start + 1])
                try:
                    heard = stranger.sock.recv(1 << 16)
                except TimeoutError:
                    continue
                except ConnectionError:
                    heard = b""
                if not heard:
                    return
            pytest.fail("all of it was listened to")


async def test_a_stranger_at_any_step_of_the_handshake_ends_by_the_deadline() -> None:
    """Saying hello, attaching, and then nothing: each is closed, and what was attached is given back."""
    async with scene(config={"handshake_timeout_s": 0.3}) as here:
        with Stranger.dial(here.victim.address) as stranger:
            stranger.greet(1)
            stranger.hear_end()
        with Stranger.dial(here.victim.address) as stranger, dial_channel(stranger.greet(1)) as channel:
            hear_hang_up(channel)
        with _attached(here.victim) as (stranger, channel):
            stranger.hear_end()
            hear_hang_up(channel)


@contextmanager
def _attached(victim: Peer) -> Iterator[tuple[Stranger, socket.socket]]:
    """Go through the handshake up to the last message, which is not sent."""
    with Stranger.dial(victim.address) as stranger:
        answer = stranger.greet(victim.cluster_id)
        with dial_channel(answer) as channel, memfds(8192, 8192) as descriptors:
            channel.sendall(token_of(answer))
            send_regions(channel, [SharedRegion(POOL, 8192, True), SharedRegion(STATE, 8192, True)], descriptors)
            yield stranger, channel


@ON_ANY_LOOP
async def test_hanging_up_between_attaching_and_ready_leaves_nothing(victim_loop: str) -> None:
    """A peer that dies at the handshake's last step costs the victim no descriptor and no mapping."""
    async with scene(victim_loop) as here:
        before = await here.victim.call("usage")
        for _ in range(5):
            with _attached(here.victim) as (stranger, channel):
                socket.recv_fds(channel, 1, 0)  # the victim has attached
                stranger.close()
                hear_hang_up(channel)
        await here.serves_old_link()
        after = await here.victim.call("usage")
        assert after["mappings"] <= before["mappings"]


@ON_ANY_LOOP
async def test_the_descriptor_socket_believes_only_its_tokens(victim_loop: str) -> None:
    """Garbage, forged, stale and repeated tokens on the descriptor socket get nothing and do no harm."""
    async with scene(victim_loop) as here:
        with Stranger.dial(here.victim.address) as stranger:
            answer = stranger.greet(1)
            for token in (os.urandom(32), b"\0" * 32, b"short", token_of(answer)[::-1], os.urandom(5000)):
                with dial_channel(answer) as channel:
                    channel.sendall(token)
                    channel.shutdown(socket.SHUT_WR)
                    hear_hang_up(channel)
            with dial_channel(answer) as first, dial_channel(answer) as second:
                first.sendall(token_of(answer))
                second.sendall(token_of(answer))
                # The token is good once: whichever is read second is hung up on.
                first.settimeout(0.5)
                second.settimeout(0.5)
                num_closed = 0
                for channel in (first, second):
                    try:
                        num_closed += not channel.recv(1)
                    except ConnectionError:
                        num_closed += 1
                    except TimeoutError:
                        pass
                assert num_closed == 1
        with dial_channel(answer) as channel:
            channel.sendall(token_of(answer))
            hear_hang_up(channel)  # stale: its handshake has ended


def _not_memfds(channel: socket.socket) -> None:
    with open(os.devnull) as null, socket.socket() as other:
        regions = [SharedRegion(POOL, 8192, True), SharedRegion(STATE, 8192, True)]
        send_regions(channel, regions, [null.fileno(), other.fileno()])


def _not_sealed(channel: socket.socket) -> None:
    with memfds(8192, 8192, seals=0) as descriptors:
        send_regions(channel, [SharedRegion(POOL, 8192, True), SharedRegion(STATE, 8192, True)], descriptors)


def _too_short(channel: socket.socket) -> None:
    with memfds(4096, 4096) as descriptors:
        send_regions(channel, [SharedRegion(POOL, 2**40, True), SharedRegion(STATE, 2**40, True)], descriptors)


def _only_for_reading(channel: socket.socket) -> None:
    with memfds(8192) as descriptors:
        fd = os.open(f"/proc/self/fd/{descriptors[0]}", os.O_RDONLY)
        try:
            send_regions(channel, [SharedRegion(POOL, 8192, True, True)], [fd])
        finally:
            os.close(fd)


def _only_for_writing(channel: socket.socket) -> None:
    with memfds(8192) as descriptors:
        fd = os.open(f"/proc/self/fd/{descriptors[0]}", os.O_WRONLY)
        try:
            send_regions(channel, [SharedRegion(POOL, 8192, True)], [fd])
        finally:
            os.close(fd)


def _too_many(channel: socket.socket) -> None:
    with memfds(*[4096] * 200) as descriptors:
        send_regions(channel, [SharedRegion(n, 4096, True) for n in range(200)], descriptors)


def _more_than_regions(channel: socket.socket) -> None:
    with memfds(*[4096] * 8) as descriptors:
        send_regions(channel, [SharedRegion(STATE, 4096, True)], descriptors)


def _fewer_than_regions(channel: socket.socket) -> None:
    with memfds(4096) as descriptors:
        send_regions(channel, [SharedRegion(n, 4096, True) for n in range(4)], descriptors)


def _no_state(channel: socket.socket) -> None:
    with memfds(4096) as descriptors:
        send_regions(channel, [SharedRegion(POOL, 4096, True)], descriptors)


def _malformed(channel: socket.socket) -> None:
    with memfds(4096) as descriptors:
        socket.send_fds(channel, [struct.pack(">I", 4) + b"\xc1\xc1\xc1\xc1"], descriptors)


def _oversized(channel: socket.socket) -> None:
    with memfds(4096) as descriptors:
        socket.send_fds(channel, [struct.pack(">I", 2**32 - 1)], descriptors)


def _odd_state(channel: socket.socket) -> None:
    with memfds(8192, 4097) as descriptors:
        send_regions(channel, [SharedRegion(POOL, 8192, True), SharedRegion(STATE, 4097, True)], descriptors)


def _beyond_all_memory(channel: socket.socket) -> None:
    with memfds(4096) as descriptors:
        far = SharedRegion(20, 2**63, False, True, 2**64 - 1)
        send_regions(channel, [SharedRegion(STATE, 4096, True), far], descriptors)


def _mappings_without_end(channel: socket.socket) -> None:
    for first in range(0, 60, 20):
        with memfds(*[4096] * 20) as descriptors:
            send_regions(channel, [SharedRegion(STATE + first + n, 4096, True) for n in range(20)], descriptors)


SENDERS = [
    _not_memfds,
    _not_sealed,
    _too_short,
    _only_for_reading,
    _only_for_writing,
    _too_many,
    _more_than_regions,
    _fewer_than_regions,
    _no_state,
    _malformed,
    _oversized,
    _odd_state,
    _beyond_all_memory,
    _mappings_without_end,
]
by_sender = pytest.mark.parametrize("send", SENDERS, ids=[send.__name__.strip("_") for send in SENDERS])


@by_sender
async def test_descriptors_that_are_not_what_was_announced_are_refused(send: Callable[[socket.socket], None]) -> None:
    """In the handshake: no link, no leaked descriptor, no damage. `scene` counts the victim's descriptors."""
    async with scene() as here:
        for _ in range(3):
            with Stranger.dial(here.victim.address) as stranger:
                answer = stranger.greet(1)
                with dial_channel(answer) as channel:
                    channel.sendall(token_of(answer))
                    send(channel)
                    channel.shutdown(socket.SHUT_WR)
                    hear_hang_up(channel)
        assert [link["peer"] for link in await here.victim.call("links")] == [2]


@by_sender
async def test_descriptors_on_an_open_link_are_no_more_trusted(send: Callable[[socket.socket], None]) -> None:
    """A peer that has linked and then sends rubbish on the descriptor socket loses its link, and harms no other."""
    async with scene() as here:
        with Stranger.dial(here.victim.address) as stranger:
            stranger.link(1)
            assert stranger.channel is not None
            send(stranger.channel)
            await until(lambda: here.victim.call("links"), lambda links: [link["peer"] for link in links] == [2])
            await here.serves_old_link()


@ON_ANY_LOOP
async def test_garbage_on_an_open_link_ends_that_link_alone(victim_loop: str) -> None:
    """A peer that has linked and then breaks the protocol loses its link; the others do not notice."""
    async with scene(victim_loop) as here:
        for words in (
            b"garbage, and a lot of it",
            struct.pack(">2sBBI", b"kv", 1, 0, 2**30),
            encode(Ping(1))[:-1] + b"\xc1",
        ):
            with Stranger.dial(here.victim.address) as stranger:
                stranger.link(1)
                stranger.say(words)
                stranger.hear_end()
            await here.serves_old_link()
        assert [link["peer"] for link in await here.victim.call("links")] == [2]


GEOMETRY = CacheGeometry(1, 1, 1, "uint8", None, True, ())


@pytest.mark.parametrize(
    "word",
    [
        pytest.param(Found(seq=7, cache_id=1, slot=0, geometry=GEOMETRY, word=0, generation=1), id="answer unasked"),
        pytest.param(Pong(2**64 - 1), id="pong unasked"),
        pytest.param(CloseRead(1, (0, 1)), id="lease of nobody"),
        pytest.param(CloseWrite(1), id="write lease of nobody"),
        pytest.param(Recall(2**64 - 1), id="recall of nothing"),
        pytest.param(hello(), id="hello again"),
        pytest.param(Refuse(status=0, field="", text=""), id="refusal"),
        pytest.param(LookUp(1, Target("no such namespace", 0)), id="unknown namespace"),
        pytest.param(LookUp(1, Target("id", 2**64 - 1, 0, 2**32 - 1)), id="unknown id"),
        pytest.param(OpenRead(1, Target("address", 1), 1.0), id="address of nothing"),
        pytest.param(OpenRead(1, Target("blocks", 0), math.nan), id="lease of not-a-number seconds"),
    ],
)
async def test_a_word_out_of_place_on_an_open_link_does_no_harm(word: Message) -> None:
    """Well-formed messages that make no sense are ignored, answered or end the link: never more."""
    async with scene() as here:
        with Stranger.dial(here.victim.address) as stranger:
            stranger.link(1)
            stranger.say(word, Ping(5))
            while (answer := stranger.hear()) is not None and answer != Pong(5):
                pass
            await here.serves_old_link()


async def test_a_giant_range_in_a_message_costs_no_time() -> None:
    """A peer that says it has read 4 billion tensors keeps the owner's loop no longer than one that read one."""
    async with scene() as here:
        await here.victim.call("allocate", num_tensors=2, shape=[2, 64], requests=[7])
        with Stranger.dial(here.victim.address) as stranger:
            stranger.link(1)
            stranger.say(OpenRead(1, Target("request", 7), 5.0))
            found = stranger.hear()
            assert isinstance(found, Found)
            stranger.say(CloseRead(found.lease, (0, 2**32 - 1)))
            (await here.good.check_link_status(1, timeout_s=3)).raise_for_status()


@pytest.mark.parametrize("role", [0, 99, 2**32 - 1])
async def test_a_role_that_does_not_exist_is_refused(role: int) -> None:
    """A hello with a number that is no role ends its own connection and nothing else."""
    async with scene() as here:
        with Stranger.dial(here.victim.address) as stranger:
            stranger.say(hello(expects=1, role=role))
            answer = stranger.hear()
            if isinstance(answer, Hello):  # it may be found later
                with dial_channel(answer) as channel, memfds(8192, 8192) as fds:
                    channel.sendall(token_of(answer))
                    send_regions(channel, [SharedRegion(POOL, 8192, True), SharedRegion(STATE, 8192, True)], fds)
                    socket.recv_fds(channel, 1, 0)
                    stranger.say(Ready(transport="shm"))
                    stranger.hear_end()


async def test_a_peer_that_asks_and_never_reads_is_given_up() -> None:
    """Answers that nobody takes pile up to a limit, not without end, and delay nobody."""
    async with scene() as here:
        with Stranger.dial(here.victim.address) as stranger:
            stranger.link(1)
            questions = encode(LookUp(1, Target("n" * 900, 0))) * 64  # whose answers are as long
            stranger.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
            stranger.sock.settimeout(0.2)
            deadline = time.monotonic() + 10
            with suppress(ConnectionError, TimeoutError):
                while time.monotonic() < deadline:
                    stranger.sock.sendall(questions)
            assert time.monotonic() < deadline, "all of it was taken"
            await here.serves_old_link()


async def test_leases_that_a_peer_hoards_end_with_its_link() -> None:
    """A peer may take many leases; they all come back when it goes, and the memory with them."""
    async with scene() as here:
        handle = await here.victim.call("allocate", num_tensors=2, shape=[2, 4096], requests=[7])
        before = (await here.victim.call("usage"))["pool_nbytes"]
        with Stranger.dial(here.victim.address) as stranger:
            stranger.link(1)
            stranger.say(*[OpenRead(seq, Target("request", 7), 1e9) for seq in range(1, 1001)])
            for _ in range(1000):
                assert isinstance(stranger.hear(), Found)
            await here.victim.call("deallocate", cache=handle)
            await here.victim.call("remove_key", request=7)
            assert (await here.victim.call("usage"))["pool_nbytes"] == before
        for _ in range(500):
            usage = await here.victim.call("usage")
            if usage["read_leases"] == 0:
                break
        assert usage["read_leases"] == 0
        assert usage["pool_nbytes"] < before


@ON_ANY_LOOP
async def test_a_process_out_of_descriptors_lives_on(victim_loop: str) -> None:
    """With every descriptor taken by strangers the victim accepts nobody new, keeps its links, and recovers."""
    async with scene(victim_loop, max_fds=80) as here:
        with ExitStack() as stack:
            for _ in range(100):
                stack.enter_context(Stranger.dial(here.victim.address))
            await here.victim.call("links")
            await here.serves_old_link()


# The victim dials: the stranger is the one that answers.


def _hang_up(stranger: Stranger) -> None:
    pass


def _garbage(stranger: Stranger) -> None:
    stranger.say(os.urandom(5000))
    stranger.sock.shutdown(socket.SHUT_WR)


def _oversized_hello(stranger: Stranger) -> None:
    stranger.say(struct.pack(">2sBBI", b"kv", 1, 0, 2**31))


def _no_transport(stranger: Stranger) -> None:
    stranger.say(hello(transports=()))
    stranger.hear_end()


def _transport_unknown(stranger: Stranger) -> None:
    stranger.say(hello(transports=("carrier pigeon",)))
    stranger.hear_end()


def _descriptors_nowhere(stranger: Stranger) -> None:
    stranger.say(hello(offers={"shm": b"x" * 32 + b"nowhere at all"}))
    stranger.hear_end()


def _ready_first(stranger: Stranger) -> None:
    stranger.say(Ready(transport="shm"))
    stranger.hear_end()


def _nonsense_role(stranger: Stranger) -> None:
    stranger.say(hello(role=99))
    stranger.hear_end()


def _rubbish_descriptors(stranger: Stranger) -> None:
    _accept_channel(stranger, hello(), _not_memfds)


def _malformed_descriptors(stranger: Stranger) -> None:
    _accept_channel(stranger, hello(), _malformed)


def _accept_channel(stranger: Stranger, ours: Hello, send: Callable[[socket.socket], None]) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.settimeout(10)
        name = f"stranger-{os.urandom(8).hex()}"
        listener.bind("\0" + name)
        listener.listen()
        fields = msgspec.structs.asdict(ours)
        stranger.say(Hello(**{**fields, "offers": {"shm": b"x" * 32 + name.encode()}}))
        channel, _ = listener.accept()
        with channel:
            channel.settimeout(10)
            assert channel.recv(32) == b"x" * 32
            _, descriptors, _, _ = socket.recv_fds(channel, 1 << 16, 16)
            for fd in descriptors:
                os.close(fd)
            send(channel)
            stranger.say(Ready(transport="shm"))
            channel.shutdown(socket.SHUT_WR)
            hear_hang_up(channel)
            stranger.hear_end()


ANSWERS = [
    _hang_up,
    _garbage,
    _oversized_hello,
    _no_transport,
    _transport_unknown,
    _descriptors_nowhere,
    _ready_first,
    _nonsense_role,
    _rubbish_descriptors,
    _malformed_descriptors,
]


@pytest.mark.parametrize("answer", ANSWERS, ids=[answer.__name__.strip("_") for answer in ANSWERS])
async def test_dialling_somebody_strange_fails_alone(answer: Callable[[Stranger], None]) -> None:
    """Whatever a dialled address answers, the call ends with one link error that names the address."""
    async with scene() as here:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(10)
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            pending = here.victim.start("link", clusters=[(99, address)], timeout_s=3)
            sock, _ = listener.accept()
            with Stranger(sock) as stranger:
                first = stranger.hear()
                assert isinstance(first, Hello)
                answer(stranger)
        with pytest.raises(kv.LinkError) as caught:
            await pending.result()
        assert address in str(caught.value)
        assert caught.value.peer == 99
        assert [link["peer"] for link in await here.victim.call("links")] == [2]
