"""Who may link, and what those learn who may not."""

from __future__ import annotations

import logging
import os
import re
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import anyio
import pytest
from anyio.streams.tls import TLSStream

import kvlink as kv
from kvlink.config import check_listen
from kvlink.credentials import check_user
from kvlink.links.seal import Seal, make_nonce
from kvlink.transports.shm_channel import TOKEN_NBYTES
from kvlink.wire import Challenge, Hello, Message, Ready, Refuse, Sealed, encode, pack
from tests.support.loops import asyncio_and_trio, eventually, every_loop
from tests.support.peer import REPOSITORY, spawn_peer
from tests.support.stranger import Stranger, hello

SECRET: Final = b"correct horse battery staple"
OTHER: Final = b"incorrect horse battery staple"
DESC: Final = kv.CacheDesc(2, (8, 4096), "uint8")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to run a process as another user")


def cluster(cluster_id: int, *, listen: str | None = None, **config: Any) -> kv.Cluster:
    """Return a small cluster."""
    settings = kv.ClusterConfig(**config)
    return kv.Cluster(cluster_id=cluster_id, role=kv.Role.MIX, pool="4MiB", listen=listen, config=settings)


def info(of: kv.Cluster, address: str | None = None) -> kv.ClusterInfo:
    """Return what links to a cluster of this process."""
    return kv.ClusterInfo(of.cluster_id, address or of.address)


async def pulls(owner: kv.Cluster, reader: kv.Cluster) -> None:
    """Move a block from one to the other."""
    key = kv.BlocksCacheKey(owner.cluster_id)
    theirs = owner.kv_cache_manager.allocate_blocks_cache(DESC, key)
    ours = reader.kv_cache_manager.allocate_blocks_cache(DESC)
    theirs.tensors[1][3] = 77
    await reader.kv_cache_manager.pull_blocks(key, ours, [3], [5], timeout_s=5)
    assert ours.tensors[1][5, 100] == 77
    owner.kv_cache_manager.deallocate_cache(theirs)
    reader.kv_cache_manager.deallocate_cache(ours)


async def refusal(here: kv.Cluster, there: kv.ClusterInfo) -> str:
    """Fail to link, and return why."""
    status, (result,) = await here.link_clusters([there], timeout_s=5)
    assert status is kv.StatusCode.LLM_LINK_FAILED
    assert isinstance(result.error, kv.LinkError)
    assert list(here.links) == []
    return str(result.error)


# The secret


@every_loop
async def test_two_clusters_with_one_secret_link() -> None:
    """And move bytes, as those do that have none."""
    async with cluster(1, secret=SECRET) as one, cluster(2, secret=SECRET) as two:
        (await two.link_clusters([info(one)])).raise_for_status()
        await pulls(one, two)


@asyncio_and_trio
async def test_both_may_dial_at_once() -> None:
    """Two connections that cross become one link, with a secret too."""
    async with cluster(1, secret=SECRET) as one, cluster(2, secret=SECRET) as two:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one.link_clusters, [info(two)])
            tasks.start_soon(two.link_clusters, [info(one)])
        assert [link.peer for link in one.links] == [2]
        assert [link.peer for link in two.links] == [1]
        await pulls(one, two)


