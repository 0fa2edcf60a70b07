"""`lmcore plugin new`: the distribution of a new plugin, from the folder `template`."""
