"""What is really done, one probe per process: ``python -m kvlink.doctor.probes NAME`` answers with a line of JSON.

A step that the host refuses is a text that says how; an empty text is success. Whatever else goes wrong, up to the
death of the process, `kvlink.doctor.children` makes of it what it can.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any, Final

import numpy as np

from kvlink.errors import KVLinkError
from kvlink.memory.pool import Segment
from kvlink.transports.process_vm import ForeignMemory, permit_tracing

_NBYTES: Final = 1 << 20
_WAIT_S: Final = 5.0


def probe_sharing() -> dict[str, Any]:
    """Make a pool, hand its descriptor over an abstract Unix socket, map it there; watch a process end."""
    made = _outcome(lambda: Segment.create("kvlink-doctor", _NBYTES).close())
    return {
        "segment": made,
        "passing": made or _outcome(_pass_descriptor),
        "pidfd": _outcome(_watch_death),
    }


def probe_foreign() -> dict[str, Any]:
    """Let another process copy this one's memory, as a peer does with registered memory: both ways.

    The one that copies is our child, and we are not its: the Yama module's restriction holds for it as for a peer.
    """
    pattern = np.arange(3 * 4096, dtype=np.uint32).view(np.uint8)
    where = ["reader", str(os.getpid()), str(pattern.ctypes.data), str(len(pattern))]
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "kvlink.doctor.probes", *where],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None
        plain = json.loads(reader.stdout.readline())["outcome"]
        permitted = plain
        if plain:
            permit_tracing(reader.pid)
            reader.stdin.write(b"again\n")
            reader.stdin.flush()
            permitted = json.loads(reader.stdout.readline())["outcome"]
    return {"plain": plain, "permitted": permitted}


def probe_sockets() -> dict[str, Any]:
    """Listen on loopback, as a cluster does unless it is told otherwise."""

    def listen(family: socket.AddressFamily, host: str) -> None:
        with socket.socket(family) as listener:
            listener.bind((host, 0))
            listener.listen()
            with socket.create_connection(listener.getsockname()[:2], timeout=_WAIT_S):
                pass

    return {
        "ipv4": _outcome(lambda: listen(socket.AF_INET, "127.0.0.1")),
        "ipv6": _outcome(lambda: listen(socket.AF_INET6, "::1")),
    }


def probe_ucx(library_path: str | None = None) -> dict[str, Any]:
    """Open libucp and ask what it can do here."""
    from kvlink.transports.ucx.library import probe

    return asdict(probe(library_path))


PROBES: Final[dict[str, Callable[..., dict[str, Any]]]] = {
    "sharing": probe_sharing,
    "foreign": probe_foreign,
    "sockets": probe_sockets,
    "ucx": probe_ucx,
}


def _pass_descriptor() -> None:
    segment = Segment.create("kvlink-doctor", _NBYTES)
    segment.memory[:] = np.arange(_NBYTES, dtype=np.uint64).astype(np.uint8)
    name = f"\0kvlink-doctor-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as dialler:
        listener.bind(name)
        listener.listen()
        dialler.settimeout(_WAIT_S)
        dialler.connect(name)
        with listener.accept()[0] as accepted:
            accepted.settimeout(_WAIT_S)
            fd = segment.open_read_only()
            socket.send_fds(accepted, [b"x"], [fd])
            os.close(fd)
            _, received, _, _ = socket.recv_fds(dialler, 1, 1)
    if len(received) != 1:
        raise OSError("the descriptor did not arrive")
    attached = Segment.attach(received[0], segment.nbytes)
    if not np.array_equal(attached.memory, segment.memory):
        raise OSError("the memory that arrived is not the memory that was sent")
    attached.close()
    segment.close()


def _watch_death() -> None:
    if not hasattr(os, "pidfd_open"):
        raise OSError("this Python or this kernel has no pidfd_open")
    child = os.fork()
    if child == 0:
        select.select([], [], [], 0.05)
        os._exit(0)
    try:
        fd = os.pidfd_open(child)
        try:
            poller = select.poll()
            poller.register(fd, select.POLLIN)
            if not poller.poll(_WAIT_S * 1000):
                raise OSError("the end of a process was not reported")
        finally:
            os.close(fd)
    finally:
        os.waitpid(child, 0)


def _read_parent(pid: int, address: int, nbytes: int) -> str:
    """Copy the memory of process `pid` here and back; say how that was refused."""

    def copy() -> None:
        fd = os.pidfd_open(pid)
        try:
            foreign = ForeignMemory(pid, fd, address, nbytes)
            here = np.zeros(nbytes, np.uint8)
            local = np.array([[here.ctypes.data, nbytes]], np.uint64)
            remote = np.array([[address, nbytes]], np.uint64)
            foreign.copy(local, remote, is_write=False)
            if not np.array_equal(here, np.arange(nbytes // 4, dtype=np.uint32).view(np.uint8)):
                raise OSError("other bytes were read than are there")
            foreign.copy(local, remote, is_write=True)
        finally:
            os.close(fd)

    return _outcome(copy)


def _outcome(do: Callable[[], object]) -> str:
    try:
        do()
    except (OSError, AttributeError, KVLinkError) as exc:
        return str(exc) or type(exc).__name__
    return ""


@contextmanager
def _own_answers() -> Iterator[int]:
    """Keep standard output for the answer: what anybody prints, a C library for one, goes to standard error."""
    sys.stdout.flush()
    fd = os.dup(1)
    os.dup2(2, 1)
    try:
        yield fd
    finally:
        os.close(fd)


def main(arguments: list[str]) -> None:
    """Run one probe, or be the process that copies."""
    with _own_answers() as fd, suppress(BrokenPipeError):
        if arguments[0] == "reader":
            pid, address, nbytes = map(int, arguments[1:])
            for _ in range(2):
                os.write(fd, json.dumps({"outcome": _read_parent(pid, address, nbytes)}).encode() + b"\n")
                if not sys.stdin.readline():
                    return
        else:
            os.write(fd, json.dumps(PROBES[arguments[0]](*arguments[1:])).encode() + b"\n")


if __name__ == "__main__":
    main(sys.argv[1:])
