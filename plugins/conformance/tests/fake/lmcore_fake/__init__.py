"""The host under another name, which misbehaves as `FAKE` in the environment says."""
