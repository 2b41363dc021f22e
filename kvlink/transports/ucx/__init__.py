"""Get and put over UCX, for hosts that do not share memory. Loads nothing of UCX before it is asked to."""
