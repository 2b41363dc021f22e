"""Status codes and the exceptions that carry them.

Every error that kvlink raises on purpose is a `KVLinkError` with a `StatusCode`. The names and numbers of the codes are
those of LLM-DataDist (source: the spec, section 2.1), so that a serving engine's table of remedies still works. Wrong
Python types and values outside an integer's width are also `TypeError` and `ValueError` (section 1.1).
"""

from __future__ import annotations

import reprlib
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, Final

if TYPE_CHECKING:
    from kvlink.report import Interrupted, TransferReport

_BASE = 0x5010B000


class StatusCode(IntEnum):
    """The outcome of an operation. Source: the spec, section 2.1."""

    LLM_SUCCESS = 0
    LLM_FAILED = 0xFFFFFFFF
    LLM_UNKNOWN_ERROR = -1
    LLM_WAIT_PROCESS_TIMEOUT = _BASE + 1
    LLM_KV_CACHE_NOT_EXIST = _BASE + 2
    LLM_REPEAT_REQUEST = _BASE + 3
    LLM_REQUEST_ALREADY_COMPLETED = _BASE + 4
    LLM_PARAM_INVALID = _BASE + 5
    LLM_ENGINE_FINALIZED = _BASE + 6
    LLM_NOT_YET_LINK = _BASE + 7
    LLM_ALREADY_LINK = _BASE + 8
    LLM_LINK_FAILED = _BASE + 9
    LLM_UNLINK_FAILED = _BASE + 10
    LLM_NOTIFY_PROMPT_UNLINK_FAILED = _BASE + 11
    LLM_CLUSTER_NUM_EXCEED_LIMIT = _BASE + 12
    LLM_PROCESSING_LINK = _BASE + 13
    LLM_DEVICE_OUT_OF_MEMORY = _BASE + 14
    LLM_PREFIX_ALREADY_EXIST = _BASE + 15
    LLM_PREFIX_NOT_EXIST = _BASE + 16
    LLM_SEQ_LENOVERLIMIT = _BASE + 17
    LLM_NO_FREE_BLOCK = _BASE + 18
    LLM_BLOCKS_OUT_OF_MEMORY = _BASE + 19
    LLM_EXIST_LINK = _BASE + 24
    LLM_FEATURE_NOT_ENABLED = _BASE + 25
    LLM_TIMEOUT = _BASE + 26
    LLM_LINK_BUSY = _BASE + 27
    LLM_OUT_OF_MEMORY = _BASE + 28
    LLM_DEVICE_MEM_ERROR = _BASE + 1000
    LLM_SUSPECT_REMOTE_ERROR = _BASE + 1001

    def __str__(self) -> str:
        return f"StatusCode.{self.name}"

    @property
    def is_ok(self) -> bool:
        """Whether this is `LLM_SUCCESS`."""
        return self is StatusCode.LLM_SUCCESS


_SHORT: Final = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 200
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = _SHORT.maxset = 12


def shown(value: object) -> str:
    """Return what to show of a value in a message: its ``repr``, cut short. A wrong block table may be megabytes."""
    return _SHORT.repr(value)


