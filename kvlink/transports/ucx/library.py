"""Find libucp, open it once, and say what it can do.

A process must hold one libucp at most: a second copy has its own workers and its own hooks on the allocator, and a
handle of one given to the other hangs or crashes. So the search goes from what is certain to what is likely:

1. the path or name that the caller asks for;
2. a libucp that is in the process already, whoever brought it;
3. the system's, where this host has an RDMA device (the wheel is built without verbs);
4. the ``libucx`` wheel, opened by its own loader, so that packages that use that loader later find the same copy;
5. the system's, where there is no wheel.

What was opened stays open for the life of the process, as every shared library that starts threads must.
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvlink.errors import FeatureNotEnabledError, LinkError
from kvlink.transports.ucx import declarations as ucp

SONAME: Final = "libucp.so.0"
OLDEST: Final = (1, 16)
"""Older releases lack what kvlink relies on, and crash when they meet newer ones."""
ONE_SIDED: Final = (1, 19)
"""From here on CMA serves endpoints that survive the death of their peer; before, UCX imitates it by messages."""

_SIGNALS: Final = (signal.SIGHUP, signal.SIGILL, signal.SIGBUS, signal.SIGFPE, signal.SIGSEGV, signal.SIGABRT)
_SIGACTION_NBYTES: Final = 512
"""More than ``struct sigaction`` takes anywhere."""

INSTALL: Final = (
    "install UCX: `pip install 'kvlink[ucx]'` for one host; on hosts with RDMA `pip install cffi`, and UCX 1.16 or "
    "newer of the system (DOCA/OFED, HPC-X, conda-forge or the distribution)"
)


class Version(NamedTuple):
    """A release of UCX."""

    major: int
    minor: int
    patch: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}"


@dataclass(frozen=True, slots=True)
class Library:
    """An opened libucp.

    Attributes:
        ffi, api: cffi's view of it: types and functions.
        libc: the three functions of the C library that read what UCX prints.
        path: the file.
        origin: how it was found: ``"asked for"``, ``"in the process already"``, ``"system"`` or ``"wheel"``.
    """

    ffi: Any
    api: Any
    libc: Any
    path: str
    origin: str
    version: Version

    def describe_status(self, status: int) -> str:
        """Return UCX's own words for a status."""
        return str(self.ffi.string(self.api.ucs_status_string(status)).decode())

    def check(self, status: int, doing: str) -> None:
        """Raise `LinkError` for a status that is an error."""
        if status != ucp.OK:
            raise LinkError(f"UCX {self.version} failed at {doing}: {self.describe_status(status)}")

    def printed(self, print_to: Callable[[Any], None]) -> str:
        """Return what a function of UCX prints to the ``FILE *`` that it is given."""
        ffi, libc = self.ffi, self.libc
        buffer, nbytes = ffi.new("char **"), ffi.new("size_t *")
        stream = libc.open_memstream(buffer, nbytes)
        if not stream:
            raise MemoryError("open_memstream")
        try:
            print_to(stream)
        finally:
            libc.fclose(stream)
        try:
            return bytes(ffi.buffer(buffer[0], nbytes[0])).decode(errors="replace")
        finally:
            libc.free(buffer[0])


class Device(NamedTuple):
    """One way out of this process that UCX has found: ``rc_mlx5`` over ``mlx5_0:1``, ``cma`` over ``memory``."""

    transport: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UcxReport:
    """What there is of UCX on this host; a plain value, for people and programs to read.

    Args:
        problem: why UCX cannot be used, empty where it can.
        remedy: what to do about it.
        version, path, origin: of the library; see `Library`.
        configure_line: how it was built, empty where the library does not say.
        has_verbs: whether it can use RDMA devices at all.
        is_one_sided: whether this release serves one host without the peer's help.
        devices: what it has found.
        rdma_devices: what the kernel has, whether or not UCX can use it.
    """

    problem: str = ""
    remedy: str = ""
    version: str = ""
    path: str = ""
    origin: str = ""
    configure_line: str = ""
    has_verbs: bool = False
    is_one_sided: bool = False
    devices: tuple[Device, ...] = ()
    rdma_devices: tuple[str, ...] = ()

    @property
    def is_usable(self) -> bool:
        """Whether a cluster of this host can offer UCX."""
        return not self.problem

    @property
    def transports(self) -> tuple[str, ...]:
        """The names of UCX's transports that have a device here."""
        return tuple(dict.fromkeys(device.transport for device in self.devices))


