"""Run one async test on several event loops; wait for what has no event of its own."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import anyio
import pytest

_T = TypeVar("_T")
_LOOPS: dict[str, tuple[str, dict[str, bool]]] = {
    "asyncio": ("asyncio", {"use_uvloop": False}),
    "uvloop": ("asyncio", {"use_uvloop": True}),
    "trio": ("trio", {}),
}
TEST_TIMEOUT_S = 60.0
"""After this a test is cancelled from within, so that it ends its children itself."""

AsyncTest = Callable[..., Coroutine[Any, Any, None]]


def on_loops(*names: str, timeout_s: float = TEST_TIMEOUT_S) -> Callable[[AsyncTest], Callable[..., None]]:
    """Make an async test a plain one that runs once on each of these loops: ``asyncio``, ``uvloop``, ``trio``."""

    def decorate(test: AsyncTest) -> Callable[..., None]:
        @functools.wraps(test)
        def run(*, loop_name: str, **arguments: Any) -> None:
            run_on(loop_name, functools.partial(test, **arguments), timeout_s=timeout_s)

        signature = inspect.signature(test)
        parameter = inspect.Parameter("loop_name", inspect.Parameter.KEYWORD_ONLY)
        run.__signature__ = signature.replace(  # type: ignore[attr-defined]  # what pytest reads the fixtures from
            parameters=[*signature.parameters.values(), parameter], return_annotation=None
        )
        decorated: Callable[..., None] = pytest.mark.parametrize("loop_name", names)(run)
        return decorated

    return decorate


def run_on(loop_name: str, test: Callable[[], Coroutine[Any, Any, None]], *, timeout_s: float = TEST_TIMEOUT_S) -> None:
    """Run one coroutine function on the loop of that name, bounded."""
    if loop_name != "asyncio":
        pytest.importorskip(loop_name)
    backend, options = _LOOPS[loop_name]

    async def bounded() -> None:
        with anyio.fail_after(timeout_s):
            await test()

    anyio.run(bounded, backend=backend, backend_options=options)


asyncio_and_trio = on_loops("asyncio", "trio")
asyncio_and_uvloop = on_loops("asyncio", "uvloop")
every_loop = on_loops("asyncio", "uvloop", "trio")


async def eventually(is_so: Callable[[], object], what: str, *, within_s: float = 10.0) -> None:
    """Return as soon as `is_so` is true; fail, saying `what` was waited for, when it is not in time."""
    with anyio.move_on_after(within_s):
        while not is_so():  # noqa: ASYNC110  # what is waited for has no event, or lies in another process
            await anyio.sleep(0.002)
        return
    pytest.fail(f"not within {within_s} s: {what}")


async def until(ask: Callable[[], Awaitable[_T]], is_so: Callable[[_T], object], *, within_s: float = 10.0) -> _T:
    """Ask again and again until the answer is as it should be, and return it; fail with the last answer otherwise."""
    answer = await ask()
    with anyio.move_on_after(within_s):
        while not is_so(answer):
            await anyio.sleep(0.002)
            answer = await ask()
        return answer
    pytest.fail(f"not within {within_s} s; the last answer was {answer!r}")
