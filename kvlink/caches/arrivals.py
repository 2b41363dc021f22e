"""The receiver's side of a layer-wise push: await each layer, and the end.

The sender's messages follow its bytes on the link, so an awaited layer is in place. A push that fails, is cancelled, or
whose sender goes away fails every wait for it; a layer that has landed stays landed.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

import anyio

from kvlink.errors import KVLinkError, LinkLostError, TransferTimeoutError, error_for
from kvlink.wire import LayerEvent


class LayerWatch:
    """One receiver's look at one push. Made by `Arrivals.watch`; a context manager.

    It follows the first push that it sees after it was made, of those that match its `tag` and `peer`.

    Attributes:
        peer: the sender's cluster id, once known.
        layers: the layers that have landed, in this cache's numbers.
    """

    def __init__(self, cache_id: int, tag: str | None, peer: int | None, forget: Callable[[LayerWatch], None]) -> None:
        self.peer = peer
        self.layers: set[int] = set()
        self._cache_id = cache_id
        self._tag = tag
        self._push: tuple[int, int] | None = None
        self._changed = anyio.Event()
        self._error: KVLinkError | None = None
        self._has_ended = False
        self._forget = forget

    def __enter__(self) -> LayerWatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop looking. Idempotent."""
        self._forget(self)

    async def layer(self, layer: int, *, timeout_s: float) -> None:
        """Return once `layer` of this cache is in place.

        Raises:
            KVLinkError: the push has failed, with the sender's status and words, or ended without that layer.
            LinkLostError: the sender went away; before its first layer only a watch with a `peer` can know that.
            TransferTimeoutError: not within `timeout_s`.
        """
        await self._until(lambda: layer in self.layers, f"layer {layer}", timeout_s)
        if layer not in self.layers:
            raise KVLinkError(f"the push into cache {self._cache_id} has ended without layer {layer}", peer=self.peer)

    async def end(self, *, timeout_s: float) -> set[int]:
        """Return once the whole push is in place: its layers, in this cache's numbers. Raises as `layer`."""
        await self._until(lambda: False, "the end", timeout_s)
        return set(self.layers)

    async def _until(self, is_met: Callable[[], bool], what: str, timeout_s: float) -> None:
        with anyio.move_on_after(timeout_s):
            while not is_met():
                if self._error is not None:
                    raise self._error
                if self._has_ended:
                    return
                await self._changed.wait()
            return
        raise TransferTimeoutError(
            f"{what} of a push into cache {self._cache_id} did not come within {timeout_s} s", peer=self.peer
        )

    def follows(self, peer: int, push_id: int) -> bool:
        """Whether this is the push that the watch has begun to follow."""
        return self._push == (peer, push_id)

    def take(self, peer: int, event: LayerEvent) -> bool:
        """Note an event if it is of the push that this watch follows; return whether it was."""
        push = (peer, event.push_id)
        if self._push is None:
            if self.peer not in (None, peer) or self._tag not in (None, event.tag):
                return False
            self._push, self.peer = push, peer
        elif self._push != push:
            return False
        if event.layer is not None:
            self.layers.add(event.layer)
        elif event.status:
            self._error = error_for(event.status, f"the push by cluster {peer} failed: {event.text}", peer=peer)
        else:
            self._has_ended = True
        self._wake()
        return True

    def lose(self, peer: int) -> None:
        """The link to `peer` has ended."""
        if self.peer == peer and not self._has_ended and self._error is None:
            self._error = LinkLostError(f"cluster {peer} went away in the middle of its push", peer=peer)
            self._wake()

    def fail(self, error: KVLinkError) -> None:
        """The cache itself has ended."""
        self._error = self._error or error
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


class Arrivals:
    """What layer-wise pushes put into one cache. Reached as `KvCache.arrivals`.

    Args:
        watched: this is in it while somebody watches; all of one cluster share it.
    """

    def __init__(self, cache_id: int, watched: set[Arrivals]) -> None:
        self._cache_id = cache_id
        self._watched = watched
        self._watches: list[LayerWatch] = []

    def watch(self, *, tag: str | None = None, peer: int | None = None) -> LayerWatch:
        """Return a watch for the next push into this cache; make it before the sender begins.

        Args:
            tag: follow only a push whose `TransferConfig` carries this tag: the way to tell concurrent pushes into one
                cache apart. None: any.
            peer: follow only a push of this cluster. None: any.
        """
        watch = LayerWatch(self._cache_id, tag, peer, self._forget)
        self._watches.append(watch)
        self._watched.add(self)
        return watch

    def take(self, peer: int, event: LayerEvent) -> None:
        """Hand an event to the watch that follows its push, else to the oldest one that may begin to. Internal."""
        for watch in sorted(self._watches, key=lambda watch: not watch.follows(peer, event.push_id)):
            if watch.take(peer, event):
                return

    def lose(self, peer: int) -> None:
        """The link to `peer` has ended. Internal."""
        for watch in self._watches:
            watch.lose(peer)

    def close(self, error: KVLinkError) -> None:
        """The cache has ended. Internal."""
        for watch in self._watches:
            watch.fail(error)

    def _forget(self, watch: LayerWatch) -> None:
        if watch in self._watches:
            self._watches.remove(watch)
        if not self._watches:
            self._watched.discard(self)