_lock = threading.Lock()
_loaded: Library | None = None


def load(path: str | None = None) -> Library:
    """Open libucp, or return what was opened before.

    Args:
        path: a file or a soname; None for the search order above.

    Raises:
        FeatureNotEnabledError: there is none, it is too old, or another one is in the process already; and what to do.
    """
    global _loaded
    with _lock:
        if _loaded is None:
            _loaded = _open(path)
        elif path is not None and not _is_same(path, _loaded.path):
            raise FeatureNotEnabledError(
                f"this process uses the libucp at {_loaded.path} ({_loaded.origin}); a second one, {path}, would make "
                "both of them fail: set the path before UCX is used for the first time"
            )
        return _loaded


def rdma_devices(root: Path = Path("/sys/class/infiniband")) -> tuple[str, ...]:
    """Return the names of the RDMA devices that the kernel has."""
    with suppress(OSError):
        return tuple(sorted(entry.name for entry in root.iterdir()))
    return ()


def probe(path: str | None = None, *, devices_root: Path = Path("/sys/class/infiniband")) -> UcxReport:
    """Open libucp and ask it what it finds. Slow (up to a second), and as safe as UCX is: best in a child process.

    Never raises for a host without UCX; the report says what is wrong.
    """
    kernel = rdma_devices(devices_root)
    try:
        library = load(path)
    except FeatureNotEnabledError as exc:
        return UcxReport(problem=str(exc), remedy=INSTALL, rdma_devices=kernel)
    configure_line = read_configure_line(library.path)
    devices: tuple[Device, ...] = ()
    problem = remedy = ""
    try:
        devices = find_devices(library)
    except LinkError as exc:
        problem, remedy = str(exc), "run `ucx_info -d` of the same UCX to see why"
    transports = {device.transport for device in devices}
    has_verbs = any(name.startswith(("rc", "dc", "ud", "srd", "gga")) for name in transports) or (
        bool(configure_line) and "--without-verbs" not in configure_line and not kernel
    )
    if kernel and not has_verbs and not problem:
        remedy = (
            f"this UCX cannot use {', '.join(kernel)}: install one with verbs (DOCA/OFED, HPC-X, conda-forge or the "
            "distribution), or name it with UcxConfig.library_path"
        )
    return UcxReport(
        problem=problem,
        remedy=remedy,
        version=str(library.version),
        path=library.path,
        origin=library.origin,
        configure_line=configure_line,
        has_verbs=has_verbs,
        is_one_sided=library.version[:2] >= ONE_SIDED,
        devices=devices,
        rdma_devices=kernel,
    )


def find_devices(library: Library) -> tuple[Device, ...]:
    """Return what a context without any restriction finds, in UCX's own order.

    Raises:
        LinkError: UCX makes no context.
    """
    ffi, api = library.ffi, library.api
    config = ffi.new("ucp_config_t **")
    library.check(api.ucp_config_read(ffi.NULL, ffi.NULL, config), "reading its configuration")
    params = ffi.new("ucp_params_t *")
    params.field_mask, params.features = ucp.PARAM_FEATURES, ucp.FEATURE_RMA
    context = ffi.new("ucp_context_h *")
    try:
        for name, value in (("TLS", "all"), ("NET_DEVICES", "all"), ("LOG_LEVEL", "fatal")):
            api.ucp_config_modify(config[0], name.encode(), value.encode())
        library.check(api.ucp_init_version(*library.version[:2], params, config[0], context), "making a context")
    finally:
        api.ucp_config_release(config[0])
    try:
        text = library.printed(lambda stream: api.ucp_context_print_info(context[0], stream))
    finally:
        api.ucp_cleanup(context[0])
    found = re.findall(r"resource\s+\d+\s*:.*--\s*(\S+?)/(\S+)", text)
    return tuple(Device(transport, name) for transport, name in found)


