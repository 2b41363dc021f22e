"""Relations to peers: the handshake, one link per peer, its life, and the calls about it."""
