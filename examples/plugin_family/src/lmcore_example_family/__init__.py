"""A family of models as a plugin of lmcore."""
