"""The accelerator of a plugin in a training loop of the user's own: `lmcore.start`."""
