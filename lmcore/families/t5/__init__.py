"""T5: an encoder, and a decoder that restores the spans of text that the encoder's input lacks."""
