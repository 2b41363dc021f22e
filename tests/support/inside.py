"""What tests must know that no user needs to: the only place where they reach behind kvlink's public names."""

from __future__ import annotations

import kvlink as kv
from kvlink.caches.store import CacheStore
from kvlink.links.table import LinkTable
from kvlink.memory.regions import FIRST_REGISTERED
from kvlink.transfers.serving import CacheServer
from kvlink.transports.base import Transport


def _store(cluster: kv.Cluster) -> CacheStore:
    store = cluster._store
    assert store is not None
    return store


def used_nbytes(cluster: kv.Cluster) -> int:
    """Return how much of a cluster's pool caches hold, those included that wait for a view or a lease to end."""
    store = _store(cluster)
    store.collect()
    return store.pool(kv.Placement.DEVICE).used_nbytes


def num_read_leases(cluster: kv.Cluster) -> int:
    """Return how many read leases a cluster has given to peers."""
    return _store(cluster).leases.num_reads


def num_write_leases(cluster: kv.Cluster) -> int:
    """Return how many write leases a cluster has given to peers."""
    return _store(cluster).leases.num_writes


def link_to(cluster: kv.Cluster, peer: int) -> kv.Link:
    """Return the link to `peer`, which must be there."""
    return next(link for link in cluster.links if link.peer == peer)


def give_turn(cluster: kv.Cluster) -> None:
    """Let a cluster's small movements go on as if the loop had just had its turn."""
    cluster.kv_cache_manager._turns.held_s = 0.0


def num_memfd_mappings() -> int:
    """Return how many mappings of kvlink's memory this process has."""
    with open("/proc/self/maps") as lines:
        return sum("/memfd:kvlink" in line for line in lines)


def server(cluster: kv.Cluster) -> CacheServer:
    """Return what serves a cluster's peers."""
    table = cluster._links
    assert table is not None
    server = table._on_opened.__self__  # type: ignore[attr-defined]  # a bound method
    assert isinstance(server, CacheServer)
    return server


def transport_of(cluster: kv.Cluster, name: str) -> Transport:
    """Return one of the transports of a cluster."""
    return next(transport for transport in cluster._transports if transport.name == name)


def table_of(cluster: kv.Cluster) -> LinkTable:
    """Return the table of a cluster's links."""
    table = cluster._links
    assert table is not None
    return table


def take_cuda(cluster: kv.Cluster) -> None:
    """Let a cluster register CUDA memory, and ask its UCX to, although there is no device here."""
    _store(cluster).takes_cuda = True
    for transport in cluster._transports:
        services = getattr(transport, "_services", None)
        if services is not None:
            services.worker.context.reaches_cuda = True


def regions(cluster: kv.Cluster) -> list[int]:
    """Return the numbers of the regions that a cluster's caller has registered."""
    return [number for number in _store(cluster).memory if number >= FIRST_REGISTERED]
