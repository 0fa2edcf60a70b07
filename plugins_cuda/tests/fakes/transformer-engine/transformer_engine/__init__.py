"""Stands for Transformer Engine 2.8."""
