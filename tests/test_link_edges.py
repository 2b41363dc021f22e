"""Words and calls that meet a link at the moment of its beginning or its end."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.to_thread
import pytest
from anyio.abc import ByteStream

import kvlink as kv
from kvlink import loops as loops_module
from kvlink.links import handshake as handshake_module
from kvlink.links import link as link_module
from kvlink.links.notifications import move_then_notify
from kvlink.wire import Claim, FrameDecoder, OpenRead, OpenWrite, Ping, Ready, Target
from tests.spec.harness import D, P, hold, linked_pair
from tests.support.inside import link_to, num_read_leases, num_write_leases
from tests.support.loops import asyncio_and_trio, eventually, every_loop
from tests.support.stranger import Stranger

DESC = kv.CacheDesc(2, (4, 512), "uint8")
MIX = (kv.Role.MIX, kv.Role.MIX)


def is_last_word(sent: bytes) -> bool:
    """Whether this is the last message of a handshake: the `Ready` of the accepting side, which gives no reason."""
    (message,) = FrameDecoder().feed(sent)
    return isinstance(message, Ready) and not message.reason


@every_loop
async def test_what_a_peer_said_after_the_end_of_its_link_is_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions that came in one piece with the word that ended the link give no lease and no ticket to the dead."""
    async with kv.Cluster(cluster_id=1, role=kv.Role.MIX, pool="1MiB") as owner:
        manager = owner.kv_cache_manager
        cache = manager.allocate_blocks_cache(DESC, kv.BlocksCacheKey(1))
        ticket = manager.offer_blocks(cache, [1])
        target = Target("blocks", 0)
        with Stranger.dial(owner.address) as stranger:
            await anyio.to_thread.run_sync(stranger.link, 1)
            await eventually(lambda: owner.links, "the link")
            monkeypatch.setattr(link_module, "_MAX_QUEUED_NBYTES", 0)  # the answer to the ping is one too many
            claim = Claim(4, ticket.number, ticket.secret, False)
            stranger.say(Ping(1), OpenWrite(2, target), OpenRead(3, target, 100.0), claim)
            await eventually(lambda: not owner.links, "the end of the link")
            await anyio.wait_all_tasks_blocked()
            assert (num_write_leases(owner), num_read_leases(owner)) == (0, 0)
            assert "open" in repr(ticket)
        ticket.revoke()
        manager.deallocate_cache(cache)


@every_loop
async def test_a_notification_behind_a_movement_fails_at_once_when_its_link_has_ended() -> None:
    """The link goes while the last bytes land: the bytes are reported as in place, and nobody waits for an answer."""
    async with linked_pair("shm", roles=MIX) as pair:
        link = link_to(pair.decoder, P)

        async def move() -> kv.TransferReport:
            link.lose(kv.LinkLostError("the cable was cut", peer=P))
            return kv.TransferReport(P, "shm", 1, 1, 0.0, (0,))

        started = anyio.current_time()
        with pytest.raises(kv.LinkLostError, match="all bytes are in place") as caught:
            await move_then_notify(link, b"done", move, timeout_s=20)
        assert caught.value.phase == "notify"
        assert anyio.current_time() - started < 5


@asyncio_and_trio
@pytest.mark.parametrize("config", [{"max_operations": 1}, {"max_nbytes_in_flight": 512}], ids=["operations", "bytes"])
async def test_a_queue_ends_with_its_link_also_where_another_link_has_what_it_waits_for(config: dict[str, int]) -> None:
    """A pull waits for a turn that another link's pull has; its own link is lost: it fails at once, typed."""
    async with (
        linked_pair("shm", roles=MIX, **config) as pair,
        kv.Cluster(cluster_id=3, role=kv.Role.MIX, pool="1MiB") as other,
    ):
        (await pair.decoder.link_clusters([kv.ClusterInfo(3, other.address)])).raise_for_status()
        caches = [
            manager.allocate_blocks_cache(DESC, kv.BlocksCacheKey(peer))
            for peer, manager in ((P, pair.owner), (3, other.kv_cache_manager))
        ]
        ours = pair.reader.allocate_blocks_cache(DESC)
        await pair.reader.prepare_pull(kv.BlocksCacheKey(3), ours)  # looked up: the pull waits for nothing else
        held, link = hold(pair.decoder, P, "get"), link_to(pair.decoder, 3)
        link.endpoint.immediate_nbytes = 0
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pair.reader.pull_blocks, kv.BlocksCacheKey(P), ours, [0], [0])
            await held.reached.wait()
            errors: list[kv.KVLinkError] = []

            async def pull() -> None:
                try:
                    await pair.reader.pull_blocks(kv.BlocksCacheKey(3), ours, [1], [1], timeout_s=25)
                except kv.KVLinkError as exc:
                    errors.append(exc)

            tasks.start_soon(pull)
            await eventually(lambda: link.operations.waiting or link.nbytes.waiting, "the queue")
            link.lose(kv.LinkLostError("the cable was cut", peer=3))
            await eventually(lambda: errors, "its end", within_s=3)
            assert (type(errors[0]), errors[0].peer) == (kv.LinkLostError, 3)
            assert ours.is_quiet([1])
            with pytest.raises(kv.LinkLostError):
                await (link.operations if "max_operations" in config else link.nbytes).take(1, 25)  # too late
            held.release()
        assert (link.operations.used, link.nbytes.used) == (0, 0)
        for manager, cache in zip((pair.owner, other.kv_cache_manager, pair.reader), (*caches, ours), strict=True):
            manager.deallocate_cache(cache)


