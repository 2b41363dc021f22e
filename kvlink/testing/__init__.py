"""Faults on purpose: wrap a cluster's transport and see what the program around it does when completions misbehave.

::

    from kvlink.testing import Faults, FaultyTransport

    faults = Faults(seed=7, delay=0.3, drop=0.01)
    cluster = kv.Cluster(..., wrap_transport=lambda transport: FaultyTransport(transport, faults))

Nothing here is for production, and nothing here needs a test framework.
"""

from kvlink.testing.faults import Fault, Faults
from kvlink.testing.transport import FaultyEndpoint, FaultyTransport

__all__ = ["Fault", "Faults", "FaultyEndpoint", "FaultyTransport"]
