"""A TCP detour that counts connections, and can be held up."""

from __future__ import annotations

import selectors
import socket
import threading
from contextlib import suppress
from types import TracebackType


class Proxy:
    """Forwards every connection to `target` in a thread of its own, until the context ends.

    Attributes:
        address: what to dial instead of the target.
        num_accepted: connections so far.
        num_open: those whose dialling side has not hung up.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.num_accepted = 0
        self.num_open = 0
        self._may_forward = threading.Event()
        self._may_forward.set()
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="proxy")

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._may_forward.set()
        self._wake.send(b"x")
        self._thread.join(10)
        self._wake.close()
        self._woken.close()
        self._listener.close()

    def hold(self) -> None:
        """Accept, but forward nothing any more until `release`."""
        self._may_forward.clear()

    def release(self) -> None:
        """Forward again, what was held included."""
        self._may_forward.set()

    def _run(self) -> None:
        other: dict[socket.socket, socket.socket] = {}
        dialled: set[socket.socket] = set()
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            selector.register(self._listener, selectors.EVENT_READ)
            is_over = False
            while not is_over:
                for key, _ in selector.select():
                    here = key.fileobj
                    assert isinstance(here, socket.socket)
                    if here is self._woken:
                        is_over = True
                    elif here is self._listener:
                        near, _ = self._listener.accept()
                        far = socket.create_connection(self._target, 5)
                        self.num_accepted += 1
                        self.num_open += 1
                        dialled.add(near)
                        other[near], other[far] = far, near
                        selector.register(near, selectors.EVENT_READ)
                        selector.register(far, selectors.EVENT_READ)
                    elif here in other:
                        received = b""
                        with suppress(OSError):
                            received = here.recv(1 << 16)
                        if received:
                            self._may_forward.wait()
                            with suppress(OSError):
                                other[here].sendall(received)
                        else:
                            there = other.pop(here)
                            del other[there]
                            self.num_open -= 1
                            dialled -= {here, there}
                            for side in (here, there):
                                selector.unregister(side)
                                side.close()
            for side in other:
                side.close()
