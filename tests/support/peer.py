"""A peer in a process of its own, driven by a test.

The child (`tests.support.actor`) holds one `Cluster` and obeys JSON lines over a socket that is its standard input and
output. It can be killed, stopped and continued; whatever happens in the test, it has ended when ``async with`` has. Its
standard error goes to a file: shown when something fails, and required to be empty when the child ends in good order.

No task or thread of the test's process serves a child: whoever waits for an answer reads for all who wait.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import IO, Any, Final

import anyio
import pytest

import kvlink as kv
from tests.support.pattern import Stamp

REPOSITORY: Final = Path(__file__).parents[2]
PATHS: Final = {"PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))}
"""Variables with which a child finds this package and its tests."""
CALL_TIMEOUT_S: Final = 20.0
_EXIT_TIMEOUT_S: Final = 10.0


class PeerEndedError(Exception):
    """The child has ended while something was expected of it."""


class ChildError(Exception):
    """The child raised something that is not an error of kvlink's: ``kind`` is its type's name."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class Pending:
    """A call that the child is working on."""

    def __init__(self, peer: Peer, number: int, name: str) -> None:
        self._peer = peer
        self._number = number
        self._name = name

    async def result(self, *, within_s: float = CALL_TIMEOUT_S) -> Any:
        """Wait for the child's answer and return its value, or raise its error."""
        return await self._peer.result(self._number, self._name, within_s=within_s)


class Peer:
    """One child. Made by `spawn_peer`.

    Attributes:
        cluster_id, life: who it is; both are in every byte that it writes.
        address: where it listens, empty for a DECODER.
        pid: of its process.
        is_silent: whether its standard error must be empty when it ends in good order.
    """

    def __init__(self, process: subprocess.Popen[bytes], talk: socket.socket, log: IO[bytes]) -> None:
        self.pid = process.pid
        self.cluster_id = 0
        self.life = 0
        self.address = ""
        self.is_silent = True
        self._process = process
        self._talk = talk
        self._log = log
        self._received = bytearray()
        self._answers: dict[int, dict[str, Any]] = {}
        self._next = 1
        self._is_reading = False
        self._turn = anyio.Event()
        self._has_hung_up = False

    @property
    def info(self) -> kv.ClusterInfo:
        """What a test links to."""
        return kv.ClusterInfo(self.cluster_id, self.address)

    def stamp(self, cache: int) -> Stamp:
        """Return what the child writes into its cache of that handle."""
        return Stamp(self.cluster_id, self.life, cache)

    def start(self, name: str, **arguments: Any) -> Pending:
        """Ask the child for something and return at once."""
        number = self._next
        self._next += 1
        line = json.dumps({"number": number, "name": name, "arguments": arguments}) + "\n"
        try:
            self._talk.sendall(line.encode())
        except OSError as exc:
            raise PeerEndedError(f"cannot ask for {name}: {exc}; {self.describe()}") from exc
        return Pending(self, number, name)

    async def call(self, name: str, *, within_s: float = CALL_TIMEOUT_S, **arguments: Any) -> Any:
        """Ask the child for something and wait for it: its value, or its error."""
        return await self.start(name, **arguments).result(within_s=within_s)

    async def result(self, number: int, name: str, *, within_s: float) -> Any:
        """Wait for the answer to call `number`."""
        with anyio.move_on_after(within_s):
            while number not in self._answers:
                if self._has_hung_up:
                    await self._wait_end(2.0)
                    raise PeerEndedError(f"it ended during {name}; {self.describe()}")
                if self._is_reading:
                    await self._turn.wait()
                else:
                    await self._read()
            return self._value(self._answers.pop(number))
        with suppress(OSError):
            os.kill(self.pid, signal.SIGUSR1)  # faulthandler shows where it hangs
        await anyio.sleep(0.1)
        pytest.fail(f"the child did not do {name} within {within_s} s; {self.describe()}")

    def kill(self) -> None:
        """End it as ``kill -9`` does, and collect it."""
        self._process.kill()
        self._process.wait(_EXIT_TIMEOUT_S)

    def stop(self) -> None:
        """Stop its process (SIGSTOP) and return when it stands still."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def cont(self) -> None:
        """Let a stopped process go on."""
        os.kill(self.pid, signal.SIGCONT)

    @property
    def is_alive(self) -> bool:
        """Whether its process exists."""
        return self._process.poll() is None

    def cpu_seconds(self) -> float:
        """Return the processor time that it has used."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def fd_targets(self) -> list[str]:
        """Return what its open descriptors refer to."""
        folder = Path(f"/proc/{self.pid}/fd")
        return sorted(os.readlink(folder / name) for name in os.listdir(folder))

    async def exit(self) -> None:
        """Let it close its cluster and end; check that it did so in good order and without a word."""
        if self.is_alive and not self._has_hung_up:
            self.start("exit")
        await self._wait_end(_EXIT_TIMEOUT_S)
        if not self.is_alive:
            assert self._process.returncode == 0, self.describe()
            assert not self.is_silent or not self.log(), self.describe()
            return
        with suppress(OSError):
            os.kill(self.pid, signal.SIGUSR1)
        await anyio.sleep(0.1)
        pytest.fail(f"the child did not end within {_EXIT_TIMEOUT_S} s; {self.describe()}")

    def log(self) -> str:
        """Return what it has written to standard error."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def describe(self) -> str:
        """Say how the child is doing, for failures."""
        status = self._process.poll()
        state = "is alive" if status is None else f"has ended with status {status}"
        return f"cluster {self.cluster_id} (pid {self.pid}) {state}; it wrote: {self.log() or 'nothing'}"

    def end(self) -> None:
        """End it for certain. Idempotent."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(_EXIT_TIMEOUT_S)
        self._talk.close()
        self._log.close()

    async def _read(self) -> None:
        self._is_reading = True
        try:
            await anyio.wait_readable(self._talk)
            received = self._talk.recv(1 << 16)
        except ConnectionError:
            received = b""
        finally:
            self._is_reading = False
            self._turn.set()
            self._turn = anyio.Event()
        self._has_hung_up = not received
        self._received += received
        while b"\n" in self._received:
            line, _, rest = bytes(self._received).partition(b"\n")
            self._received = bytearray(rest)
            answer = json.loads(line)
            self._answers[answer["number"]] = answer

    async def _wait_end(self, within_s: float) -> None:
        with anyio.move_on_after(within_s), suppress(OSError):
            pidfd = os.pidfd_open(self.pid)
            try:
                await anyio.wait_readable(pidfd)
            finally:
                os.close(pidfd)
        self._process.poll()

    def _value(self, answer: dict[str, Any]) -> Any:
        if "error" not in answer:
            return answer["value"]
        error = answer["error"]
        kind = getattr(kv, error["kind"], None)
        if kind is None or not issubclass(kind, kv.KVLinkError):
            raise ChildError(error["kind"], error["text"])
        numbers = {"needed": 0, "free": 0, "largest_hole": 0} if kind is kv.OutOfMemoryError else {}
        raised = kind(error["text"], **numbers)
        raised.status = kv.StatusCode(error["status"])
        raised.peer, raised.phase = error["peer"], error["phase"]
        raise raised