@every_loop
async def test_whoever_was_dialled_is_linked_before_the_dialler_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The accepting side has said its last word and had no turn since: the link is open there when the dial returns."""
    async with (
        kv.Cluster(cluster_id=1, role=kv.Role.MIX, pool="1MiB") as accepting,
        kv.Cluster(cluster_id=2, role=kv.Role.MIX, pool="1MiB") as dialling,
    ):
        may_go_on = anyio.Event()
        send_all = loops_module.send_all

        async def send_and_fall_asleep(stream: ByteStream, sent: bytes) -> None:
            await send_all(stream, sent)
            if is_last_word(sent):
                await may_go_on.wait()

        monkeypatch.setattr(handshake_module, "send_all", send_and_fall_asleep)
        (await dialling.link_clusters([kv.ClusterInfo(1, accepting.address)])).raise_for_status()
        assert link_to(accepting, 2).is_open
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(accepting.notify, 2, b"hello")
            await anyio.wait_all_tasks_blocked()
            may_go_on.set()
        assert (await dialling.notifications().__anext__()).payload == b"hello"


@every_loop
async def test_a_dialler_that_goes_away_before_the_last_word_leaves_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """The accepting side is linked and cannot say so any more: its half ends, and its listeners hear of both."""
    async with kv.Cluster(cluster_id=1, role=kv.Role.MIX, pool="1MiB") as accepting, accepting.events() as events:
        send_all = loops_module.send_all

        async def send_or_fail(stream: ByteStream, sent: bytes) -> None:
            if is_last_word(sent):
                raise anyio.BrokenResourceError
            await send_all(stream, sent)

        monkeypatch.setattr(handshake_module, "send_all", send_or_fail)
        async with kv.Cluster(cluster_id=2, role=kv.Role.MIX, pool="1MiB") as dialling:
            results = await dialling.link_clusters([kv.ClusterInfo(1, accepting.address)])
            assert results.status == kv.StatusCode.LLM_LINK_FAILED
            assert [type(await events.__anext__()) for _ in range(2)] == [kv.LinkUp, kv.LinkLost]
            assert accepting.links == ()
            monkeypatch.undo()
            (await dialling.link_clusters([kv.ClusterInfo(1, accepting.address)])).raise_for_status()


@every_loop
@pytest.mark.parametrize("what", ["pull", "notify"])
async def test_a_question_that_crosses_the_goodbye_is_answered(what: str) -> None:
    """The owner says goodbye while a look-up is on its way: the call ends well, and neither side waits for a limit."""
    async with linked_pair("shm", roles=MIX) as pair:
        theirs = pair.owner.allocate_blocks_cache(DESC, kv.BlocksCacheKey(P))
        ours = pair.reader.allocate_blocks_cache(DESC)
        link = link_to(pair.prompt, D)
        started = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pair.prompt.unlink_clusters, [D])
            if what == "pull":
                tasks.start_soon(pair.reader.pull_blocks, kv.BlocksCacheKey(P), ours, [0], [0])
            else:
                tasks.start_soon(pair.decoder.notify, P, b"last words")
        assert anyio.current_time() - started < 1
        assert not link.is_open
        assert pair.decoder.links == ()
        pair.owner.deallocate_cache(theirs)
        pair.reader.deallocate_cache(ours)


@every_loop
@pytest.mark.parametrize("what", ["slot", "ticket"])
async def test_an_owner_that_has_lost_the_link_first_is_a_lost_link_and_not_a_lost_cache(what: str) -> None:
    """It took its lease or ticket back while the bytes were read: what the reader is told is that the link is gone."""
    async with linked_pair("shm", roles=MIX) as pair:
        theirs = pair.owner.allocate_blocks_cache(DESC)
        ours = pair.reader.allocate_blocks_cache(DESC)
        endpoint, half = link_to(pair.decoder, P).endpoint, link_to(pair.prompt, D)
        get = endpoint.get

        async def cut(*arguments: Any) -> None:
            half.lose(kv.LinkLostError("the cable was cut", peer=D))
            await get(*arguments)

        setattr(endpoint, "get", cut)  # noqa: B010  # mypy would refuse an assignment
        with pytest.raises(kv.LinkLostError):
            await (
                pair.reader.pull_cache(kv.CacheKeyByIdAndIndex(P, theirs.cache_id, 1), ours)
                if what == "slot"
                else pair.reader.pull_blocks(pair.owner.offer_blocks(theirs, [1]).token, ours, [], [0])
            )
        pair.owner.deallocate_cache(theirs)
        pair.reader.deallocate_cache(ours)
