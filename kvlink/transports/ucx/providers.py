"""Handles of UCX that somebody else has made: ucx-py's, ucxx's, or any pair of a context and a worker.

kvlink then issues its gets and puts on that worker, with endpoints of its own, and leaves the rest to its owner: how it
was set up, its wake-ups, its end. While something of kvlink's is in flight, kvlink's thread lets the worker progress as
well, since only some owners do so at all times; that takes a worker that several threads may use, as both packages make
them. A context without RMA cannot be told from one with it, and crashes: both packages ask for RMA.

Neither package is the default: ucx-py was given up by its makers in 2025 and is on no registry, neither has get and put
in its public functions, and both set UCX up for messages, where an endpoint that survives its peer is served over TCP.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import NamedTuple

from kvlink.errors import FeatureNotEnabledError, ParameterTypeError


class Handles(NamedTuple):
    """A context and a worker of UCX, as addresses.

    Args:
        context, worker: of ``ucp_context_h`` and ``ucp_worker_h``.
        keep: what must live as long as they are used.
    """

    context: int
    worker: int
    keep: object = None


def find_handles(provider: object) -> Handles:
    """Return the handles of a provider, which a package that is named makes where it has none yet.

    Must run on the event loop, where both packages want to be used.

    Raises:
        FeatureNotEnabledError: the package is not installed.
        ParameterTypeError: it is neither a known name nor an object with both handles.
    """
    if provider == "ucxx":
        return _of_package("ucxx", "ucxx.core", "pip install 'kvlink[ucxx]'")
    if provider == "ucx-py":
        return _of_package("ucp", "ucp.core", "build ucx-py 0.45 from its source; see the README")
    context, worker = getattr(provider, "context", None), getattr(provider, "worker", None)
    if not (isinstance(context, int) and isinstance(worker, int) and context > 0 and worker > 0):
        raise ParameterTypeError(
            f"ucx.provider must be a name or an object with the integers context and worker, got {provider!r}"
        )
    return Handles(context, worker, provider)


def _of_package(package: str, module: str, remedy: str) -> Handles:
    if importlib.util.find_spec(package) is None:
        raise FeatureNotEnabledError(f"ucx.provider asks for {package}, which is not installed: {remedy}")
    application = importlib.import_module(module)._get_ctx()
    return Handles(int(application.context.handle), int(application.worker.handle), application)
