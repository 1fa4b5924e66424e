"""Linear layers on 4-bit weights: their weights, and `blockscale.linear`."""
