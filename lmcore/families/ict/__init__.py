"""ICT: two encoders that learn to find the block of text around a sentence."""
