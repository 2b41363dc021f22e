"""What UCX is told, without UCX: settings, cards, keys, and the cutting of extents into requests."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvlink as kv
from kvlink.plan import Extent, total_nbytes
from kvlink.transports.choice import choose_transports
from kvlink.transports.ucx.cards import Card, Host, check_versions, pack_card, pack_key, unpack_card, unpack_key
from kvlink.transports.ucx.context import settings_of
from kvlink.transports.ucx.lanes import judge
from kvlink.transports.ucx.pieces import cut_pieces

CARD = Card((1, 22, 0), b"address of a worker", Host("boot", 1, 2, 3))
EXTENTS = st.lists(
    st.builds(
        Extent,
        st.integers(0, 2),
        st.integers(0, 10**6),
        st.integers(-5000, 5000),
        st.integers(0, 2),
        st.integers(0, 10**6),
        st.integers(-5000, 5000),
        st.integers(0, 9000),
        st.integers(0, 5),
    ),
    max_size=6,
)


@settings(deadline=None, max_examples=50)
@given(EXTENTS, st.integers(700, 5000))
def test_pieces_are_the_bytes_of_the_extents(extents: list[Extent], longest: int) -> None:
    """Every byte of every row is in exactly one piece, at the same place on both sides, and no piece is too long."""
    expected = sorted(
        (local_region, local + row * local_stride + byte, remote_region, remote + row * remote_stride + byte)
        for local_region, local, local_stride, remote_region, remote, remote_stride, nbytes, num_rows in extents
        for row in range(num_rows)
        for byte in range(0, nbytes, 997)
    )
    found = []
    total = 0
    for pieces in cut_pieces(extents, longest):
        assert pieces.nbytes.min() >= 1
        assert pieces.nbytes.max() <= longest
        total += int(pieces.nbytes.sum())
        for local, remote, nbytes in zip(pieces.local, pieces.remote, pieces.nbytes, strict=True):
            found.append((pieces.local_region, int(local), pieces.remote_region, int(remote), int(nbytes)))
    assert total == total_nbytes(extents)
    for region, local, remote_region, remote in expected:
        assert any(
            (a, c) == (region, remote_region) and b <= local < b + n and local - b == remote - d
            for a, b, c, d, n in found
        ), (region, local)


@pytest.mark.parametrize(
    ("lanes", "expected"),
    [
        ((), (False, False, True, False)),
        (("posix", "cma"), (False, True, True, True)),
        (("posix",), (False, False, True, False)),
        (("tcp",), (True, False, False, False)),
        (("tcp", "posix"), (True, False, False, False)),
        (("tcp", "cma"), (False, True, False, False)),
        (("rc_mlx5", "cma"), (False, True, False, False)),
        (("posix", "cma", "cuda_ipc"), (False, True, True, False)),
        (("posix", "cuda_ipc"), (False, False, True, False)),
        (("tcp", "cuda_ipc", "cuda_copy"), (True, False, False, False)),
        (("rc_verbs", "cuda_ipc", "gdr_copy"), (False, True, False, False)),
    ],
)
def test_what_lanes_have(lanes: tuple[str, ...], expected: tuple[bool, ...]) -> None:
    """TCP behind a lane of CUDA is still TCP, and a lane of CUDA moves nothing of the host's."""
    assert tuple(judge(lanes)) == expected


def test_cuda_enters_only_where_it_is_allowed() -> None:
    """Without `allow_cuda` UCX is told of no transport of CUDA; with it of all, also beside names that were chosen."""
    assert "cuda" not in settings_of(kv.UcxConfig())["TLS"]
    assert settings_of(kv.UcxConfig(allow_cuda=True))["TLS"].split(",")[-1] == "cuda"
    chosen = settings_of(kv.UcxConfig(allow_cuda=True, transports=("rc",)))
    assert (chosen["TLS"], chosen["CUDA_IPC_ENABLE_GET_ZCOPY"], chosen["PROTO_EMULATION_ENABLE"]) == (
        "rc,cuda",
        "on",
        "n",
    )
    assert settings_of(kv.UcxConfig(allow_cuda=True, transports=("^tcp",)))["TLS"] == "^tcp"
    assert kv.UcxConfig.from_environ({"KVLINK_UCX_ALLOW_CUDA": "yes"}) == kv.UcxConfig(allow_cuda=True)
    for wrong in ({"allow_tcp": True}, {"progress": "loop"}, {"provider": "ucxx"}):
        with pytest.raises(kv.ParameterValueError, match="allow_cuda"):
            kv.UcxConfig(allow_cuda=True, **wrong)
    with pytest.raises(kv.ParameterTypeError, match="allow_cuda"):
        kv.UcxConfig(allow_cuda=1)  # type: ignore[arg-type]  # refused


