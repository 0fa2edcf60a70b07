"""Batches for training: loader and prefetch to the device."""
