"""``mlp_gelu``: two linear layers with GELU between them, as one operator of the linear family."""
