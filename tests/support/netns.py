"""Two hosts on one machine: network namespaces, and the cable between them.

Each `FarHost` is a network namespace of its own: other interfaces, other loopback, other abstract Unix sockets. What
crosses from one to the other goes over the cable, which a test can cut and mend:

- `Cable` is a veth pair. Cutting it takes the interface of one end down; the other end sees that its carrier is gone.
- `SlowCable` is a pair of TUN interfaces with a thread between them that delays and loses packets, under a seed.
  Cutting it loses every packet, and neither end is told: a switch that has died.

    Decision: a thread of ours delays and loses packets.
    Because: many kernels come without netem; and a seed makes losses repeatable.
    Instead of: ``tc qdisc ... netem``.
    Revisit when: a test needs more than some 20,000 packets a second.

A namespace lives as long as a descriptor of it is open, so that a test that is killed leaves nothing behind. Root is
needed, and ``ip``, ``nsenter`` and ``unshare``; `why_not` says what is missing.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

_CLONE_NEWNET: Final = 0x40000000  # <linux/sched.h>
_TUNSETIFF: Final = 0x400454CA  # <linux/if_tun.h>
_IFF_TUN: Final = 0x0001
_IFF_NO_PI: Final = 0x1000
_MTU: Final = 9000
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


def why_not() -> str:
    """Say what this machine lacks for two hosts; empty where it lacks nothing."""
    missing = [program for program in ("ip", "nsenter", "unshare") if shutil.which(program) is None]
    if missing:
        return f"needs {' and '.join(missing)} (iproute2, util-linux)"
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    try:
        os.close(_run_apart(_make_namespace))
    except OSError as exc:
        return f"no network namespace can be made here: {exc.strerror}"
    return ""


def why_no_slow_cable() -> str:
    """Say what this machine lacks for a `SlowCable`, besides what `why_not` says."""
    try:
        os.close(os.open("/dev/net/tun", os.O_RDWR))
    except OSError as exc:
        return f"needs TUN interfaces: /dev/net/tun: {exc.strerror}"
    return ""


class FarHost:
    """One network namespace, with loopback up.

    Attributes:
        address: its end of the cable.
        inside: the program, with arguments, that runs a program in it: for `spawn_peer`.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._fd = _run_apart(_make_namespace)
        self._enter = ("nsenter", f"--net={self.path}")
        # /sys shows the interfaces of whoever mounted it, and UCX looks there: so each program gets a /sys of its own.
        mount = 'mount -t sysfs sysfs /sys && exec "$@"'
        self.inside = (*self._enter, "unshare", "--mount", "sh", "-c", mount, "sh")
        self.ip("link", "set", "lo", "up")

    @property
    def path(self) -> str:
        """A file that names the namespace, for as long as this process lives."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def ip(self, *arguments: str) -> str:
        """Run ``ip`` in it and return what it says."""
        done = subprocess.run([*self._enter, "ip", *arguments], capture_output=True, text=True, timeout=20)
        assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
        return done.stdout

    def wait_up(self) -> None:
        """Return once its end of a cable says that it runs: the kernel lets a second pass, and UCX looks there."""
        until = time.monotonic() + 5
        while "state UP" not in self.ip("link", "show", "cable"):
            assert time.monotonic() < until, "the cable does not come up"
            time.sleep(0.02)

    def enter(self) -> None:
        """Move the calling thread into it."""
        _check(_LIBC.setns(self._fd, _CLONE_NEWNET))

    def close(self) -> None:
        """Let it go: it ends with the last process inside."""
        os.close(self._fd)


class Cable:
    """A veth pair between two hosts."""

    def __init__(self, near: FarHost, far: FarHost) -> None:
        self._near, self._far = near, far
        near.ip("link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", far.path)
        for host in (near, far):
            _bring_up(host)
        for host in (near, far):
            host.wait_up()

    def cut(self) -> None:
        """Nothing passes from now on."""
        self._near.ip("link", "set", "cable", "down")

    def mend(self) -> None:
        """All is as before."""
        self._near.ip("link", "set", "cable", "up")
        for host in (self._near, self._far):
            host.wait_up()

    def close(self) -> None:
        """Take it away."""
        self._near.ip("link", "delete", "cable")


class SlowCable:
    """A cable that delays and loses packets.

    Args:
        delay_s: how long a packet is under way, either direction.
        loss: the share of packets that never arrive.
        seed: of the losses.

    Attributes:
        num_passed, num_lost: packets, both directions.
    """

    def __init__(self, near: FarHost, far: FarHost, *, delay_s: float = 0.0, loss: float = 0.0, seed: int = 1) -> None:
        self.num_passed = self.num_lost = 0
        self._delay_s = delay_s
        self._loss = loss
        self._chance = random.Random(seed)
        self._is_cut = threading.Event()
        self._ends = tuple(_run_apart(lambda host=host: _open_tun(host)) for host in (near, far))  # type: ignore[misc]
        for host in (near, far):
            _bring_up(host)
        self._stop, self._stopped = os.pipe()
        self._thread = threading.Thread(target=self._carry, name="slow cable")
        self._thread.start()

    def cut(self) -> None:
        """Every packet is lost from now on, those that are under way too."""
        self._is_cut.set()

    def mend(self) -> None:
        """All is as before."""
        self._is_cut.clear()

    def close(self) -> None:
        """Take it away."""
        os.close(self._stopped)
        self._thread.join()
        for fd in (*self._ends, self._stop):
            os.close(fd)

    def _carry(self) -> None:
        under_way: list[tuple[float, int, int, bytes]] = []
        number = 0
        while True:
            wait_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
            readable, _, _ = select.select([*self._ends, self._stop], [], [], wait_s)
            if self._stop in readable:
                return
            now = time.monotonic()
            for end in readable:
                packet = os.read(end, _MTU + 64)
                if self._is_cut.is_set() or self._chance.random() < self._loss:
                    self.num_lost += 1
                    continue
                number += 1  # equal times keep their order
                out = self._ends[1] if end == self._ends[0] else self._ends[0]
                heapq.heappush(under_way, (now + self._delay_s, number, out, packet))
            while under_way and under_way[0][0] <= now:
                _, _, out, packet = heapq.heappop(under_way)
                if self._is_cut.is_set():
                    self.num_lost += 1
                else:
                    os.write(out, packet)
                    self.num_passed += 1


@contextmanager
def two_hosts() -> Iterator[tuple[FarHost, FarHost]]:
    """Make two hosts without a cable."""
    near = FarHost("10.77.0.1")
    try:
        far = FarHost("10.77.0.2")
        try:
            yield near, far
        finally:
            far.close()
    finally:
        near.close()


@contextmanager
def laid(cable: Cable | SlowCable) -> Iterator[Cable | SlowCable]:
    """Take a cable away in the end."""
    try:
        yield cable
    finally:
        cable.close()


def _bring_up(host: FarHost) -> None:
    host.ip("address", "add", f"{host.address}/24", "dev", "cable")
    host.ip("link", "set", "cable", "mtu", str(_MTU), "up")


def _make_namespace() -> int:
    _check(_LIBC.unshare(_CLONE_NEWNET))
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _open_tun(host: FarHost) -> int:
    host.enter()  # an interface belongs to the namespace of whoever opens it
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", b"cable", _IFF_TUN | _IFF_NO_PI))
    return fd


def _run_apart(do: Callable[[], int]) -> int:
    """Run something in a thread of its own, whose namespace nobody else shares, and return or raise what came of it."""
    outcome: list[int | OSError] = []

    def run() -> None:
        try:
            outcome.append(do())
        except OSError as exc:
            outcome.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(outcome[0], OSError):
        raise outcome[0]
    return outcome[0]


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
