"""Run two programs in processes of their own, joined by a pipe, so that neither outlives a failure of the other."""

from __future__ import annotations

import multiprocessing as mp
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any, TypeAlias

import anyio
from anyio import to_thread

Program: TypeAlias = Callable[[Connection], Awaitable[int]]


async def receive(pipe: Connection, *, timeout_s: float = 120) -> Any:
    """Return the next object from the other process.

    Cancellation: waits, in a worker thread, until something comes or the time is up.

    Raises:
        TimeoutError: nothing came.
    """
    if not await to_thread.run_sync(pipe.poll, timeout_s):
        raise TimeoutError(f"nothing came from the other process in {timeout_s} s")
    return pipe.recv()


def run_both(programs: Mapping[str, Program], *, timeout_s: float) -> int:
    """Run two named async programs, each in a fresh process with its end of a pipe; return an exit status.

    A program returns its exit status. The result is 0 if both did so with 0 within `timeout_s`. Else the reason is
    printed to stderr, what still runs is killed, and the result is 1. Both must be importable: functions of a module.
    """
    context = mp.get_context("spawn")
    # Both ends stay open here: a program whose peer has died waits in silence, and is ended below with one line said,
    # instead of adding a traceback of its own.
    pipes = context.Pipe()
    processes = [
        context.Process(target=_run, args=(program, pipe), name=name, daemon=True)
        for (name, program), pipe in zip(programs.items(), pipes, strict=True)
    ]
    deadline = time.monotonic() + timeout_s
    running = list(processes)
    try:
        for process in processes:
            process.start()
        while running:
            if not wait([process.sentinel for process in running], timeout=max(0.0, deadline - time.monotonic())):
                print(f"\nnot done after {timeout_s} s", file=sys.stderr)
                return 1
            for process in [process for process in running if not process.is_alive()]:
                running.remove(process)
                if process.exitcode:
                    print(f"\n{process.name} ended with exit status {process.exitcode}", file=sys.stderr)
                    return 1
        return 0
    finally:
        for process in running:
            process.kill()
            process.join()
        for pipe in pipes:
            pipe.close()


def _run(program: Program, pipe: Connection) -> None:
    sys.exit(anyio.run(program, pipe))
