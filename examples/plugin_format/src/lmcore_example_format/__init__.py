"""A checkpoint format as a plugin of lmcore."""
