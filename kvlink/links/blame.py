"""Errors of movements name the peer and the phase, also those that arose where neither was known."""

from __future__ import annotations

from kvlink.errors import KVLinkError, LinkLostError, MismatchError, TransportError


def blame(error: KVLinkError, peer: int) -> None:
    """Let an error of a movement with `peer` say so, if nobody has. What moves bytes has named the phase already."""
    error.phase = error.phase or "look-up"
    if error.peer is not None:
        return
    error.peer = peer
    if isinstance(error, LinkLostError):
        error.args = (f"cluster {peer} went away during the transfer: {error}",)
    elif isinstance(error, TransportError):
        error.args = (f"moving bytes from or to cluster {peer} failed: {error}; try again",)
    elif isinstance(error, MismatchError):
        error.args = (f"cluster {peer}: {error}",)
