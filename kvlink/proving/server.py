"""The side that serves: it starts targets for one prover at a time, stops and kills them when it is asked to.

The conversation is lines of JSON over TCP. Whoever does not open it with the key is hung up on; the key is made anew
for each run and shown to the user. What a prover can make this process do is in `_Session`, and no more than that: the
memory is bounded by `size_nbytes`, the processes by `_MAX_TARGETS`, and all of them end with the conversation.
"""

from __future__ import annotations

import hmac
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import anyio
from anyio import to_thread
from anyio.abc import SocketAttribute, SocketStream
from anyio.streams.buffered import BufferedByteReceiveStream

from kvlink.benchmarks.accounting import machine
from kvlink.config import parse_address
from kvlink.doctor.command import examine

MAX_LINE_NBYTES: Final = 1 << 20
_MAX_TARGETS: Final = 4
_HELLO_TIMEOUT_S: Final = 10.0
_IDLE_TIMEOUT_S: Final = 900.0
_TARGET_TIMEOUT_S: Final = 60.0

Request = dict[str, Any]


class RequestError(Exception):
    """The prover asks for something that cannot be done; it is told the text."""


async def serve(
    listen: str, *, key: str, size_nbytes: int, say: Callable[[str], None], on_ready: Callable[[str], None], once: bool
) -> None:
    """Serve provers until cancelled, or one of them.

    Args:
        listen: ``"host:port"``; targets listen on the same host.
        key: what a prover must show.
        size_nbytes: of each cache of a target.
        say: shows a line to the user.
        on_ready: told the address once provers can connect.
    """
    address = parse_address(listen)
    done = anyio.Event()
    turn = anyio.Lock()

    async def meet(stream: SocketStream) -> None:
        async with stream:
            lines = BufferedByteReceiveStream(stream)
            try:
                with anyio.fail_after(_HELLO_TIMEOUT_S):
                    hello = await receive_line(lines)
                if not _is_key(hello, key):
                    say("hung up on somebody without the key")
                    return
            except (TimeoutError, ValueError, anyio.BrokenResourceError, anyio.EndOfStream, anyio.IncompleteRead):
                return
            async with turn:
                session = _Session(address.host, size_nbytes, key)
                try:
                    say("a prover is here")
                    await session.converse(stream, lines)
                finally:
                    session.end()
                    say("the prover has gone")
            if once:
                done.set()

    async with await anyio.create_tcp_listener(local_host=address.host, local_port=address.port) as listener:
        port = listener.extra(SocketAttribute.local_port)
        on_ready(f"[{address.host}]:{port}" if ":" in address.host else f"{address.host}:{port}")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve, meet)
            await done.wait()
            tasks.cancel_scope.cancel()


async def receive_line(lines: BufferedByteReceiveStream) -> Any:
    """Return the next line of a conversation, decoded. Raises ValueError for what is no JSON or is too long."""
    try:
        return json.loads(await lines.receive_until(b"\n", MAX_LINE_NBYTES))
    except anyio.DelimiterNotFound as exc:
        raise ValueError("a line that does not end") from exc
    except RecursionError as exc:
        raise ValueError("a line nested too deep") from exc


class _Session:
    """One conversation and the targets that were started in it. Each public name in `_CALLS` is a request."""

    def __init__(self, host: str, size_nbytes: int, key: str) -> None:
        self._host = host
        self._key = key
        self._size_nbytes = size_nbytes
        self._targets: dict[int, subprocess.Popen[str]] = {}

    async def converse(self, stream: SocketStream, lines: BufferedByteReceiveStream) -> None:
        """Answer requests until the prover goes or falls silent."""
        calls: dict[str, Callable[[Request], Any]] = {
            "about": self._about,
            "start": self._start,
            "stop": self._stop,
            "go": self._go,
            "kill": self._kill,
            "check": self._check,
        }
        with suppress(anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError, ValueError, TimeoutError):
            while True:
                with anyio.fail_after(_IDLE_TIMEOUT_S):
                    request = await receive_line(lines)
                answer: dict[str, Any]
                try:
                    call = calls[request["ask"]]
                    with anyio.fail_after(_TARGET_TIMEOUT_S):
                        answer = {"value": await to_thread.run_sync(call, request, abandon_on_cancel=True)}
                except TimeoutError:
                    self.end()  # which ends the thread that waits, too
                    answer = {"error": f"no answer within {_TARGET_TIMEOUT_S:g} s; all targets were ended"}
                except (RequestError, KeyError, TypeError, ValueError, OSError) as exc:
                    answer = {"error": f"{type(exc).__name__}: {exc}"}
                await stream.send(json.dumps(answer).encode() + b"\n")

    def end(self) -> None:
        """End every target. Idempotent."""
        for target in self._targets.values():
            _end(target)
        self._targets.clear()

    def _about(self, _: Request) -> dict[str, Any]:
        return {"doctor": examine().as_json(), "machine": machine(), "size_nbytes": self._size_nbytes}

    def _start(self, request: Request) -> dict[str, Any]:
        cluster_id, writer = int(request["cluster_id"]), int(request["writer"])
        old = self._targets.pop(cluster_id, None)
        if old is not None:
            _end(old)
        if len(self._targets) >= _MAX_TARGETS:
            raise RequestError(f"there are {_MAX_TARGETS} targets already")
        settings = {
            "cluster_id": cluster_id,
            "writer": writer,
            "host": self._host,
            "size_nbytes": self._size_nbytes,
            "key": self._key,
        }
        target = subprocess.Popen(
            [sys.executable, "-m", "kvlink.proving.target"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(entry) for entry in sys.path)},
        )
        self._targets[cluster_id] = target
        assert target.stdin is not None
        target.stdin.write(json.dumps(settings) + "\n")
        target.stdin.flush()
        return _listen_to(target)

    def _stop(self, request: Request) -> None:
        target = self._target(request)
        target.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, target.pid, os.WSTOPPED | os.WNOWAIT)  # it stands still when this returns

    def _go(self, request: Request) -> None:
        self._target(request).send_signal(signal.SIGCONT)

    def _kill(self, request: Request) -> None:
        _end(self._target(request))

    def _check(self, request: Request) -> dict[str, Any]:
        target = self._target(request)
        assert target.stdin is not None
        names = ("cache", "writer", "blocks", "sources")
        target.stdin.write(json.dumps({name: request[name] for name in names}) + "\n")
        target.stdin.flush()
        return _listen_to(target)

    def _target(self, request: Request) -> subprocess.Popen[str]:
        return self._targets[int(request["cluster_id"])]


def _listen_to(target: subprocess.Popen[str]) -> dict[str, Any]:
    """Return what a target says next; it says something in bounded time, or ends."""
    assert target.stdout is not None
    line = target.stdout.readline()
    if not line:
        raise RequestError(f"the target has ended with status {target.wait(_TARGET_TIMEOUT_S)}")
    said: dict[str, Any] = json.loads(line)
    return said


def _end(target: subprocess.Popen[str]) -> None:
    target.kill()
    target.wait(_TARGET_TIMEOUT_S)
    for stream in (target.stdin, target.stdout):
        if stream is not None:
            with suppress(BrokenPipeError):
                stream.close()


def _is_key(hello: object, key: str) -> bool:
    return isinstance(hello, dict) and hmac.compare_digest(str(hello.get("key")).encode(), key.encode())
