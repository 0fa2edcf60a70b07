"""Text from a trained model: load it, draw tokens with a key-value cache, decode them."""
