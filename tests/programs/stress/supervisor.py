"""Forks workers, kills, stops and restarts them, and adds up what they say. Plain blocking code in one thread.

Workers are forked, not started anew: all modules are loaded, so a new life costs a few milliseconds.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import logging
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final

from tests.programs.stress.settings import HANG_S, Settings
from tests.programs.stress.worker import run_worker

_PR_SET_PDEATHSIG: Final = 1  # <linux/prctl.h>
_LOOPS: Final = ("asyncio", "trio", "uvloop")


@dataclass(slots=True, kw_only=True)
class Goal:
    """When a run has done enough: when all of these are reached.

    Args:
        duration_s: how long it runs at least.
        cancellations, kills: how many there must have been.
        limit_s: a run that has not reached its goal by then has failed.
        kills_per_s: how fast, while there have not been enough.
        events_per_s: kills, stops and restarts otherwise.
    """

    duration_s: float = 0.0
    cancellations: int = 0
    kills: int = 0
    limit_s: float = 3600.0
    kills_per_s: float = 3.0
    events_per_s: float = 1.0


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a run came to."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    last: dict[int, list[str]] = field(default_factory=dict)
    slowest_cancel_s: float = 0.0
    duration_s: float = 0.0


class _Child:
    """One life of one worker."""

    def __init__(self, number: int, life: int, pid: int, talk: socket.socket, log: Path) -> None:
        self.number = number
        self.life = life
        self.pid = pid
        self.talk = talk
        self.log = log
        self.heard_at = time.monotonic()
        self.stopped_until: float | None = None
        self.is_told = False
        self.received = b""
        self.told: dict[str, Any] = {"counts": {}, "wrong": [], "slowest_cancel_s": 0.0}

    def __str__(self) -> str:
        return f"worker {self.number}, life {self.life}, pid {self.pid}"


class Supervisor:
    """One run.

    Args:
        say: called about once a second with how far the run is.
    """

    def __init__(self, settings: Settings, goal: Goal, say: Callable[[Outcome], None]) -> None:
        self._settings = settings
        self._goal = goal
        self._say = say
        self._chance = Random(f"{settings.seed}/supervisor")
        self._outcome = Outcome()
        self._children: dict[int, _Child] = {}
        self._lives = dict.fromkeys(range(1, settings.num_workers + 1), 0)
        self._due: dict[int, float] = {}
        self._folder = Path(tempfile.mkdtemp(prefix="kvlink-stress-"))
        self._addresses = {number: f"unix:{self._folder}/{number}" for number in self._lives}

    def run(self) -> Outcome:
        """Run until the goal is reached or something is wrong; whatever happens, no child is left."""
        goal, outcome = self._goal, self._outcome
        named = set(os.listdir("/dev/shm"))
        started = time.monotonic()
        next_event = started + 1.0
        next_word = started + 1.0
        try:
            for number in self._lives:
                self._start(number)
            while not outcome.wrong:
                self._listen(0.05)
                now = time.monotonic()
                outcome.duration_s = now - started
                self._continue_and_restart(now)
                if now >= next_event:
                    is_killing = outcome.counts["kills"] < goal.kills
                    next_event = now + self._chance.expovariate(goal.kills_per_s if is_killing else goal.events_per_s)
                    self._make_trouble(now, 0.8 if is_killing else 0.3)
                if now >= next_word:
                    next_word = now + 1.0
                    self._say(self._summed())
                if self._is_enough():
                    break
                if outcome.duration_s > goal.limit_s:
                    outcome.wrong.append(f"the goal was not reached in {goal.limit_s} s")
            self._end_all()
        finally:
            for child in list(self._children.values()):
                self._kill(child)
            shutil.rmtree(self._folder, ignore_errors=True)
        new = [name for name in set(os.listdir("/dev/shm")) - named if "kvlink" in name]
        if new:
            outcome.wrong.append(f"left under /dev/shm: {new}")
        outcome.duration_s = time.monotonic() - started
        return outcome

    # Lives

    def _start(self, number: int) -> None:
        self._lives[number] += 1
        life = self._lives[number]
        ours, theirs = socket.socketpair()
        log = self._folder / f"{number}.{life}.log"
        pid = os.fork()
        if pid:
            theirs.close()
            self._children[number] = _Child(number, life, pid, ours, log)
            return
        status = 70
        try:
            ours.close()
            for child in self._children.values():
                child.talk.close()
            status = self._live(number, life, theirs, log)
        except BaseException:
            traceback.print_exc()
        finally:
            with suppress(Exception):
                sys.stderr.flush()
            os._exit(status)

    def _live(self, number: int, life: int, talk: socket.socket, log: Path) -> int:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(fd, 2)
        os.dup2(fd, 1)
        os.close(fd)
        sys.stderr = os.fdopen(2, "w", closefd=False, buffering=1)
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1)
        warnings.simplefilter("error")
        logging.raiseExceptions = True
        loop_name = _LOOPS[(number + life) % len(_LOOPS)]
        return run_worker(self._settings, number, life, self._addresses, talk, loop_name)

    def _continue_and_restart(self, now: float) -> None:
        for child in list(self._children.values()):
            if child.stopped_until is not None and now >= child.stopped_until:
                self._continue(child)
            elif child.stopped_until is None and now - child.heard_at > HANG_S + 5:
                self._accuse(child, f"has not said anything for {now - child.heard_at:.0f} s")
        for number, at in list(self._due.items()):
            if now >= at and number not in self._children:
                del self._due[number]
                self._start(number)

    def _continue(self, child: _Child) -> None:
        child.stopped_until = None
        child.heard_at = time.monotonic()
        os.kill(child.pid, signal.SIGCONT)

    def _kill(self, child: _Child) -> None:
        """End a child as ``kill -9`` does, and collect it."""
        self._children.pop(child.number, None)
        os.kill(child.pid, signal.SIGKILL)
        os.waitpid(child.pid, 0)
        self._hear(child)
        self._settle(child)
        child.talk.close()

    def _settle(self, child: _Child) -> None:
        """Add what a life that has ended had done."""
        outcome, told = self._outcome, child.told
        outcome.counts.update(told["counts"])
        outcome.slowest_cancel_s = max(outcome.slowest_cancel_s, told["slowest_cancel_s"])
        for text in told["wrong"]:
            outcome.wrong.append(f"{child}: {text}")
        if told["wrong"]:
            outcome.last[child.number] = told.get("last", [])
        child.told = {"counts": {}, "wrong": [], "slowest_cancel_s": 0.0}

    # Trouble

    def _make_trouble(self, now: float, kill_share: float) -> None:
        chance, counts = self._chance, self._outcome.counts
        alive = [child for child in self._children.values() if child.stopped_until is None and not child.is_told]
        if not alive:
            return
        child = chance.choice(alive)
        dice = chance.random()
        if dice < kill_share:
            if chance.random() < 0.2:  # one that is stopped first dies without having read anything
                os.kill(child.pid, signal.SIGSTOP)
                time.sleep(chance.random() * 0.02)
            self._kill(child)
            counts["kills"] += 1
            self._due[child.number] = now + chance.choice([0.0, chance.random() * 0.5])
        elif dice < kill_share + 0.4 * (1 - kill_share):
            os.kill(child.pid, signal.SIGSTOP)
            child.stopped_until = now + chance.choice([0.05, 0.3, 1.5]) * chance.random()
            counts["stops"] += 1
        else:
            child.is_told = True
            child.talk.send(b"x")
            counts["restarts"] += 1

    def _end_all(self) -> None:
        """Let every worker end in good order, and wait for that."""
        for child in list(self._children.values()):
            if child.stopped_until is not None:
                self._continue(child)
            if not child.is_told:
                child.is_told = True
                with suppress(OSError):
                    child.talk.send(b"x")
        self._due.clear()
        deadline = time.monotonic() + HANG_S + 15
        while self._children and time.monotonic() < deadline:
            self._listen(0.05)
        for child in list(self._children.values()):
            self._accuse(child, "does not end")

    def _accuse(self, child: _Child, text: str) -> None:
        """Something is wrong with a process: have it show where it stands, and end it."""
        with suppress(OSError):
            os.kill(child.pid, signal.SIGUSR1)
        time.sleep(0.2)
        log = child.log.read_text(errors="replace") if child.log.exists() else ""
        self._kill(child)
        self._outcome.wrong.append(f"{child} {text}; it wrote: {log}")

    # What workers say

    def _listen(self, within_s: float) -> None:
        by_fd = {child.talk.fileno(): child for child in self._children.values()}
        ready, _, _ = select.select(list(by_fd), [], [], within_s)
        for fd in ready:
            child = by_fd[fd]
            child.heard_at = time.monotonic()
            if not self._hear(child):
                self._collect(child)
            elif child.told["wrong"]:
                self._kill(child)

    def _hear(self, child: _Child) -> bool:
        """Take what has arrived; return whether there may be more."""
        while True:
            try:
                received = child.talk.recv(1 << 18, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not received:
                return False
            *lines, child.received = (child.received + received).split(b"\n")
            if lines:
                child.told = json.loads(lines[-1])

    def _collect(self, child: _Child) -> None:
        """A worker has ended by itself."""
        del self._children[child.number]
        _, status = os.waitpid(child.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        said = child.log.read_text(errors="replace") if child.log.exists() else ""
        is_well = code == 0 and bool(child.told.get("is_done")) and not said
        self._settle(child)
        child.talk.close()
        if not is_well and (not child.told["wrong"]):
            self._outcome.wrong.append(f"{child} ended with status {code}; it wrote: {said or 'nothing'}")
        if child.is_told:
            self._due[child.number] = time.monotonic() + self._chance.random() * 0.2

    def _summed(self) -> Outcome:
        """Return the outcome as it is now, with what living workers have said."""
        total = Outcome(counts=Counter(self._outcome.counts), duration_s=self._outcome.duration_s)
        total.slowest_cancel_s = self._outcome.slowest_cancel_s
        for child in self._children.values():
            total.counts.update(child.told["counts"])
            total.slowest_cancel_s = max(total.slowest_cancel_s, child.told["slowest_cancel_s"])
        return total

    def _is_enough(self) -> bool:
        goal, counts = self._goal, self._summed().counts
        return (
            self._outcome.duration_s >= goal.duration_s
            and counts["cancellations"] >= goal.cancellations
            and counts["kills"] >= goal.kills
        )