@asynccontextmanager
async def spawn_peer(
    cluster_id: int,
    role: str = "PROMPT",
    *,
    pool: str = "64MiB",
    life: int = 1,
    loop_name: str = "asyncio",
    listen: str | None = None,
    config: dict[str, Any] | None = None,
    max_fds: int | None = None,
    environ: Mapping[str, str] | None = None,
    python: Sequence[str] = ("-W", "error"),
    program: str = "tests.support.actor",
    inside: Sequence[str] = (),
) -> AsyncIterator[Peer]:
    """Run a cluster in a process of its own for as long as the context lasts.

    When the body ends without an error and has not ended the child, the child must close in good order: status 0,
    nothing on standard error. When the body fails or is cancelled the child is killed.

    Args:
        cluster_id, role, pool, listen, config: of the `kvlink.Cluster`; `config` holds fields of `ClusterConfig`.
        life: which one of this cluster, for the bytes it writes.
        loop_name: ``asyncio``, ``uvloop`` or ``trio``.
        max_fds: how many descriptors it may have; None for no limit of its own.
        environ: variables besides those of the test's process.
        python: options of the interpreter.
        program: the module to run, which acts as `tests.support.actor` does.
        inside: a program, with arguments, that becomes the interpreter: one that enters a namespace, for example.
    """
    settings = {
        "cluster_id": cluster_id,
        "role": role,
        "pool": pool,
        "life": life,
        "loop_name": loop_name,
        "listen": listen,
        "config": config or {},
        "max_fds": max_fds,
    }
    peer = _start([*inside, sys.executable, *python, "-m", program, json.dumps(settings)], environ or {})
    try:
        peer.cluster_id, peer.life = cluster_id, life
        peer.address = await peer.result(0, "starting", within_s=CALL_TIMEOUT_S)
        yield peer
        if peer.is_alive:
            await peer.exit()
    except BaseException:
        print(peer.describe())  # shown by pytest beside the failure
        raise
    finally:
        peer.end()


def _start(command: Sequence[str], environ: Mapping[str, str]) -> Peer:
    ours, theirs = socket.socketpair()
    log = tempfile.TemporaryFile()  # noqa: SIM115  # closed by Peer.end
    try:
        with theirs:
            process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=log,
                cwd=REPOSITORY,
                env={**os.environ, **PATHS, **environ},
                start_new_session=True,  # an interrupt from the terminal is the test's business
            )
    except BaseException:
        ours.close()
        log.close()
        raise
    return Peer(process, ours, log)