class KVLinkError(RuntimeError):
    """An operation of kvlink failed.

    Attributes:
        status: the code; each subclass has its own default.
        peer: the other side's cluster id, where one was involved.
        phase: where the failure has one: ``dial``, ``hello``, ``queue``, ``look-up``, ``transfer``, ``settle``,
            ``notify``.
        report: for a pull or push whose arguments were in order: which blocks are done and which failed, in the
            caller's own numbers. Some are done only where the error is a `PartialTransferError` as well.
    """

    default_status: ClassVar[StatusCode] = StatusCode.LLM_FAILED

    def __init__(
        self,
        message: str,
        *,
        status: StatusCode | None = None,
        peer: int | None = None,
        phase: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status: StatusCode = self.default_status if status is None else status
        self.peer = peer
        self.phase = phase
        self.report: TransferReport | None = None
        self.interrupted: Interrupted | None = None
        """On its way from where bytes move to where `report` is made of it; None in a caller's hands."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.args, self.__dict__))


def _rebuild(kind: type[KVLinkError], args: tuple[Any, ...], attributes: dict[str, Any]) -> KVLinkError:
    # A class that is also an OSError (TimeoutError) has that one's memory layout, and only its `__new__` can make it.
    error: KVLinkError = OSError.__new__(kind, *args) if issubclass(kind, OSError) else kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error


class ParameterError(KVLinkError):
    """An argument is not acceptable; nothing was changed and nothing was sent."""

    default_status = StatusCode.LLM_PARAM_INVALID


class ParameterTypeError(ParameterError, TypeError):
    """An argument has the wrong Python type."""


class ParameterValueError(ParameterError, ValueError):
    """An argument has the right type but a value outside its range."""


class RoleError(ParameterError):
    """The cluster's role does not allow this call. Source: the spec, section 12."""


class MismatchError(ParameterError):
    """The two sides disagree on the shape of what is to be moved; the message has the field and both values."""


class CacheNotFoundError(KVLinkError):
    """The key, cache id or slot names no live cache, here or at the peer."""

    default_status = StatusCode.LLM_KV_CACHE_NOT_EXIST


class TicketError(CacheNotFoundError):
    """A ticket's token is damaged or forged, is used by somebody else, or the ticket has ended; the message says which.

    Attributes:
        ticket: the ticket's number at its owner, None where the token does not tell.
    """

    def __init__(
        self,
        message: str,
        *,
        status: StatusCode | None = None,
        peer: int | None = None,
        phase: str | None = None,
        ticket: int | None = None,
    ) -> None:
        super().__init__(message, status=status, peer=peer, phase=phase)
        self.ticket = ticket


class OutOfMemoryError(KVLinkError):
    """The pool has no room for a cache.

    Attributes:
        needed: bytes that the cache would take.
        free: bytes that are free in all.
        largest_hole: bytes of the largest free run.
    """

    default_status = StatusCode.LLM_DEVICE_OUT_OF_MEMORY

    def __init__(self, message: str, *, needed: int, free: int, largest_hole: int) -> None:
        super().__init__(message)
        self.needed = needed
        self.free = free
        self.largest_hole = largest_hole


class LinkError(KVLinkError):
    """A link could not be made."""

    default_status = StatusCode.LLM_LINK_FAILED


class ListenError(KVLinkError, OSError):
    """The cluster cannot listen where it was told to; it was not opened, or has no address any more."""


class HandshakeError(LinkError):
    """The peer answered, and its answer does not fit; the message has the field and both values."""


class NotLinkedError(KVLinkError):
    """There is no open link to that cluster."""

    default_status = StatusCode.LLM_NOT_YET_LINK


class LinkLostError(KVLinkError):
    """The peer went away while something was waiting for it."""

    default_status = StatusCode.LLM_LINK_FAILED


class LinkExistsError(KVLinkError):
    """The call needs a cluster without links."""

    default_status = StatusCode.LLM_EXIST_LINK


class TransportError(KVLinkError):
    """The transport could not move something, although the link stands; trying again may help."""


class LinkBusyError(KVLinkError):
    """The peer has given us as much as it gives to one peer, or to all together; nothing was moved. Try again later."""

    default_status = StatusCode.LLM_LINK_BUSY


class TransferTimeoutError(KVLinkError, TimeoutError):
    """The deadline of a call passed before it was done."""

    default_status = StatusCode.LLM_WAIT_PROCESS_TIMEOUT


class PartialTransferError(KVLinkError):
    """Some of a request was moved and some was not; `__cause__` is the error that ended it, `status` is that one's.

    It is of the cause's class as well (`PartialTimeoutError`, `PartialLinkLostError`, `PartialNotLinkedError`,
    `PartialTransportError`), so that who only wants to know what happened need not know this class.

    Attributes:
        report: which blocks are done and which failed, in the caller's own numbers. Never None here.
    """

    def __init__(
        self,
        message: str,
        *,
        report: TransferReport,
        status: StatusCode | None = None,
        peer: int | None = None,
        phase: str | None = "transfer",
    ) -> None:
        super().__init__(message, status=status, peer=peer, phase=phase)
        self.report = report


class PartialTimeoutError(PartialTransferError, TransferTimeoutError):
    """The deadline passed when some of the request had been moved."""

    default_status = StatusCode.LLM_WAIT_PROCESS_TIMEOUT


class PartialLinkLostError(PartialTransferError, LinkLostError):
    """The peer went away when some of the request had been moved."""

    default_status = StatusCode.LLM_LINK_FAILED


class PartialNotLinkedError(PartialTransferError, NotLinkedError):
    """The link was ended on purpose, here or there, when some of the request had been moved."""

    default_status = StatusCode.LLM_NOT_YET_LINK


class PartialTransportError(PartialTransferError, TransportError):
    """The transport failed when some of the request had been moved."""


class FeatureNotEnabledError(KVLinkError):
    """The call needs a setting, or a power of the link, that is not there; the message says which."""

    default_status = StatusCode.LLM_FEATURE_NOT_ENABLED


class ProtocolError(KVLinkError):
    """Bytes from a peer are not what the protocol allows; the connection they came on is closed."""


class ClosedError(KVLinkError):
    """The cluster is closed, was never entered, or belongs to another process (after a fork) or another thread."""

    default_status = StatusCode.LLM_ENGINE_FINALIZED


_BY_STATUS: dict[StatusCode, type[KVLinkError]] = {
    StatusCode.LLM_PARAM_INVALID: ParameterError,
    StatusCode.LLM_KV_CACHE_NOT_EXIST: CacheNotFoundError,
    StatusCode.LLM_NOT_YET_LINK: NotLinkedError,
    StatusCode.LLM_LINK_FAILED: LinkError,
    StatusCode.LLM_WAIT_PROCESS_TIMEOUT: TransferTimeoutError,
    StatusCode.LLM_LINK_BUSY: LinkBusyError,
    StatusCode.LLM_FEATURE_NOT_ENABLED: FeatureNotEnabledError,
    StatusCode.LLM_EXIST_LINK: LinkExistsError,
}


def error_for(status: int, message: str, *, peer: int | None = None, phase: str | None = None) -> KVLinkError:
    """Return the exception for a status that a peer answered with; a number that is no failure becomes `LLM_FAILED`."""
    try:
        known = StatusCode(status)
    except ValueError:
        known = StatusCode.LLM_FAILED
    if known.is_ok:
        known = StatusCode.LLM_FAILED
    kind = _BY_STATUS.get(known, KVLinkError)
    return kind(message, status=known, peer=peer, phase=phase)
