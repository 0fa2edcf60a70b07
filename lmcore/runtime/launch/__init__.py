"""Worker processes of one host: launcher, fork server, and what schedulers say about ranks."""
