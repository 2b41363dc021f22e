"""Settings: one frozen value per cluster, checked when it is made. The only module that reads the environment."""

from __future__ import annotations

import ipaddress
import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from types import NoneType
from typing import Final

from kvlink.errors import ParameterTypeError, ParameterValueError
from kvlink.geometry import Role, check_int
from kvlink.ucxconfig import BOOLEANS, UcxConfig

_SIZE = re.compile(r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*(B|KB|MB|GB|TB|KIB|MIB|GIB|TIB)?\s*", re.IGNORECASE | re.ASCII)
_UNITS: Final = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


_MIN_SECRET_NBYTES: Final = 16
_MAX_SECRET_NBYTES: Final = 4096
_MAX_PATH_NBYTES: Final = 107
"""``sun_path`` has 108, the last one for a NUL."""


def parse_nbytes(size: int | str, name: str = "size") -> int:
    """Return a size in bytes from an int or from text such as ``"2GiB"`` (1024s) or ``"500 MB"`` (1000s)."""
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        if match is None:
            raise ParameterValueError(f"{name} must be a number of bytes such as 1073741824 or '1GiB', got {size!r}")
        size = int(Fraction(match[1]) * _UNITS[(match[2] or "B").upper()])
    return check_int(name, size, 1, 2**62)


@dataclass(frozen=True, slots=True)
class ClusterInfo:
    """Whom to link to.

    Args:
        cluster_id: the peer's id; the peer must prove to be it.
        address: what the peer prints as `Cluster.address`: ``"host:port"``, ``"[::1]:port"`` or ``"unix:/path"``.
    """

    cluster_id: int
    address: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "cluster_id", check_int("cluster_id", self.cluster_id, 0, 2**64 - 1))
        address = parse_address(self.address)
        if not address.path and not address.port:
            raise ParameterValueError(f"port 0 cannot be dialled: take what the peer's `address` says, not {address}")


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed address: TCP (`host`, `port`) or a Unix socket (`path`)."""

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: object) -> Address:
    """Return the address that ``"host:port"``, ``"[v6]:port"`` or ``"unix:/path"`` names."""
    if not isinstance(text, str):
        raise ParameterTypeError(f"an address is text such as '127.0.0.1:7000', got {text!r}")
    if text.startswith("unix:"):
        if len(text) == len("unix:"):
            raise ParameterValueError("a Unix address needs a path: 'unix:/run/kvlink.sock'")
        return Address(path=_check_path(text[len("unix:") :]))
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ParameterValueError(f"an IPv6 address is written in brackets, '[{host}]:{port}'; got {text!r}")
    if (
        set("[]") & set(host)
        or not colon
        or not host
        or not port.isascii()
        or not port.isdigit()
        or len(port) > 5
        or int(port) > 65535
    ):
        raise ParameterValueError(f"an address is 'host:port', '[v6]:port' or 'unix:/path'; got {text!r}")
    try:
        is_host = host.isprintable() and " " not in host and bool(host.encode("idna"))
    except UnicodeError:  # an empty label, one that is too long, half a character
        is_host = False
    if not is_host:
        raise ParameterValueError(f"{host!r} is no name or address of a host; got {text!r}")
    return Address(host=host, port=int(port))


def _check_path(path: str) -> str:
    try:
        nbytes = len(os.fsencode(path))
    except UnicodeError:
        nbytes = 0
    if not 0 < nbytes <= _MAX_PATH_NBYTES or "\0" in path:
        raise ParameterValueError(
            f"the path of a Unix socket has 1 to {_MAX_PATH_NBYTES} bytes and no NUL; got {'unix:' + path!r}"
        )
    return path


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """How a cluster behaves. Every field has a default that suits one host and a small deployment.

    Args:
        operation_timeout_s: deadline of a pull, push or look-up that was given none. 30 s moves 30 GiB at 1 GiB/s,
            and is short enough for a request to be retried elsewhere.
        link_timeout_s: deadline of linking and unlinking that were given none; 3 s as in the spec.
        handshake_timeout_s: a connection that has not said who it is by then is closed.
        liveness_s: a silent peer on another host counts as dead after this. On one host the kernel tells at once.
        relink_min_s, relink_max_s: first and longest wait between two attempts to link again (``relink=True``); each
            is twice the one before, and a random part of up to one half is taken off. 0.1 s is the time a process needs
            to start; every 5 s a peer that stays away costs one refused connection.
        max_relinks: attempts to link again that are in flight at the same time.
        close_timeout_s: how long closing waits for what is in flight and for the goodbye to be sent.
        inline_nbytes: a transfer up to this size is copied on the event loop: 256 KiB take about 50 us, less than
            handing it to a thread and being woken.
        chunk_nbytes: piece that a copy thread moves between two looks for cancellation: 4 MiB take about 0.5 ms. One
            contiguous row that is much longer goes in larger pieces where that is faster, see `streaming_nbytes`.
        copy_threads: threads that copy; 0 means one per core but one, at most 4, where memory bandwidth is exhausted.
            The core that is left keeps the event loop free: with a thread on each of 2 busy cores a 1 ms ticker was up
            to 28 ms late (p99) during a 1 GiB pull, with one thread 6 ms. With 2 threads such a pull takes 0.7 times
            as long where the second core is idle.
        max_caches: caches and tickets that can live at once; each costs 8 bytes.
        max_frame_nbytes: largest control message accepted from a peer that has said who it is.
        max_links: links at once; 512 as in the spec.
        max_notification_nbytes: largest payload of a notification, sent or taken; at most 128 KiB.
        max_notifications: notifications of all peers that wait for the application; beyond that senders are told that
            this cluster is busy. Each link has at most 32 of them.
        max_clusters_per_call: clusters in one link or unlink call; 16 as in the spec.
        max_operations_per_link, max_operations: pulls and pushes at a time, to one peer and in all; more wait for their
            turn, which their deadlines cover. Each holds a lease of its peer's: 256 keep any link busy, and stay far
            below the leases that a peer gives.
        max_nbytes_in_flight_per_link, max_nbytes_in_flight: bytes in the hands of transports at a time. An operation
            counts with its size, at most with what its transport moves at a time: over shared memory, a chunk for each
            copy thread. What counts with more than the limit runs alone. 256 MiB are 5 ms of the fastest network.
        max_leases_per_link: read leases that one peer may hold of ours, 8 bytes and 0.5 KB of bookkeeping each; four
            times what a peer with our own limits needs. More are refused. All peers together get at most half of
            `max_caches`.
        max_detour_nbytes_per_link: room in our pool that one peer gets at a time, to reach registered memory of ours
            that the kernel hides from it; all peers together get twice as much. 0 means a quarter of the pool: half of
            it stays for our own caches whatever peers do. More is refused.
        is_prefaulted: enter the pages of pools, ours and peers', into the page table before they are used. Costs 0.25 s
            per GiB at start; saves up to 1.5 s per GiB at the first use.
        has_huge_pages: make pools of 2 MiB pages, which the host must have set aside (``vm.nr_hugepages``).
        numa_node: take pools from this NUMA node only; None for the kernel's choice.
        permit_peer_access: let other processes copy registered memory of this one where the Yama module restricts that:
            ``"peer"`` the process that was last linked to and uses registered memory, ``"any"`` every process of this
            user, None (the default) nobody. It also lets them trace this process, hence it is never done unasked.
        secret: who does not have the same one cannot link, and learns nothing about this cluster; at least 16 bytes,
            best ``secrets.token_bytes(32)``. It never travels and is in no repr or log. It neither hides nor protects
            what is said over a link; TLS does. From the environment it comes as a file, ``KVLINK_SECRET_FILE``.
        tls_server: TLS for the connections that come in over TCP; with ``verify_mode = CERT_REQUIRED`` also a proof of
            who the dialler is. None for no TLS.
        tls_client: TLS for the connections that this cluster dials over TCP; it says which certificates are trusted.
        allowed_uids: users besides our own whose processes may link over a Unix socket and share memory.
        allow_unauthenticated: let anybody who reaches a non-loopback address link, with neither a secret nor a
            certificate.
        transports: what may move the bytes of a link, best first: ``"shm"``, ``"ucx"``. A link takes the first that
            reaches the peer. None for shm, and for ucx where this host has an RDMA device and a UCX to use it.
        ucx: how UCX is used; see `UcxConfig`.
    """

    operation_timeout_s: float = 30.0
    link_timeout_s: float = 3.0
    handshake_timeout_s: float = 5.0
    liveness_s: float = 5.0
    relink_min_s: float = 0.1
    relink_max_s: float = 5.0
    max_relinks: int = 32
    close_timeout_s: float = 2.0
    inline_nbytes: int = 256 * 1024
    chunk_nbytes: int = 4 * 1024 * 1024
    copy_threads: int = 0
    max_caches: int = 65536
    max_frame_nbytes: int = 8 * 1024 * 1024
    max_links: int = 512
    max_notification_nbytes: int = 64 * 1024
    max_notifications: int = 4096
    max_clusters_per_call: int = 16
    max_operations_per_link: int = 256
    max_operations: int = 2048
    max_nbytes_in_flight_per_link: int = 256 * 1024 * 1024
    max_nbytes_in_flight: int = 1024 * 1024 * 1024
    max_leases_per_link: int = 1024
    max_detour_nbytes_per_link: int = 0
    is_prefaulted: bool = True
    has_huge_pages: bool = False
    numa_node: int | None = None
    permit_peer_access: str | None = None
    secret: bytes | None = field(default=None, repr=False)
    tls_server: ssl.SSLContext | None = None
    tls_client: ssl.SSLContext | None = None
    allowed_uids: tuple[int, ...] = ()
    allow_unauthenticated: bool = False
    transports: tuple[str, ...] | None = None
    ucx: UcxConfig = field(default_factory=UcxConfig)

    def __post_init__(self) -> None:
        for name in (
            "operation_timeout_s",
            "link_timeout_s",
            "handshake_timeout_s",
            "liveness_s",
            "close_timeout_s",
            "relink_min_s",
            "relink_max_s",
        ):
            check_seconds(name, getattr(self, name))
        for name, lowest, highest in (
            ("inline_nbytes", 0, 2**40),
            ("chunk_nbytes", 4096, 2**40),
            ("copy_threads", 0, 256),
            ("max_caches", 1, 2**24),
            ("max_frame_nbytes", 4 * 65536, 2**30),
            ("max_notification_nbytes", 1, 2 * 65536),
            ("max_notifications", 1, 2**20),
            ("max_links", 1, 2**20),
            ("max_relinks", 1, 2**20),
            ("max_clusters_per_call", 1, 2**20),
            ("max_operations_per_link", 1, 2**24),
            ("max_operations", 1, 2**24),
            ("max_nbytes_in_flight_per_link", 1, 2**50),
            ("max_nbytes_in_flight", 1, 2**50),
            ("max_leases_per_link", 1, 2**24),
            ("max_detour_nbytes_per_link", 0, 2**50),
        ):
            check_int(name, getattr(self, name), lowest, highest)
        for name in ("is_prefaulted", "has_huge_pages", "allow_unauthenticated"):
            if not isinstance(getattr(self, name), bool):
                raise ParameterTypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.numa_node is not None:
            check_int("numa_node", self.numa_node, 0, 1023)
        transports = self.transports
        if transports is not None and not (
            isinstance(transports, tuple) and all(isinstance(t, str) for t in transports)
        ):
            raise ParameterTypeError(f"transports must be a tuple of names or None, got {self.transports!r}")
        if self.transports is not None and (not self.transports or not set(self.transports) <= {"shm", "ucx"}):
            raise ParameterValueError(f"transports must be of 'shm' and 'ucx', got {self.transports!r}")
        if not isinstance(self.ucx, UcxConfig):
            raise ParameterTypeError(f"ucx must be a UcxConfig, got {self.ucx!r}")
        permit = self.permit_peer_access
        if permit is not None and not (isinstance(permit, str) and permit in ("peer", "any")):
            raise ParameterValueError(
                f"permit_peer_access must be None, 'peer' or 'any', got {self.permit_peer_access!r}"
            )
        self._check_secret()
        for name in ("tls_server", "tls_client"):
            if not isinstance(getattr(self, name), (ssl.SSLContext, NoneType)):
                raise ParameterTypeError(f"{name} must be an ssl.SSLContext or None, got {getattr(self, name)!r}")
        if not isinstance(self.allowed_uids, tuple):
            raise ParameterTypeError(f"allowed_uids must be a tuple of user ids, got {self.allowed_uids!r}")
        for uid in self.allowed_uids:
            check_int("a user id in allowed_uids", uid, 0, 2**32 - 1)

    def _check_secret(self) -> None:
        """Refuse what is no secret, without showing it."""
        if self.secret is None:
            return
        if not isinstance(self.secret, bytes):
            raise ParameterTypeError(f"secret must be bytes or None, got {type(self.secret).__name__}")
        if not _MIN_SECRET_NBYTES <= len(self.secret) <= _MAX_SECRET_NBYTES:
            raise ParameterValueError(
                f"secret must have {_MIN_SECRET_NBYTES} to {_MAX_SECRET_NBYTES} bytes, so that it cannot be guessed; "
                f"this one has {len(self.secret)}: use secrets.token_bytes(32)"
            )

    @property
    def num_copy_threads(self) -> int:
        """How many copy threads that is on this machine."""
        return self.copy_threads or max(1, min(4, len(os.sched_getaffinity(0)) - 1))

    @property
    def has_authentication(self) -> bool:
        """Whether who comes in over TCP must prove something: that it knows the secret, or owns a certificate."""
        return self.secret is not None or (
            self.tls_server is not None and self.tls_server.verify_mode is ssl.CERT_REQUIRED
        )

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> ClusterConfig:
        """Return the defaults, overridden by variables such as ``KVLINK_OPERATION_TIMEOUT_S``; others are ignored.

        The secret is read from the file that ``KVLINK_SECRET_FILE`` names, without the line's end.

        Raises:
            ParameterError: a value is not acceptable, or the secret itself stands in the environment.
        """
        environ = os.environ if environ is None else environ
        config = cls(ucx=UcxConfig.from_environ(environ))
        for setting in fields(cls):
            variable = f"KVLINK_{setting.name.upper()}"
            if setting.name == "secret":
                config = replace(config, secret=_read_secret(environ))
            elif variable in environ and setting.name != "ucx" and not setting.name.startswith("tls_"):
                try:
                    value = _parse_setting(setting.name, environ[variable])
                except (ValueError, KeyError):
                    raise ParameterValueError(
                        f"{variable} must be a number, or yes or no; got {environ[variable]!r}"
                    ) from None
                config = replace(config, **{setting.name: value})  # type: ignore[arg-type]  # checked by __post_init__
        return config


def _parse_setting(name: str, text: str) -> object:
    if name == "permit_peer_access":
        return text
    if name == "transports":
        return tuple(text.split(","))
    if name == "allowed_uids":
        return tuple(int(uid) for uid in text.split(","))
    if name.startswith(("is_", "has_", "allow_")):
        return BOOLEANS[text.lower()]
    return float(text) if name.endswith("_s") else int(text)


def _read_secret(environ: Mapping[str, str]) -> bytes | None:
    if "KVLINK_SECRET" in environ:
        raise ParameterValueError("KVLINK_SECRET would show the secret to others: name a file in KVLINK_SECRET_FILE")
    path = environ.get("KVLINK_SECRET_FILE")
    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            return file.read(_MAX_SECRET_NBYTES + 2).rstrip(b"\r\n")
    except OSError as exc:
        raise ParameterValueError(f"KVLINK_SECRET_FILE: cannot read {path!r}: {exc.strerror}") from exc


def check_seconds(name: str, value: object) -> float:
    """Return a duration in seconds; refuse what is not a positive finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ParameterTypeError(f"{name} must be a number of seconds, got {value!r}")
    if not 0 < value < 10**9:
        raise ParameterValueError(f"{name} must be positive and finite, got {value!r}")
    return float(value)


def check_listen(address: str, config: ClusterConfig) -> None:
    """Refuse to listen where others than this host's processes can dial, unless they must prove something.

    A name other than ``localhost`` counts as such a place, wherever it leads.
    """
    host = parse_address(address).host
    if not host or _is_loopback(host) or config.has_authentication or config.allow_unauthenticated:
        return
    raise ParameterValueError(
        f"{address!r} is reachable from other hosts, and whoever reaches it could read and write this cluster's "
        "caches: set ClusterConfig.secret, or tls_server with CERT_REQUIRED, or, where the network itself keeps "
        "strangers out, allow_unauthenticated=True"
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def default_listen(role: Role) -> str | None:
    """Return where a role listens unless told otherwise: loopback, any free port; a DECODER only dials."""
    return None if role is Role.DECODER else "127.0.0.1:0"
