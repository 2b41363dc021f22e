"""An actor whose shared memory pretends to be a network: it reaches processes of other network namespaces.

Two namespaces on one machine have memory in common, though no transport of kvlink uses that: descriptors go over
abstract Unix sockets, which end at the namespace. Here they go over sockets in a folder, and the endpoint does not say
that it knows of deaths. What remains for tests is a real control plane over a real cable.

Run in the place of `tests.support.actor`, with ``KVLINK_TEST_FOLDER`` in the environment.
"""

from __future__ import annotations

import os
from typing import Any, Final

import anyio

from kvlink.transports import shm
from kvlink.transports.base import Capabilities
from kvlink.transports.pidfd import PidfdWatch
from kvlink.transports.shm_endpoint import ShmEndpoint
from tests.support import actor

_FOLDER: Final = os.environ["KVLINK_TEST_FOLDER"]


class _AnyioOfFiles:
    """anyio, but that abstract Unix sockets are files in a folder."""

    def __getattr__(self, name: str) -> Any:
        return getattr(anyio, name)

    async def create_unix_listener(self, path: str) -> Any:
        return await anyio.create_unix_listener(_place(path))

    async def connect_unix(self, path: str) -> Any:
        return await anyio.connect_unix(_place(path))


def _place(path: str) -> str:
    return os.path.join(_FOLDER, path.lstrip("\0")[-40:])


def main() -> None:
    """Pretend, then act."""
    vars(shm)["anyio"] = _AnyioOfFiles()
    ShmEndpoint.capabilities = Capabilities(is_one_sided=True, is_same_host=False)
    setattr(ShmEndpoint, "watch_death", lambda _: PidfdWatch(None))  # noqa: B010  # mypy refuses an assignment
    actor.main()


if __name__ == "__main__":
    main()
