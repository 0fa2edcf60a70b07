"""Worker processes of one host: launcher, forked workers, and the variables of other launchers."""
