"""Parts of every HTTP request: keys, limits, the access log, metrics."""
