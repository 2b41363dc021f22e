"""Where clusters listen and dial: what cannot be had is a typed error, and nothing of anybody else's is touched."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

import kvlink as kv
from kvlink.links import table
from tests.support.loops import asyncio_and_trio


def cluster(cluster_id: int, *, listen: str | None = None, role: kv.Role = kv.Role.MIX) -> kv.Cluster:
    """Make a small cluster."""
    return kv.Cluster(cluster_id=cluster_id, role=role, pool="1MiB", listen=listen)


@asyncio_and_trio
async def test_a_socket_of_a_living_cluster_is_not_taken(tmp_path: Path) -> None:
    """The second cluster at one path is refused, and the first can still be dialled; a dead one's place is taken."""
    listen = f"unix:{tmp_path}/socket"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(f"{tmp_path}/socket")
    async with cluster(1, listen=listen) as first, cluster(3) as dialler:
        with pytest.raises(kv.ListenError, match="another process listens"):
            async with cluster(2, listen=listen):
                pass
        (await dialler.link_clusters([kv.ClusterInfo(1, first.address)])).raise_for_status()
    assert os.listdir(tmp_path) == []


async def test_a_socket_that_has_taken_our_place_is_left_alone(tmp_path: Path) -> None:
    """Whoever removes our socket and listens there keeps his own when we close."""
    listen = f"unix:{tmp_path}/socket"
    async with cluster(1, listen=listen) as first:
        os.unlink(tmp_path / "socket")
        async with cluster(2, listen=listen) as second, cluster(3) as dialler:
            await first.aclose()
            (await dialler.link_clusters([kv.ClusterInfo(2, second.address)])).raise_for_status()
    assert os.listdir(tmp_path) == []


async def test_the_address_of_a_relative_path_can_be_dialled_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`address` names the file however the folder changes, and it is removed from where it was made."""
    monkeypatch.chdir(tmp_path)
    async with cluster(1, listen="unix:socket") as here, cluster(2) as dialler:
        monkeypatch.chdir("/")
        assert here.address == f"unix:{tmp_path}/socket"
        (await dialler.link_clusters([kv.ClusterInfo(1, here.address)])).raise_for_status()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("place", ["taken port", "no folder", "a folder", "a file", "no such host"])
async def test_an_address_that_cannot_be_had(place: str, tmp_path: Path) -> None:
    """Each is a `ListenError` that names the address and the kernel's reason; what is there stays."""
    (tmp_path / "file").write_text("kept")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen, why = {
            "taken port": (f"127.0.0.1:{taken.getsockname()[1]}", "in use"),
            "no folder": (f"unix:{tmp_path}/none/socket", "No such file"),
            "a folder": (f"unix:{tmp_path}", "in use"),
            "a file": (f"unix:{tmp_path}/file", "in use"),
            "no such host": ("127.0.0.999:0", "cannot listen"),
        }[place]
        settings = kv.ClusterConfig(allow_unauthenticated=True)
        with pytest.raises(kv.ListenError, match=why) as caught:
            async with kv.Cluster(cluster_id=1, role=kv.Role.MIX, pool="1MiB", listen=listen, config=settings):
                pass
    assert listen in str(caught.value)
    assert isinstance(caught.value, OSError)
    assert (tmp_path / "file").read_text() == "kept"


@asyncio_and_trio
async def test_a_dial_that_fails_in_an_unforeseen_way_ends_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A name that the resolver chokes on, or a bug of ours, is the failure of that call; the other links stay."""
    async with cluster(1) as peer, cluster(2) as here:
        (await here.link_clusters([kv.ClusterInfo(1, peer.address)])).raise_for_status()

        for error in (UnicodeError("half a character"), ZeroDivisionError("a bug")):

            async def connect(*_: Any, error: Exception = error) -> Any:
                raise error

            monkeypatch.setattr(table, "connect", connect)
            results = await here.link_clusters([kv.ClusterInfo(9, "somewhere:1")])
            assert results.results[0].status is kv.StatusCode.LLM_LINK_FAILED
            assert str(error) in str(results.results[0].error)
        (await here.check_link_status(1)).raise_for_status()
    assert "a bug" in caplog.text


async def test_a_cluster_without_settings_takes_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """``KVLINK_`` variables count where no `ClusterConfig` is given, and nowhere else."""
    monkeypatch.setenv("KVLINK_LIVENESS_S", "77")
    assert cluster(1).config.liveness_s == 77
    assert kv.Cluster(cluster_id=1, role=kv.Role.MIX, pool="1MiB", config=kv.ClusterConfig()).config.liveness_s == 5
    monkeypatch.setenv("KVLINK_LIVENESS_S", "soon")
    with pytest.raises(kv.ParameterValueError, match="KVLINK_LIVENESS_S"):
        cluster(1)


async def test_check_link_status_takes_ids_and_nothing_else() -> None:
    """One id or a list of them; whatever else it is given is a `ParameterTypeError`."""
    async with cluster(1) as here:
        wrong: Any
        for wrong in (None, 1.0, "1", b"\x01", {1: 2}, iter([1]), [None], object()):
            with pytest.raises(kv.ParameterTypeError):
                await here.check_link_status(wrong)
        assert (await here.check_link_status(7)).status is kv.StatusCode.LLM_NOT_YET_LINK
        assert (await here.check_link_status([])).status is kv.StatusCode.LLM_SUCCESS


async def test_what_is_no_cache_or_size_is_refused_as_such() -> None:
    """Things that Python cannot hash or compare are a `ParameterTypeError` like all others."""
    import numpy as np

    async with cluster(1) as here:
        manager = here.kv_cache_manager
        cache = manager.allocate_cache(kv.CacheDesc(2, (2, 8), "uint8"))
        wrong: Any
        for wrong in ([], {}, None, "1", 1.5, True, np.zeros(0)):
            with pytest.raises(kv.ParameterTypeError):
                manager.unregister_cache(wrong)
            with pytest.raises(kv.ParameterTypeError):
                await manager.copy_cache(cache, cache, 1, 0, size=wrong)
        manager.unregister_cache(12345)  # an id that is unknown is no error
        manager.deallocate_cache(cache)
    with pytest.raises(kv.ParameterValueError):
        kv.ClusterConfig(permit_peer_access=np.zeros(0))  # type: ignore[arg-type]  # that is the point
