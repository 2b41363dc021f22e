"""Get and put over UCX, for hosts that do not share memory."""
