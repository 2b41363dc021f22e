"""Feed a target ever new bytes until it raises something that it must not.

A target is a function of bytes that returns, or raises what it promises to raise, which it catches itself. Each is a
program::

    python -m tests.fuzz.frames --seconds 60 --seed 7
    python -m tests.fuzz.frames --atheris corpus/ -max_total_time=600    # needs `pip install atheris`

With atheris, libFuzzer is guided by which code was reached, and takes its own options. Without it, samples are cut,
joined, repeated and changed at random: a crowd of bad luck rather than a search, but it needs nothing.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

Target = Callable[[bytes], None]

_INTERESTING = (
    b"\x00",
    b"\xff",
    b"\x7f",
    b"\x80",
    b"\xc1",
    b"\xdd\xff\xff\xff\xff",
    b"\xcf" + b"\xff" * 8,
    b"\x91" * 64,
)


def mutate(chance: random.Random, samples: Sequence[bytes]) -> bytes:
    """Return bytes that nearly are what the target expects."""
    made = bytearray(chance.choice(samples))
    for _ in range(chance.randrange(6)):
        place = chance.randrange(len(made) + 1)
        kind = chance.randrange(6)
        if kind == 0 and made:
            made[place % len(made)] ^= 1 << chance.randrange(8)
        elif kind == 1:
            made[place:place] = chance.choice(_INTERESTING)
        elif kind == 2:
            del made[place : place + chance.randrange(1, 9)]
        elif kind == 3:
            made[place:place] = chance.choice(samples)[: chance.randrange(200)]
        elif kind == 4:
            made[place : place + 4] = chance.randbytes(4)
        else:
            made = made[:place]
    return bytes(made)


def fuzz(target: Target, samples: Sequence[bytes], *, seconds: float, seed: int) -> int:
    """Try for some seconds and return how many inputs that were.

    Raises:
        AssertionError: the target raised; the message has the input, and the seed.
    """
    chance = random.Random(seed)
    ends_at = time.monotonic() + seconds
    number = 0
    for sample in samples:
        _try(target, sample, seed)
    while time.monotonic() < ends_at:
        for _ in range(50):
            _try(target, mutate(chance, samples), seed)
            number += 1
    return number


def _try(target: Target, given: bytes, seed: int) -> None:
    try:
        target(given)
    except Exception as exc:
        raise AssertionError(f"{target.__module__} with seed {seed} raises {exc!r} for {given!r}") from exc


def main(target: Target, samples: Sequence[bytes]) -> None:
    """Be a fuzzing program."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["--atheris"]:
        try:
            atheris = importlib.import_module("atheris")
        except ImportError:
            sys.exit("atheris is not installed: `pip install atheris`, or run without --atheris")
        # What is followed must be loaded anew: kvlink itself, and the target with it.
        name = sys.modules["__main__"].__spec__.name  # type: ignore[union-attr]  # it runs as `python -m`
        for loaded in [loaded for loaded in sys.modules if loaded.partition(".")[0] in ("kvlink", "tests")]:
            del sys.modules[loaded]
        with atheris.instrument_imports(include=["kvlink"]):
            target = importlib.import_module(name).one_input
        with tempfile.TemporaryDirectory() as folder:  # the samples, to begin with
            for number, sample in enumerate(samples):
                Path(folder, str(number)).write_bytes(sample)
            options = arguments[1:]
            corpora = [option for option in options if not option.startswith("-")]
            child = os.fork()  # libFuzzer ends its process, and the folder is to go
            if not child:
                atheris.Setup([sys.argv[0], *options, *([] if corpora else [folder])], target)
                atheris.Fuzz()
            _, status = os.waitpid(child, 0)
        sys.exit(os.waitstatus_to_exitcode(status))
    parser = argparse.ArgumentParser(description=sys.modules[target.__module__].__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    asked = parser.parse_args(arguments)
    print(f"seed {asked.seed}")
    print(f"{fuzz(target, samples, seconds=asked.seconds, seed=asked.seed)} inputs")
