"""Settings of the UCX transport: one frozen value, checked when it is made, applied to one UCX context each time.

Nothing here is written to the environment, which other users of UCX in the same process share. What came of it can be
read back: `Link.settings` of a link over UCX.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final

from kvlink.errors import ParameterTypeError, ParameterValueError
from kvlink.geometry import check_int

PROVIDERS: Final = ("own", "ucxx", "ucx-py")
BOOLEANS: Final = {"1": True, "yes": True, "true": True, "0": False, "no": False, "false": False}
"""How a setting that is on or off is written in a variable of the environment, in any case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UcxConfig:
    """How a cluster uses UCX.

    Args:
        transports: UCX's own names, such as ``("rc", "cma")``; None for what serves get and put without the peer's
            help: ``posix`` and ``cma`` for one host, ``rc``, ``dc`` and ``ud`` where there are RDMA devices, ``tcp``
            where `allow_tcp` is set, and `cuda` where `allow_cuda` is.
        devices: network devices and ports to use, such as ``("mlx5_0:1",)``; empty for all.
        rails: devices that share one large get or put; 0 for UCX's own choice, which is 1.
        keepalive_s: how often an idle peer is looked after; a peer that does not answer is lost.
        traffic_class: of RoCE packets, None for UCX's own choice.
        gid_index: of RoCE ports, None for UCX's own choice.
        allow_tcp: let UCX imitate get and put over TCP. For tests and trials only: it is slow, it needs the peer's
            help, anybody who can connect can read and write the memory, and a peer that dies can take the other down.
        allow_cuda: let UCX use CUDA in this process, so that caches in device memory can be registered and moved: with
            GPUDirect RDMA between hosts, with CUDA IPC between two processes of one host. It needs an NVIDIA driver and
            a UCX of 1.21 or later that was built with CUDA; a cluster that lacks one of them does not start. Written
            after UCX's source, and not yet proved on hardware.
        library_path: the libucp to use, a file or a soname; None for the search order of `kvlink doctor`.
        progress: ``"thread"`` moves bytes in a thread; ``"loop"`` in the event loop, for RDMA, where the device copies.
        provider: whose context and worker are used: ``"own"``, or those that ``"ucxx"`` or ``"ucx-py"`` have made
            in this process. An object with the integers ``context`` and ``worker`` (see `UcxHandles`) is used as it is.
            Its owner has set it up, so the fields above this one do not apply, `allow_tcp` and `library_path` excepted.
        allow_version_mismatch: link to a peer with another major or minor version of UCX. Some pairs crash.
        max_requests: gets and puts in flight at once; 512 hide the latency of any network at 16 KiB.
        max_inflight_nbytes: bytes in flight at once; bounds how long a cancellation waits.
        drain_s: how long a cancelled transfer waits for what is in flight before the link is given up.
        options: more settings of UCX, ``("NAME", "value")`` without the prefix ``UCX_``.
    """

    transports: tuple[str, ...] | None = None
    devices: tuple[str, ...] = ()
    rails: int = 0
    keepalive_s: float = 2.0
    traffic_class: int | None = None
    gid_index: int | None = None
    allow_tcp: bool = False
    allow_cuda: bool = False
    library_path: str | None = None
    progress: str = "thread"
    provider: object = "own"
    allow_version_mismatch: bool = False
    max_requests: int = 512
    max_inflight_nbytes: int = 16 * 1024 * 1024
    drain_s: float = 1.0
    options: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for name in ("transports", "devices"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, tuple) and all(_is_word(part) for part in value)):
                raise ParameterTypeError(f"ucx.{name} must be a tuple of names, got {value!r}")
        if self.transports == ():
            raise ParameterValueError("ucx.transports must name one at least; None stands for UCX's best")
        if self.transports is not None and not self.allow_tcp and _may_have_tcp(self.transports):
            raise ParameterValueError(
                f"ucx.transports {self.transports!r} has tcp, which needs ucx.allow_tcp: read there what that means"
            )
        for name, lowest, highest in (
            ("rails", 0, 64),
            ("max_requests", 64, 65536),
            ("max_inflight_nbytes", 65536, 2**40),
        ):
            check_int(f"ucx.{name}", getattr(self, name), lowest, highest)
        for name in ("traffic_class", "gid_index"):
            if getattr(self, name) is not None:
                check_int(f"ucx.{name}", getattr(self, name), 0, 255)
        for name in ("keepalive_s", "drain_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ParameterTypeError(f"ucx.{name} must be a number of seconds, got {value!r}")
            if not 0.001 <= value <= 3600:
                raise ParameterValueError(f"ucx.{name} must be between 0.001 and 3600 seconds, got {value!r}")
        for name in ("allow_tcp", "allow_cuda", "allow_version_mismatch"):
            if not isinstance(getattr(self, name), bool):
                raise ParameterTypeError(f"ucx.{name} must be True or False, got {getattr(self, name)!r}")
        if not isinstance(self.progress, str) or self.progress not in ("thread", "loop"):
            raise ParameterValueError(f"ucx.progress must be 'thread' or 'loop', got {self.progress!r}")
        if self.progress == "loop" and self.provider != "own":
            raise ParameterValueError("ucx.progress must be 'thread' with the worker of another provider")
        if self.allow_cuda and (self.allow_tcp or self.provider != "own" or self.progress != "thread"):
            raise ParameterValueError(
                "ucx.allow_cuda needs ucx.provider 'own', ucx.progress 'thread', and ucx.allow_tcp off, for nothing of "
                "a device's memory is imitated"
            )
        if self.library_path is not None and not _is_word(self.library_path):
            raise ParameterTypeError(f"ucx.library_path must be a path or None, got {self.library_path!r}")
        if isinstance(self.provider, str) and self.provider not in PROVIDERS:
            raise ParameterValueError(f"ucx.provider must be one of {PROVIDERS} or an object, got {self.provider!r}")
        if not isinstance(self.options, tuple) or not all(
            isinstance(option, tuple) and len(option) == 2 and all(map(_is_word, option)) for option in self.options
        ):
            raise ParameterTypeError(f"ucx.options must be a tuple of (name, value), got {self.options!r}")

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> UcxConfig:
        """Return the defaults, overridden by variables such as ``KVLINK_UCX_ALLOW_TCP``; lists are cut at commas."""
        environ = os.environ if environ is None else environ
        values: dict[str, object] = {}
        for field in fields(cls):
            variable = f"KVLINK_UCX_{field.name.upper()}"
            if variable not in environ or field.name == "options":
                continue
            text = environ[variable]
            try:
                values[field.name] = _parse(field.name, text)
            except (ValueError, KeyError):
                raise ParameterValueError(f"{variable} must be a number, or yes or no; got {text!r}") from None
        return cls(**values)  # type: ignore[arg-type]  # checked by __post_init__


def _may_have_tcp(names: tuple[str, ...]) -> bool:
    """Whether UCX would use TCP for this list of its transports: by name, as one of all, or as one not left out."""
    if names[0].startswith("^"):
        return "tcp" not in {name.lstrip("^\\") for name in names}
    return any(name.lstrip("\\").startswith("tcp") or name == "all" for name in names)


def _parse(name: str, text: str) -> object:
    if name in ("transports", "devices"):
        return tuple(part for part in text.split(",") if part)
    if name in ("library_path", "progress", "provider"):
        return text
    if name.startswith("allow_"):
        return BOOLEANS[text.lower()]
    return float(text) if name.endswith("_s") else int(text)


def _is_word(value: object) -> bool:
    """Whether it is text that a C function can be given."""
    if not isinstance(value, str) or not value or "\0" in value:
        return False
    try:
        os.fsencode(value)
    except UnicodeError:
        return False
    return True
