"""Text generation: load a trained model, sample tokens with a key-value cache, decode them."""