def read_configure_line(path: str) -> str:
    """Return how the library was configured; empty where nothing says so.

    The library itself does not know; the program ``ucx_info`` that is built with it holds the text, and is not run.
    """
    folder = Path(path).resolve().parent
    for place in (folder, *folder.parents[:3]):
        with suppress(OSError):
            content = (place / "bin" / "ucx_info").read_bytes()
            found = re.search(rb'--[^"\x00-\x1f\x7f-\xff]*--prefix=[^"\x00-\x1f\x7f-\xff]*', content)
            return found[0].decode() if found else ""
    return ""


def _open(path: str | None) -> Library:
    if importlib.util.find_spec("cffi") is None:
        raise FeatureNotEnabledError(f"UCX needs the Python package cffi, which is not installed; {INSTALL}")
    import cffi

    ffi = cffi.FFI()
    ffi.cdef(ucp.DECLARATIONS)
    libc_ffi = cffi.FFI()
    libc_ffi.include(ffi)
    libc_ffi.cdef(ucp.LIBC_DECLARATIONS)
    libc = libc_ffi.dlopen(None)
    with _kept_signals(libc_ffi, libc):
        api, origin = _find(ffi, path)
    try:
        numbers = [ffi.new("unsigned *") for _ in range(3)]
        api.ucp_get_version(*numbers)
        version = Version(*(int(number[0]) for number in numbers))
    except AttributeError as exc:
        raise FeatureNotEnabledError(f"what was opened ({path}) is no libucp: {exc}; {INSTALL}") from exc
    mapped = _mapped_copies()
    if version[:2] < OLDEST:
        raise FeatureNotEnabledError(
            f"UCX {version} ({origin}) is too old; kvlink needs {'.'.join(map(str, OLDEST))} or newer: {INSTALL}"
        )
    if len(mapped) > 1:
        raise FeatureNotEnabledError(
            f"this process holds {len(mapped)} copies of libucp ({', '.join(mapped)}), which makes both of them fail; "
            "let one package bring UCX, or load kvlink's first"
        )
    return Library(ffi, api, libc, mapped[0] if mapped else str(path or SONAME), origin, version)


@contextmanager
def _kept_signals(ffi: Any, libc: Any) -> Iterator[None]:
    """Undo what loading UCX does to the process's signals: it takes SIGHUP, and before 1.20 SIGSEGV and others too."""
    kept = {number: ffi.new("char[]", _SIGACTION_NBYTES) for number in _SIGNALS}
    for number, action in kept.items():
        libc.sigaction(number, ffi.NULL, action)
    try:
        yield
    finally:
        for number, action in kept.items():
            libc.sigaction(number, action, ffi.NULL)


def _find(ffi: Any, path: str | None) -> tuple[Any, str]:
    """Open one libucp and say how it was found."""
    if path is not None:
        api = _try(ffi, path)
        if api is None:
            raise FeatureNotEnabledError(f"there is no libucp at {path}, or it cannot be loaded; {INSTALL}")
        return api, "asked for"
    for name in (SONAME, *_mapped_copies()):
        api = _try(ffi, name, os.RTLD_NOLOAD)
        if api is not None:
            return api, "in the process already"
    if rdma_devices():
        api = _try(ffi, SONAME)
        if api is not None:
            return api, "system"
    if importlib.util.find_spec("libucx") is not None:
        import libucx

        libucx.load_library()
        api = _try(ffi, SONAME, os.RTLD_NOLOAD)
        if api is not None:
            return api, "wheel"
    api = _try(ffi, SONAME)
    if api is None:
        raise FeatureNotEnabledError(f"there is no libucp on this host; {INSTALL}")
    return api, "system"


def _try(ffi: Any, name: str, flags: int = 0) -> Any | None:
    with suppress(OSError):
        return ffi.dlopen(name, os.RTLD_NOW | flags)
    return None


def _mapped_copies() -> list[str]:
    """Return the files of every libucp in this process."""
    paths: dict[str, None] = {}
    with suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and os.path.basename(fields[5]).startswith("libucp.so"):
                paths[fields[5]] = None
    return list(paths)


def _is_same(path: str, loaded: str) -> bool:
    if os.sep not in path:
        return path == os.path.basename(loaded) or path == SONAME
    return os.path.realpath(path) == os.path.realpath(loaded)