def test_cards_and_keys_come_back() -> None:
    """What one side packs the other unpacks, unchanged."""
    assert unpack_card(pack_card(CARD)) == CARD
    assert unpack_key(pack_key(b"key")) == b"key"


@given(st.integers(0, 60), st.integers(1, 255), st.integers(0, 60))
def test_damaged_cards_and_keys_are_refused(place: int, change: int, length: int) -> None:
    """One changed byte, a piece that is missing, or plain rubbish never becomes a card or a key."""
    for whole, unpack in ((pack_card(CARD), unpack_card), (pack_key(b"k" * 40), unpack_key)):
        damaged = bytearray(whole)
        damaged[place % len(whole)] ^= change
        for rubbish in (bytes(damaged), whole[: length % len(whole)], os.urandom(length), b""):
            with pytest.raises(kv.KVLinkError, match="malformed"):
                unpack(rubbish)


@pytest.mark.parametrize("theirs", [(1, 21, 0), (2, 22, 0), (1, 23, 1)])
def test_another_minor_version_is_refused_with_both(theirs: tuple[int, int, int]) -> None:
    """Before anything of the peer reaches UCX, the versions are compared; the error has both and the way out."""
    with pytest.raises(kv.LinkError, match=rf"ours is 1\.22\.0, theirs is {theirs[0]}\.{theirs[1]}.*allow_version"):
        check_versions((1, 22, 0), theirs, allow_mismatch=False)
    check_versions((1, 22, 0), theirs, allow_mismatch=True)
    check_versions((1, 22, 0), (1, 22, 5), allow_mismatch=False)


