"""Which transports a cluster offers. What serves a link is found by trying them in order; see `links.handshake`."""

from __future__ import annotations

from kvlink.config import ClusterConfig
from kvlink.errors import FeatureNotEnabledError


def choose_transports(config: ClusterConfig) -> tuple[str, ...]:
    """Return the names of the transports to offer, best first.

    Those that the settings name are all offered, and a cluster that lacks one of them does not start. Otherwise shared
    memory is, and UCX only where this host has an RDMA device and a UCX that can be loaded: without one it would be
    slower than shared memory on this host, and no way to reach another.
    """
    if config.transports is not None:
        return config.transports
    from kvlink.transports.ucx.library import load, rdma_devices

    if not rdma_devices():
        return ("shm",)
    try:
        load(config.ucx.library_path)
    except FeatureNotEnabledError:
        return ("shm",)
    return ("shm", "ucx")
