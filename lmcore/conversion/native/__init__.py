"""lmcore's own checkpoints and run directories, read and written as a `ModelState`."""
