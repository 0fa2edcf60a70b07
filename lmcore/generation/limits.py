"""Limits of requests that the command and the server share; torch-free."""

from __future__ import annotations

__all__ = ["MAX_BEAM_WIDTH", "MAX_LENGTH_PENALTY", "MAX_LOGPROBS", "MAX_SEED", "NUM_SEEDS"]

MAX_LOGPROBS = 20
MAX_BEAM_WIDTH = 128
MAX_LENGTH_PENALTY = 10.0  # a larger exponent could make the score of a text infinite
MAX_SEED = 2**63 - 1
NUM_SEEDS = MAX_SEED + 1
"""A negative seed counts from here, as does the one after `MAX_SEED`."""
