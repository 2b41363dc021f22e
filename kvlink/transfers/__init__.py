"""The movements: pulls, pushes, layer-wise pushes, and serving the peers that make them."""
