"""Ways of moving bytes: `base` is the contract, each other module one way."""