def test_settings_say_what_is_used_and_leave_the_environment_alone() -> None:
    """Each field becomes a setting of UCX; TCP and imitated get and put are off unless asked for."""
    before = dict(os.environ)
    plain = settings_of(kv.UcxConfig())
    assert "tcp" not in plain["TLS"].split(",")
    assert plain["PROTO_EMULATION_ENABLE"] == "n"
    assert (plain["MM_ERROR_HANDLING"], plain["CMA_MEMORY_INVALIDATE"]) == ("y", "y")
    full = settings_of(
        kv.UcxConfig(
            transports=("rc", "tcp"),
            devices=("mlx5_0:1", "mlx5_1:1"),
            rails=2,
            keepalive_s=1.5,
            traffic_class=106,
            gid_index=3,
            allow_tcp=True,
            options=(("RC_TIMEOUT", "2s"),),
        )
    )
    assert full["TLS"] == "rc,tcp"
    assert full["NET_DEVICES"] == "mlx5_0:1,mlx5_1:1"
    assert full["KEEPALIVE_INTERVAL"] == "1500ms"
    assert (full["MAX_RMA_RAILS"], full["IB_TRAFFIC_CLASS"], full["IB_GID_INDEX"]) == ("2", "106", "3")
    assert (full["PROTO_EMULATION_ENABLE"], full["RC_TIMEOUT"]) == ("y", "2s")
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"transports": ("tcp",)}, "allow_tcp"),
        ({"transports": ()}, "transports"),
        ({"transports": "rc"}, "transports"),
        ({"devices": ("",)}, "devices"),
        ({"rails": -1}, "rails"),
        ({"keepalive_s": 0}, "keepalive_s"),
        ({"keepalive_s": True}, "keepalive_s"),
        ({"traffic_class": 256}, "traffic_class"),
        ({"allow_tcp": 1}, "allow_tcp"),
        ({"progress": "later"}, "progress"),
        ({"provider": "ucx"}, "provider"),
        ({"library_path": 1}, "library_path"),
        ({"options": (("A",),)}, "options"),
        ({"max_requests": 1}, "max_requests"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(changes: dict[str, object], said: str) -> None:
    """Every field is checked when the value is made, and the error names it."""
    with pytest.raises(kv.ParameterError, match=said):
        kv.UcxConfig(**changes)  # type: ignore[arg-type]


def test_settings_come_from_the_environment_where_asked() -> None:
    """``KVLINK_TRANSPORTS`` and ``KVLINK_UCX_...`` are read by `from_environ`, and by nothing else."""
    environ = {"KVLINK_TRANSPORTS": "ucx,shm", "KVLINK_UCX_ALLOW_TCP": "yes", "KVLINK_UCX_DEVICES": "eth0,lo"}
    config = kv.ClusterConfig.from_environ(environ)
    assert config.transports == ("ucx", "shm")
    assert config.ucx == kv.UcxConfig(allow_tcp=True, devices=("eth0", "lo"))
    with pytest.raises(kv.ParameterError, match="KVLINK_UCX_RAILS"):
        kv.ClusterConfig.from_environ({"KVLINK_UCX_RAILS": "two"})
    with pytest.raises(kv.ParameterError, match="transports"):
        kv.ClusterConfig.from_environ({"KVLINK_TRANSPORTS": "pigeon"})


def test_without_an_rdma_device_only_shared_memory_is_offered() -> None:
    """UCX is tried by itself only where it is a way to another host; named, it is always tried."""
    if not os.path.isdir("/sys/class/infiniband"):
        assert choose_transports(kv.ClusterConfig()) == ("shm",)
    assert choose_transports(kv.ClusterConfig(transports=("ucx", "shm"))) == ("ucx", "shm")


def test_asking_for_ucx_where_there_is_none_says_what_to_install() -> None:
    """A cluster that is told to use UCX and finds none does not start; everything else works without it."""
    program = """
import importlib.util, anyio
import kvlink as kv
from kvlink.transports.ucx import library
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in ("cffi", "libucx") else find_spec(name, *rest)
async def main():
    try:
        config = kv.ClusterConfig(transports=("ucx",))
        async with kv.Cluster(cluster_id=1, role=kv.Role.MIX, pool="1MiB", config=config):
            pass
    except kv.FeatureNotEnabledError as exc:
        print(exc)
    async with kv.Cluster(cluster_id=1, role=kv.Role.MIX, pool="1MiB") as cluster:
        print(cluster)
anyio.run(main)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    refusal, cluster = done.stdout.splitlines()
    assert "pip install 'kvlink[ucx]'" in refusal
    assert "open" in cluster


@pytest.mark.parametrize("names", [("tcp",), ("cma", "tcp"), ("all",), ("^cma",), ("\\tcp",), ("^posix", "cma")])
def test_tcp_does_not_come_in_by_another_name(names: tuple[str, ...]) -> None:
    """Whatever makes UCX use TCP needs `allow_tcp`; a list that leaves TCP out does not."""
    with pytest.raises(kv.ParameterValueError, match="allow_tcp"):
        kv.UcxConfig(transports=names)
    kv.UcxConfig(transports=names, allow_tcp=True)
    kv.UcxConfig(transports=("^tcp",))
    kv.UcxConfig(transports=("^cma", "tcp"))


@pytest.mark.parametrize(
    "fields",
    [
        {"options": None},
        {"options": [("A", "b")]},
        {"options": (("A",),)},
        {"progress": np.zeros(0)},
        {"library_path": "a\0b"},
        {"library_path": ""},
        {"library_path": "\ud800"},
        {"transports": ("\ud800",)},
        {"devices": ("a\0",)},
    ],
    ids=repr,
)
def test_settings_that_ucx_cannot_be_given_are_refused(fields: dict[str, Any]) -> None:
    """Of the wrong type, or with bytes that no C string holds: an error of ours, where it is made."""
    with pytest.raises(kv.ParameterError):
        kv.UcxConfig(**fields)


@pytest.mark.parametrize("transports", [([],), (1,), (), ("tcp",), "shm", ["shm"]], ids=repr)
def test_transports_are_named(transports: Any) -> None:
    """Whatever is no tuple of known names is refused."""
    with pytest.raises(kv.ParameterError, match="transports"):
        kv.ClusterConfig(transports=transports)


def test_own_host_is_recognised() -> None:
    """A card of this very process leads to a descriptor of it; another boot, or another life of the number, not."""
    own = Host.own()
    fd = own.open_pidfd()
    assert fd is not None
    os.close(fd)
    for other in (Host("other", *_rest(own)), Host(own.boot, own.namespace + 1, own.pid, own.started)):
        assert other.open_pidfd() is None
    assert Host(own.boot, own.namespace, own.pid, own.started + 1).open_pidfd() is None


def _rest(host: Host) -> tuple[int, int, int]:
    return host.namespace, host.pid, host.started
