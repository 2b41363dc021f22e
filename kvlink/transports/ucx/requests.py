"""Gets and puts as UCX sees them: transfers of many requests, and the slots that the requests live in.

A transfer is thousands of equal calls, so what one call costs in Python is what a block costs. Three things keep it to
the call itself:

- Requests live in memory of ours, slots side by side, so nothing has to be freed one by one.
- UCX reports the end of a request by calling a C function with ``(request, status, user data)``. That function is
  ``memset``, with 1 as user data: it writes the status into the first byte of the request. So the states of a whole row
  of requests are looked at with one numpy slice, and no Python runs per request.
- Slots come in rows of `ROW`, and each has its parameters prepared.

Every request has its own status, and every one is looked at: a flush that succeeds says nothing about the gets before.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate, repeat
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from kvlink.transports.ucx import declarations as ucp

if TYPE_CHECKING:
    from kvlink.memory.pool import Bytes
    from kvlink.transports.ucx.connection import WorkerEndpoint
    from kvlink.transports.ucx.context import Context

_log = logging.getLogger(__name__)

ROW: Final = 64
"""Slots that are taken, filled and looked at together."""

_ALIGNMENT: Final = 64
_NO_WAY: Final = 2**64 + ucp.ERR_CANCELED
"""What UCX answers at once where it has no protocol for two kinds of memory and may not imitate one; the endpoint stays
as it is. Source: ``ucp_proto_reconfig_progress`` of UCX 1.21 and 1.22."""

_IN_PROGRESS_BYTE: Final = bytes([ucp.IN_PROGRESS])


class Group(NamedTuple):
    """Neighbours in a transfer that have both regions in common: requests up to `stop`."""

    stop: int
    memh: int
    rkey: Any
    memory_type: int = ucp.MEMORY_HOST


class Transfer:
    """One get or put on its way: addresses and lengths of all its requests, and how far it is.

    Args:
        endpoint: it goes over.
        is_put: which way.
        local, nbytes, remote: addresses and lengths.
        groups: which of them have which regions, in order.
        keep: what must stay in place until it has ended.
        is_on_device: memory of a device takes part, on either side.

    Attributes:
        is_refused: UCX has no way between these two memories; nothing was moved, and the endpoint is as it was.
    """

    __slots__ = (
        "done_nbytes",
        "endpoint",
        "finish",
        "flush",
        "groups",
        "has_ended",
        "is_on_device",
        "is_put",
        "is_refused",
        "is_stopped",
        "keep",
        "local",
        "nbytes",
        "position",
        "remote",
        "rows",
        "status",
    )

    def __init__(
        self,
        endpoint: WorkerEndpoint,
        *,
        is_put: bool,
        local: list[int],
        nbytes: list[int],
        remote: list[int],
        groups: Sequence[Group],
        keep: object = None,
        is_on_device: bool = False,
    ) -> None:
        self.endpoint = endpoint
        self.is_on_device, self.is_refused = is_on_device, False
        self.is_put = is_put
        self.local, self.nbytes, self.remote = local, nbytes, remote
        self.groups = deque(groups)
        self.keep = keep
        self.finish: Callable[[], None] | None = None
        self.position = 0
        self.done_nbytes = 0  # from the first request on, without a gap
        self.rows: deque[Row] = deque()
        self.flush: int | None = None
        self.status = ucp.OK
        self.is_stopped = False
        self.has_ended = False


class Row(NamedTuple):
    """A row of slots in use."""

    number: int
    num: int
    nbytes: int


class Slots:
    """Memory for all requests of a worker. Whoever has the worker's lock calls it.

    Args:
        num_requests: at once, rounded down to whole rows.
    """

    def __init__(self, context: Context, num_requests: int) -> None:
        ffi, libc = context.library.ffi, context.library.libc
        self._api = context.library.api
        num_rows = max(1, num_requests // ROW) + 1  # the last row is for `move_one`
        stride = -(-(context.request_nbytes + 16) // _ALIGNMENT) * _ALIGNMENT
        self._memory: Bytes = np.zeros(num_rows * ROW * stride + _ALIGNMENT, np.uint8)
        # UCX's own part of a request lies in front of what its pointer points to.
        first = -int(self._memory.ctypes.data) % _ALIGNMENT + stride - 16
        self._statuses: Bytes = np.ndarray((num_rows, ROW), np.uint8, self._memory, first, (ROW * stride, stride))
        num_slots = num_rows * ROW
        self._params_memory = ffi.new("ucp_request_param_t[]", num_slots)
        self._params = [[self._params_memory + row * ROW + index for index in range(ROW)] for row in range(num_rows)]
        size = ffi.sizeof("ucp_request_param_t")
        fields = dict(ffi.typeof("ucp_request_param_t").fields)
        memory, shape, strides = ffi.buffer(self._params_memory), (num_rows, ROW), (ROW * size, size)
        self._memhs = np.ndarray(shape, np.uint64, memory, fields["memh"].offset, strides)
        self._memory_types = np.ndarray(shape, np.int32, memory, fields["memory_type"].offset, strides)
        self._type_of_row = [ucp.MEMORY_HOST] * num_rows  # what is in `_memory_types`, for it seldom changes
        callback = int(ffi.cast("uintptr_t", libc.memset))
        address = int(self._memory.ctypes.data) + first
        for index in range(num_slots):
            param = self._params_memory[index]
            param.op_attr_mask = ucp.OP_REQUEST | ucp.OP_CALLBACK | ucp.OP_USER_DATA | ucp.OP_MEMORY_TYPE | ucp.OP_MEMH
            param.request, param.callback, param.user_data = address + index * stride, callback, 1
            param.memory_type = ucp.MEMORY_HOST
        self._free = list(range(num_rows - 1))
        self._one, self._one_param, self._one_memh = self._statuses[-1][:1].data, self._params[-1][0], 0
        self._get, self._put = self._api.ucp_get_nbx, self._api.ucp_put_nbx
        self._progress, self._worker = self._api.ucp_worker_progress, context.worker

    @property
    def has_room(self) -> bool:
        """Whether a row is free."""
        return bool(self._free)

    def issue(self, transfer: Transfer, most_nbytes: int) -> int:
        """Put the next row of a transfer's requests on their way, one at least; return their bytes.

        Args:
            most_nbytes: of all of them, unless it is one.
        """
        group = transfer.groups[0]
        first = transfer.position
        end = min(first + ROW, group.stop)
        total = sum(transfer.nbytes[first:end])
        if total > most_nbytes:
            end = first + max(1, bisect_right(list(accumulate(transfer.nbytes[first:end])), most_nbytes))
            total = sum(transfer.nbytes[first:end])
        number = self._free.pop()
        statuses = self._statuses[number]
        statuses[: end - first] = ucp.IN_PROGRESS
        self._memhs[number] = group.memh
        if self._type_of_row[number] != group.memory_type:
            self._memory_types[number] = self._type_of_row[number] = group.memory_type
        move = self._put if transfer.is_put else self._get
        ep, rkey, lengths = transfer.endpoint.ep, group.rkey, transfer.nbytes[first:end]
        local, remote, params = transfer.local[first:end], transfer.remote[first:end], self._params[number]
        answers: list[int] = []
        try:
            answers.extend(map(move, repeat(ep), local, lengths, remote, repeat(rkey), params))
        except Exception:  # a fault of ours: what was not asked for is not in flight, and fails
            _log.exception("asking UCX for a transfer failed")
            answers += [2**64 + ucp.ERR_INVALID_PARAM] * (end - first - len(answers))
        if 0 in answers or max(answers) >= ucp.FIRST_ERROR_POINTER:
            for index, answer in enumerate(answers):  # done at once, or refused: then UCX calls nobody
                if answer == 0 or answer >= ucp.FIRST_ERROR_POINTER:
                    statuses[index] = answer & 0xFF
            transfer.is_refused = transfer.is_on_device and not first and set(answers) == {_NO_WAY}
        transfer.rows.append(Row(number, end - first, total))
        transfer.position = end
        if end == group.stop:
            transfer.groups.popleft()
        return total

    def move_one(self, ep: Any, is_put: bool, local: int, nbytes: int, remote: int, memh: int, rkey: Any) -> int:
        """Put one request on its way, outside of any transfer and one at a time; progress once; return its status."""
        one = self._one
        one[0] = ucp.IN_PROGRESS
        if memh != self._one_memh:
            self._one_param.memh = self._one_memh = memh
        answer: int = (self._put if is_put else self._get)(ep, local, nbytes, remote, rkey, self._one_param)
        if answer == 0:
            return ucp.OK
        if answer >= ucp.FIRST_ERROR_POINTER:
            return answer - 2**64
        self._progress(self._worker)
        status: int = one[0]
        return status if status <= ucp.IN_PROGRESS else status - 256

    def status_of_one(self) -> int:
        """Return the status of the request of `move_one`."""
        status: int = self._one[0]
        return status if status <= ucp.IN_PROGRESS else status - 256

    def has_ended(self, row: Row) -> bool:
        """Whether no request of a row is in flight."""
        return _IN_PROGRESS_BYTE not in self._statuses[row.number, : row.num].tobytes()

    def give_back(self, row: Row) -> int:
        """Free a row that has ended; return the first status that is an error."""
        self._free.append(row.number)
        failed = self._statuses[row.number, : row.num].tobytes().strip(b"\0")
        return failed[0] - 256 if failed else ucp.OK


def status_of(api: Any, request: int) -> int:
    """Return the status of a request that UCX has made, and free it when it has ended."""
    if request == 0:
        return ucp.OK
    if request >= ucp.FIRST_ERROR_POINTER:
        return request - 2**64
    status = int(api.ucp_request_check_status(request))
    if status != ucp.IN_PROGRESS:
        api.ucp_request_free(request)
    return status
