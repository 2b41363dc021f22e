"""What a cluster answers when a peer asks about its caches. Plain functions of the store; nothing waits."""

from __future__ import annotations

import anyio

from kvlink.errors import KVLinkError
from kvlink.link import Link
from kvlink.store import CacheStore
from kvlink.wire import CloseRead, Failed, Found, LookUp, Message, OpenRead


class CacheServer:
    """The owner's side of every link of one cluster.

    Args:
        store: what it owns.
    """

    def __init__(self, store: CacheStore) -> None:
        self._store = store

    def on_message(self, link: Link, message: Message) -> Message | None:
        """Serve one message and return the answer, if it has one."""
        if isinstance(message, (LookUp, OpenRead)):
            try:
                return self._find(link, message)
            except KVLinkError as exc:
                return Failed(message.seq, exc.status, str(exc)[:1000])
        if isinstance(message, CloseRead):
            self._store.leases.close_read(link.incarnation, message.lease, message.tensors)
        return None

    def on_closed(self, link: Link) -> None:
        """Take back what a peer held whose link has ended."""
        self._store.leases.drop_readers(link.incarnation)

    def _find(self, link: Link, message: LookUp | OpenRead) -> Found:
        store = self._store
        store.collect()
        entry, slot, name = store.table.find(message.target)
        lease = 0
        if isinstance(message, OpenRead):
            expires_at = anyio.current_time() + message.lease_s
            lease = store.leases.open_read(link.incarnation, entry, slot, name, expires_at)
        regions = {run.region for run in entry.geometry.runs}
        link.endpoint.share(regions, for_writing=False)
        return Found(
            seq=message.seq,
            cache_id=entry.cache_id,
            slot=slot,
            geometry=entry.geometry,
            word=entry.word,
            generation=entry.generation,
            lease=lease,
        )
