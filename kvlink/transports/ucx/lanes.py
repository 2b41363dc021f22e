"""What the lanes of an endpoint, UCX's transports by name, say of the gets and puts over it.

What moves bytes of the host decides: a lane of CUDA moves between devices only. With CUDA allowed, two processes of one
host have ``posix``, ``cma`` and ``cuda_ipc``, two hosts ``rc_mlx5`` or the like, over which a network device reaches a
device's memory itself (GPUDirect) or not; ``cuda_copy`` and ``gdr_copy`` serve UCX inside of one process. Which of them
serves a given pair of memories UCX finds out for each transfer, and says so where none does.

Closing our endpoint fences no lane for certain, so `Capabilities.is_fenced_by_close` stays false. CMA and posix write
with no part of ours; DC has one target for all peers; TCP may keep a closed endpoint for receiving; and RC, whose queue
pair refuses writes once it is in error, gets there in some later turn, and may be connected to an endpoint that UCX
made by itself because the two sides counted their connections differently.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from kvlink.errors import FeatureNotEnabledError

_CUDA: Final = frozenset({"cuda_ipc", "cuda_copy", "gdr_copy"})
_COPYING: Final = frozenset({"posix", "sysv", "cma", "self", "knem", "xpmem"})
"""A process copies itself, with the processor it is called on."""

_IMITATING: Final = frozenset({"posix", "sysv", "self", "tcp"})
"""By themselves these have messages, or puts only, from which UCX makes the rest."""


class Service(NamedTuple):
    """What an endpoint has.

    Attributes:
        is_tcp: gets and puts are imitated, and over TCP.
        is_one_sided: host memory is read and written without the peer's help.
        is_local: no lane leaves this host. (One of CUDA can, over NVLink; that is no sign of the peer's host.)
        is_copying: a transfer of host memory is a system call of this process, and no device takes part in any.
    """

    is_tcp: bool
    is_one_sided: bool
    is_local: bool
    is_copying: bool


def judge(names: tuple[str, ...]) -> Service:
    """Return what lanes of these names have; nothing of all where UCX does not name them."""
    lanes = frozenset(names)
    is_imitated = lanes - _CUDA <= _IMITATING
    return Service(
        is_tcp=is_imitated and "tcp" in lanes,
        is_one_sided=not is_imitated,
        is_local=lanes <= _COPYING | _CUDA,
        is_copying=not is_imitated and lanes <= _COPYING,
    )


def no_way(names: tuple[str, ...]) -> FeatureNotEnabledError:
    """Return the error of a transfer with a device's memory that none of the lanes can do."""
    return FeatureNotEnabledError(
        f"UCX has no way between these two memories over {', '.join(names)}, and nothing was moved: two devices of one "
        "host need cuda_ipc, anything else with a device needs RDMA with GPUDirect (see `nvidia-smi topo -m`, and "
        "nvidia_peermem)"
    )


def only_tcp(names: tuple[str, ...]) -> FeatureNotEnabledError:
    """Return the error of a link whose lanes imitate, without leave (`UcxConfig.allow_tcp`)."""
    return FeatureNotEnabledError(
        f"UCX serves this link over {', '.join(names)}, where get and put are imitated, and a peer's death can take "
        "this process down; use RDMA or shared memory, or set UcxConfig.allow_tcp"
    )
