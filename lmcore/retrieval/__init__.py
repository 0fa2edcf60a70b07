"""Search of text by vectors: encoders, an index of blocks on disk, and answers to questions."""
