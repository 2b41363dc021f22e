"""The floor, and the comparison of every byte: a few lines of C, compiled when they are needed, or numpy and ctypes."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

Addresses = NDArray[np.uint64]

MULTIPLIER: Final = 0x9E3779B97F4A7C15
"""Word ``i`` of a cache holds ``i * MULTIPLIER + seed``, modulo 2**64: no two words of a test are equal."""

_MASK: Final = 2**64 - 1
_STEP: Final = 1 << 17  # words that fit into the processor's second cache

_SOURCE: Final = r"""
#include <stdint.h>
#include <string.h>

void copy_blocks(const uint64_t *target, const uint64_t *source, uint64_t nbytes, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++)
        memcpy((void *)(uintptr_t)target[i], (const void *)(uintptr_t)source[i], nbytes);
}

uint64_t count_wrong(const uint64_t *block, const uint64_t *first_word, uint64_t num_words, uint64_t count,
                     uint64_t multiplier, uint64_t seed)
{
    uint64_t wrong = 0;
    for (uint64_t i = 0; i < count; i++) {
        const uint64_t *word = (const uint64_t *)(uintptr_t)block[i];
        uint64_t expected = first_word[i] * multiplier + seed, difference = 0;
        for (uint64_t k = 0; k < num_words; k++, expected += multiplier)
            difference |= word[k] ^ expected;
        wrong += difference != 0;
    }
    return wrong;
}
"""


class Native:
    """The loops that must not cost what Python costs.

    Args:
        is_compiled: with a C compiler, where there is one; False for numpy and ctypes in any case.

    Attributes:
        floor: how the floor copies, for the result.
    """

    def __init__(self, *, is_compiled: bool = True) -> None:
        self._library = _compile() if is_compiled else None
        self.floor = "c_memcpy_loop" if self._library else "ctypes_memmove_loop"

    def copy(self, target: Addresses, source: Addresses, nbytes: int) -> Callable[[], None]:
        """Return a call that copies `nbytes` from each source address to the target address beside it."""
        if self._library is not None:
            function = self._library.copy_blocks
            call = (target.ctypes.data, source.ctypes.data, nbytes, len(target))

            # The arrays are arguments so that they live as long as the call.
            def copy_in_c(kept: tuple[Addresses, Addresses] = (target, source)) -> None:
                function(*call)

            return copy_in_c
        pairs = list(zip(target.tolist(), source.tolist(), strict=True))

        def copy_in_python() -> None:
            for to, origin in pairs:
                ctypes.memmove(to, origin, nbytes)

        return copy_in_python

    def count_wrong(self, blocks: Addresses, first_words: Addresses, nbytes: int, seed: int) -> int:
        """Return how many blocks do not hold what `fill` wrote at these words of the source.

        Args:
            blocks: their addresses.
            first_words: which word of the source each block must begin with.
            nbytes: of each.
        """
        num_words = nbytes // 8
        if self._library is not None:
            return int(
                self._library.count_wrong(
                    blocks.ctypes.data, first_words.ctypes.data, num_words, len(blocks), MULTIPLIER, seed
                )
            )
        wrong = 0
        for address, first in zip(blocks.tolist(), first_words.tolist(), strict=True):
            words = np.ctypeslib.as_array((ctypes.c_uint64 * num_words).from_address(address))
            wrong += not all(
                np.array_equal(words[start : start + _STEP], _words(first + start, min(_STEP, num_words - start), seed))
                for start in range(0, num_words, _STEP)
            )
        return wrong


def fill(words: NDArray[np.uint64], first_word: int, seed: int) -> None:
    """Write the pattern into `words`, the first of which is word `first_word` of the cache."""
    for start in range(0, len(words), _STEP):
        part = words[start : start + _STEP]
        np.add(_RAMP[: len(part)], _word(first_word + start, seed), out=part)


_RAMP: Final = np.arange(_STEP, dtype=np.uint64) * np.uint64(MULTIPLIER)


def _words(first_word: int, count: int, seed: int) -> NDArray[np.uint64]:
    words: NDArray[np.uint64] = _RAMP[:count] + _word(first_word, seed)
    return words


def _word(index: int, seed: int) -> NDArray[np.uint64]:
    return np.array((index * MULTIPLIER + seed) & _MASK, dtype=np.uint64)


def _compile() -> ctypes.CDLL | None:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory(prefix="kvlink-bench-") as folder:
        source, library = Path(folder, "loops.c"), Path(folder, "loops.so")
        source.write_text(_SOURCE, encoding="utf-8")
        try:
            subprocess.run(
                [compiler, "-O3", "-shared", "-fPIC", "-o", str(library), str(source)],
                check=True,
                capture_output=True,
                timeout=60,
            )
            loaded = ctypes.CDLL(str(library))
        except (OSError, subprocess.SubprocessError):
            return None
    loaded.copy_blocks.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64]
    loaded.copy_blocks.restype = None
    loaded.count_wrong.argtypes = [ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_uint64] * 4]
    loaded.count_wrong.restype = ctypes.c_uint64
    return loaded