@pytest.mark.parametrize(
    ("dialler", "acceptor"),
    [(SECRET, None), (None, SECRET), (SECRET, OTHER)],
    ids=["the acceptor has none", "the dialler has none", "they differ"],
)
async def test_secrets_that_do_not_match_are_refused_by_name(
    dialler: bytes | None, acceptor: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Both sides say which setting it is, and neither shows what it is set to. A third with the right one links."""
    async with (
        cluster(1, secret=acceptor) as one,
        cluster(2, secret=dialler) as two,
        cluster(3, secret=acceptor) as three,
    ):
        text = await refusal(two, info(one))
        await eventually(lambda: caplog.records, "the acceptor's line")
        for said in (text, caplog.text):
            assert "ClusterConfig.secret" in said
            assert "horse" not in said
        assert len(caplog.records) == 1
        if dialler is None or acceptor is None:
            assert ("set" in text) == ("not set" in text)
        (await three.link_clusters([info(one)])).raise_for_status()
        assert list(two.links) == []


def listening() -> socket.socket:
    """Return a socket that a cluster can dial."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(10)
    return listener


def told_apart(*identities: kv.Cluster) -> list[bytes]:
    """Return what would give a cluster away: its incarnation, and the descriptor socket of its transport."""
    return [identity.incarnation for identity in identities] + [b"kvlink-", b"shm", b"incarnation", b"role"]


async def test_a_stranger_learns_nothing_of_whom_it_has_dialled() -> None:
    """Before it has proved anything it hears a nonce and a proof; after a wrong one, a refusal without a name."""
    async with spawn_peer(1, "MIX", pool="4MiB", config={"secret": SECRET.decode()}) as peer:
        for last in (
            Sealed(pack(hello(2, expects=1)), bytes(32)),
            hello(2, expects=1),
            Ready(transport="shm"),
            Challenge(nonce=make_nonce()),
        ):
            with Stranger.dial(peer.address) as stranger:
                stranger.say(Challenge(nonce=make_nonce()), last)
                first = stranger.hear()
                end = stranger.hear_end()
            assert isinstance(first, Challenge)
            assert isinstance(end, Refuse)
            for word in ("cluster 1", "MIX", "shm"):
                assert word not in end.text
        with Stranger.dial(peer.address) as stranger:
            stranger.say(hello(2, expects=1))
            assert isinstance(stranger.hear(), Refuse)
        assert await peer.call("links") == []


@pytest.mark.parametrize("is_mirror", [False, True])
async def test_a_dialler_says_nothing_of_itself_to_a_stranger(is_mirror: bool) -> None:
    """Whoever sits at the address hears a nonce, and a refusal when its answer proves nothing: also when it is ours."""
    async with cluster(2, secret=SECRET) as here, anyio.create_task_group() as tasks:
        heard: list[Message | None] = []
        with listening() as listener:

            def serve() -> None:
                sock, _ = listener.accept()
                with Stranger(sock) as stranger:
                    heard.append(first := stranger.hear())
                    assert isinstance(first, Challenge)
                    stranger.say(first if is_mirror else Challenge(nonce=make_nonce(), proof=make_nonce()))
                    heard.append(stranger.hear_end())

            tasks.start_soon(anyio.to_thread.run_sync, serve)
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            text = await refusal(here, kv.ClusterInfo(1, address))
        await eventually(lambda: len(heard) == 2, "the stranger's hearing")
        assert "ClusterConfig.secret" in text
        assert isinstance(heard[1], Refuse)
        assert "cluster 2" not in heard[1].text
        assert not any(word in repr(heard).encode() for word in told_apart(here))


class Recorder:
    """A relay in this loop that keeps what passes, and may change it."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self.passed: list[bytes] = []

    @asynccontextmanager
    async def running(
        self, server: ssl.SSLContext | None = None, client: ssl.SSLContext | None = None
    ) -> AsyncIterator[str]:
        """Relay until the context ends; the value is the address to dial. With contexts, it ends TLS and begins it."""
        listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
        async with listener, anyio.create_task_group() as tasks:

            async def relay(near: Any) -> None:
                far: Any = await anyio.connect_tcp(*self._target)
                if server is not None and client is not None:
                    near = await TLSStream.wrap(near, ssl_context=server, standard_compatible=False)
                    far = await TLSStream.wrap(far, ssl_context=client, hostname="localhost", standard_compatible=False)
                async with near, far, anyio.create_task_group() as both:
                    both.start_soon(self._pump, near, far, both)
                    both.start_soon(self._pump, far, near, both)

            tasks.start_soon(listener.serve, relay)
            port = listener.extra(anyio.abc.SocketAttribute.local_port)
            yield f"127.0.0.1:{port}"
            tasks.cancel_scope.cancel()

    async def _pump(self, source: Any, sink: Any, both: Any) -> None:
        with suppress(anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
            while True:
                piece = await source.receive()
                self.passed.append(piece)
                await sink.send(piece)
        both.cancel_scope.cancel()


async def test_the_secret_does_not_travel() -> None:
    """Nor does what it opens, the way to shared memory; and it is in no repr."""
    async with cluster(1, secret=SECRET) as one, cluster(2, secret=SECRET) as two:
        recorder = Recorder(one.address)
        async with recorder.running() as address:
            (await two.link_clusters([info(one, address)])).raise_for_status()
            (await two.check_link_status(1)).raise_for_status()
        assert len(b"".join(recorder.passed)) > 500
        assert SECRET not in b"".join(recorder.passed)
        assert b"offers" in b"".join(recorder.passed)
        assert b"kvlink-" not in b"".join(recorder.passed)  # where memory is shared, and what to show there
        assert "horse" not in repr(one.config) + repr(one)


async def test_a_recorded_handshake_cannot_be_played_again() -> None:
    """Everything a dialler said once, said again by somebody else, is refused."""
    async with cluster(1, secret=SECRET) as one:
        async with cluster(2, secret=SECRET) as two:
            recorder = Recorder(one.address)
            async with recorder.running() as address:
                (await two.link_clusters([info(one, address)])).raise_for_status()
        host, _, port = one.address.rpartition(":")
        async with await anyio.connect_tcp(host, int(port)) as stream:
            for piece in recorder.passed[:8]:
                await stream.send(piece)
            with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
                while True:
                    await stream.receive()
        assert list(one.links) == []


async def test_a_link_to_oneself_through_a_relay_is_noticed() -> None:
    """The one reflection that the labels allow: a cluster that is connected to itself knows the secret, and refuses."""
    async with cluster(1, secret=SECRET) as one:
        status, (result,) = await one.link_clusters([kv.ClusterInfo(7, one.address)])
        assert status is kv.StatusCode.LLM_LINK_FAILED
        assert "this very cluster" in str(result.error)


async def test_an_insider_who_says_too_much_is_refused_like_anyone() -> None:
    """With the secret too, what is malformed, too long or out of order ends the connection, and no more."""
    async with spawn_peer(1, "MIX", pool="4MiB", config={"secret": SECRET.decode()}) as peer:
        for said in (
            Ready(transport="shm"),
            hello(2, version=9, expects=1),
            hello(2, expects=8),
            hello(1),
            b"\xc1" * 9,
        ):
            with Stranger.dial(peer.address) as stranger:
                nonce = make_nonce()
                stranger.say(Challenge(nonce=nonce))
                theirs = stranger.hear()
                assert isinstance(theirs, Challenge)
                seal = Seal(SECRET, is_dialler=True, binding=b"", dialler_nonce=nonce, acceptor_nonce=theirs.nonce)
                seal.check(theirs)
                if isinstance(said, bytes):
                    sealed = seal.close(hello(2))
                    stranger.say(Sealed(said, sealed.proof))
                else:
                    stranger.say(seal.close(said))
                assert isinstance(stranger.hear_end(), Refuse)
        assert await peer.call("links") == []


# TLS


def certificates() -> Any:
    """Return an authority of this test's own."""
    trustme = pytest.importorskip("trustme", reason="certificates are made with trustme, which is not installed")
    return trustme.CA()


def contexts(authority: Any, *, is_mutual: bool = False) -> dict[str, Any]:
    """Return both contexts of a cluster on 127.0.0.1."""
    own = authority.issue_cert("127.0.0.1", "localhost")
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    own.configure_cert(server)
    authority.configure_trust(client)
    if is_mutual:
        own.configure_cert(client)
        authority.configure_trust(server)
        server.verify_mode = ssl.CERT_REQUIRED
    return {"tls_server": server, "tls_client": client}


@every_loop
async def test_clusters_link_over_tls() -> None:
    """Nothing that they say can be read by who is in between: no name of a message, no id, no transport."""
    settings = contexts(certificates())
    async with cluster(1, **settings) as one, cluster(2, **settings) as two:
        recorder = Recorder(one.address)
        async with recorder.running() as address:
            (await two.link_clusters([info(one, address)])).raise_for_status()
            await pulls(one, two)
            (await two.unlink_clusters([1])).raise_for_status()
        passed = b"".join(recorder.passed)
        assert len(passed) > 1000
        assert not any(word in passed for word in told_apart(one, two))


@every_loop
async def test_tls_carries_a_crowd_both_ways() -> None:
    """Hundreds of questions and answers at the same time, in both directions of one connection, all find their way."""
    settings = contexts(certificates())
    async with cluster(1, **settings) as one, cluster(2, secret=None, **settings) as two:
        (await two.link_clusters([info(one)])).raise_for_status()
        results: list[kv.LinkResults] = []

        async def ask(here: kv.Cluster, peer: int) -> None:
            for _ in range(5):
                results.append(await here.check_link_status(peer, timeout_s=20))

        async with anyio.create_task_group() as tasks:
            for _ in range(60):
                tasks.start_soon(ask, one, 2)
                tasks.start_soon(ask, two, 1)
        assert len(results) == 600
        assert all(result.status is kv.StatusCode.LLM_SUCCESS for result in results)


async def test_a_cluster_without_a_certificate_is_refused_where_one_is_asked_for() -> None:
    """Mutual TLS: who has a certificate of the authority links, who has none or another's does not, and says TLS."""
    authority = certificates()
    mutual, plain, foreign = (
        contexts(authority, is_mutual=True),
        contexts(authority),
        contexts(certificates(), is_mutual=True),
    )
    async with cluster(1, **mutual) as one, cluster(2, **mutual) as two, cluster(3, **plain) as three:
        (await two.link_clusters([info(one)])).raise_for_status()
        assert "ClusterConfig.tls_client" in await refusal(three, info(one))
        async with cluster(4, **foreign) as four:
            assert "TLS failed" in await refusal(four, info(one))
        await pulls(one, two)


@pytest.mark.parametrize("has_tls", ["dialler", "acceptor"])
async def test_tls_on_one_side_alone_is_refused(has_tls: str, caplog: pytest.LogCaptureFixture) -> None:
    """Both sides say that it is TLS."""
    settings = contexts(certificates())
    ours, theirs = (settings, {}) if has_tls == "dialler" else ({}, settings)
    async with cluster(1, **theirs) as one, cluster(2, **ours) as two:
        text = await refusal(two, info(one))
        await eventually(lambda: caplog.records, "the acceptor's line")
        for said in (text, caplog.text):
            assert "TLS" in said
            assert "ClusterConfig.tls_" in said


async def test_the_secret_is_bound_to_the_tls_connection() -> None:
    """Who ends our TLS and begins another to our peer is let through by careless contexts, but not by the secret."""
    settings = contexts(certificates())
    careless = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    careless.check_hostname, careless.verify_mode = False, ssl.CERT_NONE
    settings["tls_client"] = careless
    middle = contexts(certificates())["tls_server"]
    for secret in (None, SECRET):
        async with cluster(1, secret=secret, **settings) as one, cluster(2, secret=secret, **settings) as two:
            (await two.link_clusters([info(one)])).raise_for_status()
            (await two.unlink_clusters([1])).raise_for_status()
            async with Recorder(one.address).running(middle, careless) as address:
                if secret is None:
                    (await two.link_clusters([info(one, address)])).raise_for_status()
                    (await two.unlink_clusters([1])).raise_for_status()
                else:
                    assert "ClusterConfig.secret" in await refusal(two, info(one, address))


async def test_a_silent_tls_client_is_closed_by_the_deadline(caplog: pytest.LogCaptureFixture) -> None:
    """A connection that never begins TLS is a stranger like any other."""
    async with cluster(1, handshake_timeout_s=0.2, **contexts(certificates())) as one:
        host, _, port = one.address.rpartition(":")
        async with await anyio.connect_tcp(host, int(port)) as stream:
            with pytest.raises(anyio.EndOfStream), anyio.fail_after(5):
                await stream.receive()
    assert "never said who it is" in caplog.text


# Users


AS_NOBODY: Final = """
import os, socket, sys
os.setgid(65534); os.setuid(65534)
name, said = sys.argv[1].replace("@", chr(0), 1), bytes.fromhex(sys.argv[2])
with socket.socket(socket.AF_UNIX) as sock:
    sock.settimeout(10)
    sock.connect(name)
    try:
        sock.sendall(said)
        print(len(sock.recv(65536)))
    except ConnectionError:
        print(0)
"""
SERVE_AS_NOBODY: Final = """
import os, socket, sys
os.setgid(65534); os.setuid(65534)
with socket.socket(socket.AF_UNIX) as sock:
    sock.bind(sys.argv[1].replace("@", chr(0), 1))
    sock.listen()
    print("listening", flush=True)
    sock.settimeout(10)
    print(len(sock.accept()[0].recv(65536)))
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can enter, with a short name."""
    folder = Path("/tmp") / f"kvlink-test-{os.getpid()}"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    yield folder
    for left in folder.iterdir():
        left.unlink()
    folder.rmdir()


def as_nobody(program: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a program as the user nobody."""
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
    )


async def heard_by(program: subprocess.Popen[str]) -> int:
    """Return how many bytes it was told."""
    out, _ = await anyio.to_thread.run_sync(program.communicate)
    return int(out.split()[-1])


@needs_root
@pytest.mark.parametrize("is_allowed", [False, True])
async def test_another_user_is_refused_on_a_unix_socket(
    is_allowed: bool, open_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the mode of the file: its process hears nothing, unless its user is named."""
    path = f"{open_folder}/socket"
    allowed = (65534,) if is_allowed else ()
    async with cluster(1, listen=f"unix:{path}", allowed_uids=allowed):
        os.chmod(path, 0o777)
        heard = await heard_by(as_nobody(AS_NOBODY, path, encode(hello(2, expects=1)).hex()))
        assert (heard > 0) == is_allowed
        assert ("ClusterConfig.allowed_uids" in caplog.text) != is_allowed


@needs_root
async def test_another_users_socket_is_not_spoken_to(open_folder: Path) -> None:
    """Who has taken the path of a cluster that has gone, and is another user, is told nothing."""
    path = f"{open_folder}/socket"
    async with cluster(2) as here:
        impostor = as_nobody(SERVE_AS_NOBODY, path)
        assert impostor.stdout is not None
        await anyio.to_thread.run_sync(impostor.stdout.readline)
        text = await refusal(here, kv.ClusterInfo(1, f"unix:{path}"))
        assert "65534" in text
        assert "ClusterConfig.allowed_uids" in text
        assert await heard_by(impostor) == 0


@needs_root
async def test_a_stolen_token_is_worth_nothing_to_another_user(caplog: pytest.LogCaptureFixture) -> None:
    """The descriptors of our memory are for processes of our user, whoever knows the token."""
    async with cluster(1) as one:
        host, _, port = one.address.rpartition(":")
        async with await anyio.connect_tcp(host, int(port)) as stream:
            await stream.send(encode(hello(2, expects=1)))
            answer = _hello_of(await stream.receive())
            card = answer.offers["shm"]
            name = f"@{card[TOKEN_NBYTES:].decode()}"
            assert await heard_by(as_nobody(AS_NOBODY, name, card[:TOKEN_NBYTES].hex())) == 0
        assert "ClusterConfig.allowed_uids" in caplog.text


def _hello_of(frame: bytes) -> Hello:
    from kvlink.wire import FrameDecoder

    (message,) = FrameDecoder().feed(frame)
    assert isinstance(message, Hello)
    return message


def test_a_user_is_ours_or_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other end of a Unix socket is refused with both users and the setting, unless it is in the list."""
    ours = os.geteuid()
    near, far = socket.socketpair()
    with near, far:
        check_user(near, ())
        monkeypatch.setattr(os, "geteuid", lambda: ours + 1)
        check_user(near, (ours,))
        with pytest.raises(kv.LinkError, match=rf"user {ours} .* {ours + 1}; .*ClusterConfig.allowed_uids"):
            check_user(near, (ours + 2,))


# Where to listen


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "10.1.2.3:7000", "[fe80::1%eth0]:1", "some-name:7000"])
def test_an_open_door_is_refused(listen: str) -> None:
    """A cluster does not listen for other hosts without a secret or certificates, unless that is what was asked for."""
    with pytest.raises(kv.ParameterError, match=r"secret.*CERT_REQUIRED.*allow_unauthenticated"):
        cluster(1, listen=listen)
    cluster(1, listen=listen, allow_unauthenticated=True)
    cluster(1, listen=listen, secret=SECRET)
    asks, asks_not = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    asks.verify_mode = ssl.CERT_REQUIRED
    cluster(1, listen=listen, tls_server=asks)
    with pytest.raises(kv.ParameterError):
        cluster(1, listen=listen, tls_server=asks_not)


@pytest.mark.parametrize(
    "listen", ["127.0.0.1:0", "127.8.9.1:1", "[::1]:0", "[::ffff:127.0.0.1]:1", "localhost:0", "unix:/x"]
)
def test_this_hosts_own_addresses_need_no_secret(listen: str) -> None:
    """Loopback addresses and Unix sockets are as safe as the host."""
    check_listen(listen, kv.ClusterConfig())


async def test_a_change_of_role_opens_no_door() -> None:
    """`switch_role` to a wildcard is refused like the constructor, and changes nothing."""
    async with cluster(1) as here:
        address = here.address
        with pytest.raises(kv.ParameterError, match="allow_unauthenticated"):
            await here.switch_role(kv.Role.PROMPT, listen="0.0.0.0:0")
        assert (here.role, here.address) == (kv.Role.MIX, address)


# Floods


async def test_a_flood_of_bad_connections_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Some lines at once, then one a second, and the next one says how many were left out."""
    async with cluster(1) as here, cluster(2) as good:
        host, _, port = here.address.rpartition(":")
        for _ in range(100):
            async with await anyio.connect_tcp(host, int(port)) as stream:
                await stream.send(b"garbage!")
                with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
                    await stream.receive()
        assert 20 <= len(caplog.records) <= 25
        (await good.link_clusters([info(here)])).raise_for_status()


@pytest.mark.parametrize("loop_name", ["asyncio", "trio"])
async def test_500_connections_that_stop_in_mid_proof_keep_nobody_out(loop_name: str) -> None:
    """Strangers that ask for a proof and then say nothing, one byte of theirs at most, delay no one with the secret."""
    config = {"secret": SECRET.decode()}
    async with spawn_peer(1, "MIX", pool="4MiB", loop_name=loop_name, config=config) as peer:
        with ExitStack() as stack:
            for number in range(500):
                stranger = stack.enter_context(Stranger.dial(peer.address))
                stranger.say(Challenge(nonce=make_nonce()), b"k" * (number % 2))
            async with cluster(2, secret=SECRET) as good:
                with anyio.fail_after(3):
                    (await good.link_clusters([peer.info])).raise_for_status()


def test_a_flood_is_summed_up() -> None:
    """The line that follows a flood has its size; silence lets a burst through again."""
    from kvlink import acceptor

    now = 1000.0
    lines: list[str] = []

    class Log(logging.Logger):
        def log(self, level: int, message: object, *arguments: object, **_: Any) -> None:  # type: ignore[override]
            lines.append(str(message) % arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(anyio, "current_time", lambda: now)
        complaints = acceptor.Complaints(Log("x"))
        for number in range(50):
            complaints.say("no %d", number)
        assert lines == [f"no {number}" for number in range(20)]
        now += 1.0
        complaints.say("no %d", 50)
        complaints.say("no %d", 51)
        assert lines[20:] == ["no 50 (30 more lines like this were left out)"]
        now += 100.0
        for number in range(30):
            complaints.say("later %d", number)
        assert len(lines) == 41
        assert lines[21] == "later 0 (1 more lines like this were left out)"


# Settings


def test_a_secret_is_long_and_is_not_shown() -> None:
    """Too short, too long or no bytes: refused without the value; and it is in no repr."""
    for bad in (b"", b"0123456789abcde", bytes(4097)):
        with pytest.raises(kv.ParameterValueError, match=rf"16 to 4096 bytes.* has {len(bad)}:") as caught:
            kv.ClusterConfig(secret=bad)
        assert "abcde" not in str(caught.value)
    with pytest.raises(kv.ParameterTypeError, match=r"^secret must be bytes or None, got str$"):
        kv.ClusterConfig(secret="a secret that is text")  # type: ignore[arg-type]  # that is the test
    assert "secret" not in repr(kv.ClusterConfig(secret=SECRET))


def test_a_secret_comes_from_a_file(tmp_path: Path) -> None:
    """Named in the environment, where it must not stand itself; the newline of an editor is not part of it."""
    file = tmp_path / "secret"
    for content in (SECRET, SECRET + b"\n", SECRET + b"\r\n"):
        file.write_bytes(content)
        assert kv.ClusterConfig.from_environ({"KVLINK_SECRET_FILE": str(file)}).secret == SECRET
    for environ, word in (
        ({"KVLINK_SECRET": "my dear secret of length"}, "KVLINK_SECRET_FILE"),
        ({"KVLINK_SECRET_FILE": str(tmp_path / "nothing")}, "cannot read"),
        ({"KVLINK_SECRET_FILE": os.devnull}, "has 0"),
    ):
        with pytest.raises(kv.ParameterError, match=re.escape(word)) as caught:
            kv.ClusterConfig.from_environ(environ)
        assert "dear" not in str(caught.value)


def test_the_other_settings_are_checked() -> None:
    """Contexts are contexts, user ids are numbers, and the environment can say the latter."""
    for name in ("tls_server", "tls_client"):
        with pytest.raises(kv.ParameterTypeError, match=rf"^{name} must be an ssl.SSLContext"):
            kv.ClusterConfig(**{name: "a context"})  # type: ignore[arg-type]  # that is the test
    for bad in ([1], (1, "2"), (-1,), (True,)):
        with pytest.raises(kv.ParameterError, match="allowed_uids"):
            kv.ClusterConfig(allowed_uids=bad)  # type: ignore[arg-type]  # that is the test
    assert kv.ClusterConfig.from_environ({"KVLINK_ALLOWED_UIDS": "1000,1001"}).allowed_uids == (1000, 1001)
    with pytest.raises(kv.ParameterError, match="KVLINK_ALLOWED_UIDS"):
        kv.ClusterConfig.from_environ({"KVLINK_ALLOWED_UIDS": "root"})
