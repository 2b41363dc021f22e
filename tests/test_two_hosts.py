"""Two hosts on one machine: network namespaces with a cable between them that is cut, mended, slow and lossy."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import anyio
import pytest

import kvlink as kv
from tests.support.loops import until
from tests.support.netns import Cable, FarHost, SlowCable, laid, two_hosts, why_no_slow_cable, why_not
from tests.support.peer import PATHS, Peer, spawn_peer
from tests.support.ucx import missing, need_ucx

pytestmark = [pytest.mark.root, pytest.mark.skipif(bool(why_not()), reason=why_not() or "nothing")]
slow_cable = pytest.mark.skipif(bool(why_no_slow_cable()), reason=why_no_slow_cable() or "nothing")

LIVENESS_S: Final = 1.0
NOTICED_S: Final = 3 * LIVENESS_S  # with room for a busy machine
COMMON: Final = {"liveness_s": LIVENESS_S, "secret": "whoever knows this may link"}
NUM_TENSORS: Final = 4
SHAPE: Final = [16, 4096]
BLOCKS: Final = list(range(16))


@dataclass(frozen=True)
class Carrier:
    """What moves bytes between the hosts: how its peers are run. They share a secret, as hosts of a network must."""

    program: str
    config: dict[str, Any]
    environ: dict[str, str]


@pytest.fixture
def hosts() -> Iterator[tuple[FarHost, FarHost]]:
    """Two hosts without a cable."""
    with two_hosts() as made:
        yield made


@pytest.fixture(params=["borrowed memory", "ucx"])
def carrier(request: pytest.FixtureRequest) -> Iterator[Carrier]:
    """Name what moves the bytes.

    UCX over TCP; or memory that the two have in common, since they are one machine after all.
    """
    if request.param != "ucx" and not missing() and "KVLINK_STRESS" not in os.environ:
        pytest.skip("UCX carries these tests here; KVLINK_STRESS=1 runs them this way too")
    if request.param == "ucx":
        need_ucx()
        # Two namespaces look like one host to UCX, so it must be kept from everything but the cable.
        ucx = {"transports": ["tcp"], "allow_tcp": True, "devices": ["cable"]}
        yield Carrier("tests.support.actor", {**COMMON, "transports": ["ucx"], "ucx": ucx}, {})
        return
    folder = tempfile.mkdtemp(prefix="kvlink-", dir="/tmp")  # a short name: socket paths have 107 bytes
    yield Carrier("tests.programs.far_actor", COMMON, {"KVLINK_TEST_FOLDER": folder})
    shutil.rmtree(folder)


@asynccontextmanager
async def owner_and_puller(
    hosts: tuple[FarHost, FarHost], carrier: Carrier, *, config: dict[str, Any] | None = None
) -> AsyncIterator[tuple[Peer, Peer]]:
    """Run cluster 1 with a filled cache on one host, and cluster 2 with an empty one on the other."""
    near, far = hosts
    common: dict[str, Any] = {
        "pool": "8MiB",
        "config": {**carrier.config, **(config or {})},
        "program": carrier.program,
        "environ": carrier.environ,
    }
    async with (
        spawn_peer(1, "PROMPT", listen=f"{near.address}:0", inside=near.inside, **common) as owner,
        spawn_peer(2, "DECODER", inside=far.inside, **common) as puller,
    ):
        owner.is_silent = puller.is_silent = False  # a lost link is logged
        await owner.call("allocate_blocks", num_tensors=NUM_TENSORS, shape=SHAPE, model_id=0)
        await puller.call("allocate_blocks", num_tensors=NUM_TENSORS, shape=SHAPE, is_filled=False)
        yield owner, puller


async def link(owner: Peer, puller: Peer, *, timeout_s: float = 5.0, relink: bool = False) -> None:
    """Link the puller to the owner, or raise."""
    await puller.call("link", clusters=[(1, owner.address)], timeout_s=timeout_s, relink=relink)


async def expect_moves(owner: Peer, puller: Peer) -> None:
    """Pull everything, push some of it back, other bytes in it, and check every byte."""
    await puller.call("fill", cache=1, stamp=[250, 250, 65000])
    report = await puller.call(
        "pull_blocks", peer=1, model_id=0, cache=1, src_blocks=BLOCKS, dst_blocks=BLOCKS, timeout_s=10.0
    )
    assert report["nbytes"] == NUM_TENSORS * 16 * 4096
    assert await puller.call("faults", cache=1, stamp=list(owner.stamp(1))) is None
    there = await owner.call("cache_id", cache=1)
    new, old = list(puller.stamp(7)), list(owner.stamp(1))
    await puller.call("fill", cache=1, stamp=new)
    pushed = await puller.call("push_by_id", peer=1, cache_id=there, cache=1, blocks=BLOCKS[:4], timeout_s=10.0)
    assert pushed == NUM_TENSORS * 4 * 4096
    assert await owner.call("faults", cache=1, stamp=new, blocks=BLOCKS[:4]) is None
    assert await owner.call("faults", cache=1, stamp=old, blocks=BLOCKS[4:]) is None
    await owner.call("fill", cache=1)


async def lost(peer: Peer) -> float:
    """Wait until a peer has no link any more; return how long that took."""
    started = time.monotonic()
    await until(lambda: peer.call("links"), lambda links: not links)
    return time.monotonic() - started


async def test_shared_memory_ends_at_the_host(hosts: tuple[FarHost, FarHost]) -> None:
    """With shared memory alone, hosts cannot be linked: both sides fail at once and say which transport and why."""
    nothing = Carrier("tests.support.actor", COMMON, {})
    with laid(Cable(*hosts)):
        async with owner_and_puller(hosts, nothing) as (owner, puller):
            with pytest.raises(kv.HandshakeError, match="not on this host") as caught:
                await link(owner, puller)
            assert (caught.value.peer, caught.value.status) == (1, kv.StatusCode.LLM_LINK_FAILED)
            assert "shm" in str(caught.value)
            assert await puller.call("links") == await owner.call("links") == []


async def test_a_cut_cable_is_noticed_and_a_host_that_returns_links_again(
    hosts: tuple[FarHost, FarHost], carrier: Carrier
) -> None:
    """Both sides lose an idle link within the liveness limit; linking fails by its deadline until it is mended."""
    with laid(Cable(*hosts)) as cable:
        async with owner_and_puller(hosts, carrier) as (owner, puller):
            await link(owner, puller)
            await expect_moves(owner, puller)
            cable.cut()
            assert await lost(puller) < NOTICED_S
            assert await lost(owner) < NOTICED_S
            with pytest.raises(kv.NotLinkedError):
                await puller.call("pull_blocks", peer=1, model_id=0, cache=1, src_blocks=BLOCKS, dst_blocks=BLOCKS)
            started = time.monotonic()
            with pytest.raises((kv.TransferTimeoutError, kv.LinkError)) as caught:
                await link(owner, puller, timeout_s=0.3)
            assert caught.value.peer == 1
            assert time.monotonic() - started < 2.0
            cable.mend()
            await link(owner, puller)
            await expect_moves(owner, puller)


async def test_a_link_comes_back_by_itself_when_the_cable_is_mended(
    hosts: tuple[FarHost, FarHost], carrier: Carrier
) -> None:
    """With ``relink`` nobody needs to do anything: attempts into the dark end by their deadline, and one succeeds."""
    quick = {"relink_min_s": 0.05, "relink_max_s": 0.2, "link_timeout_s": 0.5}
    with laid(Cable(*hosts)) as cable:
        async with owner_and_puller(hosts, carrier, config=quick) as (owner, puller):
            await puller.call("link", clusters=[(1, owner.address)], timeout_s=5.0, relink=True)
            await expect_moves(owner, puller)
            cable.cut()
            await lost(puller)
            await lost(owner)
            with pytest.raises(kv.NotLinkedError, match="Re-linking is under way"):
                await puller.call("pull_blocks", peer=1, model_id=0, cache=1, src_blocks=BLOCKS, dst_blocks=BLOCKS)
            cable.mend()
            await until(lambda: puller.call("links"), lambda links: links)
            await expect_moves(owner, puller)


@slow_cable
async def test_a_cut_that_no_interface_reports(hosts: tuple[FarHost, FarHost], carrier: Carrier) -> None:
    """A switch that dies takes no carrier down: the link is lost by silence, and a call that waits ends with it.

    Where re-linking was asked for, the link is there again by itself soon after the switch is.
    """
    with laid(SlowCable(*hosts)) as cable:
        async with owner_and_puller(hosts, carrier, config={"relink_max_s": 0.3}) as (owner, puller):
            await link(owner, puller, relink=True)
            cable.cut()
            # The first pull asks the owner where its cache is; nobody answers.
            asked = puller.start("pull_blocks", peer=1, model_id=0, cache=1, src_blocks=BLOCKS, dst_blocks=BLOCKS)
            started = time.monotonic()
            with pytest.raises(kv.LinkLostError) as caught:
                await asked.result()
            assert time.monotonic() - started < NOTICED_S
            assert (caught.value.peer, caught.value.phase) == (1, "look-up")
            await lost(owner)
            cable.mend()
            await until(lambda: puller.call("links"), lambda links: [entry["state"] for entry in links] == ["open"])
            await expect_moves(owner, puller)


@slow_cable
async def test_delay_and_loss_change_nothing_but_time(hosts: tuple[FarHost, FarHost], carrier: Carrier) -> None:
    """Over a cable of 20 ms that loses one packet in 20, and is cut for a moment, all goes well, byte for byte."""
    with laid(SlowCable(*hosts, delay_s=0.02, loss=0.05, seed=3)) as cable:
        async with owner_and_puller(hosts, carrier, config={"liveness_s": 5.0}) as (owner, puller):
            await link(owner, puller, timeout_s=10.0)
            await expect_moves(owner, puller)
            assert await puller.call("unlink", clusters=[1], timeout_s=5.0) == ["LLM_SUCCESS"]
            await link(owner, puller, timeout_s=10.0)
            cable.cut()
            with pytest.raises(kv.TransferTimeoutError):
                await puller.call(
                    "pull_blocks", peer=1, model_id=0, cache=1, src_blocks=[0], dst_blocks=[0], timeout_s=0.3
                )
            cable.mend()
            await expect_moves(owner, puller)
            assert [entry["state"] for entry in await puller.call("links")] == ["open"]
        assert isinstance(cable, SlowCable)
        assert cable.num_lost > 0


@pytest.mark.ucx
@pytest.mark.skipif("KVLINK_STRESS" not in os.environ, reason="KVLINK_STRESS=1 runs it")
async def test_the_proof_of_a_fabric_fails_where_it_must(hosts: tuple[FarHost, FarHost]) -> None:
    """Over TCP, which UCX makes get and put of by messages, all steps pass but one-sidedness; nothing is claimed."""
    need_ucx()
    near, far = hosts
    environ = {**os.environ, **PATHS, "KVLINK_TRANSPORTS": "ucx", "KVLINK_UCX_TRANSPORTS": "tcp"}
    environ |= {"KVLINK_UCX_ALLOW_TCP": "yes", "KVLINK_UCX_DEVICES": "cable"}
    program = [sys.executable, "-m", "kvlink.proving"]
    server = [*near.inside, *program, "serve", f"{near.address}:7000", "--key", "key", "--size", "1MiB", "--once"]
    prover = [*far.inside, *program, "prove", f"{near.address}:7000", "--key", "key", "--kills", "1"]
    prover += ["--seconds", "0.01", "--json", "-"]
    with laid(Cable(near, far)):
        async with await anyio.open_process(server, env=environ, stderr=None) as serving:
            assert serving.stdout is not None
            await serving.stdout.receive()
            done = await anyio.run_process(prover, env=environ, check=False, stderr=None)
            await serving.wait()
    said = json.loads(done.stdout)
    states = {step["name"]: step["state"] for step in said["steps"]}
    assert {name for name, state in states.items() if state != "passed"} == {"one-sided"}, said
    assert said["carrier"]["lanes"] == ["tcp"]
    assert said["verdict"].startswith("Not proved over ucx (tcp)")
    assert done.returncode == 1


async def test_a_host_that_crashes_is_lost_and_its_successor_is_welcome(
    hosts: tuple[FarHost, FarHost], carrier: Carrier
) -> None:
    """A process that dies behind a cut cable is lost by silence; its next life serves new bytes on the mended cable."""
    near, far = hosts
    common: dict[str, Any] = {
        "pool": "8MiB",
        "config": carrier.config,
        "program": carrier.program,
        "environ": carrier.environ,
    }
    with laid(Cable(near, far)) as cable:
        async with spawn_peer(2, "DECODER", inside=far.inside, **common) as puller:
            puller.is_silent = False
            await puller.call("allocate_blocks", num_tensors=NUM_TENSORS, shape=SHAPE, is_filled=False)
            address = f"{near.address}:7700"
            for life in (1, 2):
                async with spawn_peer(1, listen=address, inside=near.inside, life=life, **common) as owner:
                    await owner.call("allocate_blocks", num_tensors=NUM_TENSORS, shape=SHAPE, model_id=0)
                    await link(owner, puller)
                    await expect_moves(owner, puller)
                    if life == 1:
                        cable.cut()
                        owner.kill()
                        assert await lost(puller) < NOTICED_S
                        cable.mend()
