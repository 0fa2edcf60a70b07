"""Stand-in for Transformer Engine 2.8."""
