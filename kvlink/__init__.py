"""Move KV caches between serving processes: awaitable, one-sided, zero-copy on one host.

Start with `Cluster`; its `kv_cache_manager` has the KV-cache functions.
"""

import logging

from kvlink.caches.arrivals import Arrivals, LayerWatch
from kvlink.caches.kvcache import KvCache
from kvlink.caches.tickets import Ticket
from kvlink.cluster import Cluster
from kvlink.config import ClusterConfig, ClusterInfo
from kvlink.errors import (
    CacheNotFoundError,
    ClosedError,
    FeatureNotEnabledError,
    HandshakeError,
    KVLinkError,
    LinkBusyError,
    LinkError,
    LinkExistsError,
    LinkLostError,
    ListenError,
    MismatchError,
    NotLinkedError,
    OutOfMemoryError,
    ParameterError,
    ParameterTypeError,
    ParameterValueError,
    PartialLinkLostError,
    PartialNotLinkedError,
    PartialTimeoutError,
    PartialTransferError,
    PartialTransportError,
    ProtocolError,
    RoleError,
    StatusCode,
    TicketError,
    TransferTimeoutError,
    TransportError,
)
from kvlink.geometry import CacheDesc, DataType, Placement, Role
from kvlink.keys import ABSENT, BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex
from kvlink.links.events import LinkChange, LinkEventStream, LinkLost, LinkUp, PeerRestarted
from kvlink.links.link import Link
from kvlink.links.notifications import Notification, NotificationStream
from kvlink.links.state import LinkState
from kvlink.report import BlockFailure, LinkResult, LinkResults, TransferReport
from kvlink.stats import LinkStats, PoolUsage
from kvlink.tokens import TicketEnding, TicketOutcome
from kvlink.transfers.heldtickets import HeldTicket
from kvlink.transfers.layerconfig import (
    LayerSynchronizer,
    TransferConfig,
    TransferWithCacheKeyConfig,
    TransferWithTicketConfig,
)
from kvlink.transfers.layerwise import CacheTask
from kvlink.transfers.manager import KvCacheManager
from kvlink.transfers.prepared import PreparedPull, PreparedPush
from kvlink.transports.ucx.providers import Handles as UcxHandles
from kvlink.ucxconfig import UcxConfig

__version__ = "0.1.0"

__all__ = [
    "ABSENT",
    "Arrivals",
    "BlockFailure",
    "BlocksCacheKey",
    "CacheDesc",
    "CacheKey",
    "CacheKeyByIdAndIndex",
    "CacheNotFoundError",
    "CacheTask",
    "ClosedError",
    "Cluster",
    "ClusterConfig",
    "ClusterInfo",
    "DataType",
    "FeatureNotEnabledError",
    "HandshakeError",
    "HeldTicket",
    "KVLinkError",
    "KvCache",
    "KvCacheManager",
    "LayerSynchronizer",
    "LayerWatch",
    "Link",
    "LinkBusyError",
    "LinkChange",
    "LinkError",
    "LinkEventStream",
    "LinkExistsError",
    "LinkLost",
    "LinkLostError",
    "LinkResult",
    "LinkResults",
    "LinkState",
    "LinkStats",
    "LinkUp",
    "ListenError",
    "MismatchError",
    "NotLinkedError",
    "Notification",
    "NotificationStream",
    "OutOfMemoryError",
    "ParameterError",
    "ParameterTypeError",
    "ParameterValueError",
    "PartialLinkLostError",
    "PartialNotLinkedError",
    "PartialTimeoutError",
    "PartialTransferError",
    "PartialTransportError",
    "PeerRestarted",
    "Placement",
    "PoolUsage",
    "PreparedPull",
    "PreparedPush",
    "ProtocolError",
    "Role",
    "RoleError",
    "StatusCode",
    "Ticket",
    "TicketEnding",
    "TicketError",
    "TicketOutcome",
    "TransferConfig",
    "TransferReport",
    "TransferTimeoutError",
    "TransferWithCacheKeyConfig",
    "TransferWithTicketConfig",
    "TransportError",
    "UcxConfig",
    "UcxHandles",
    "__version__",
]

logging.getLogger(__name__).addHandler(logging.NullHandler())
