"""Text generation: sample tokens of a loaded model with a key-value cache, decode them."""
