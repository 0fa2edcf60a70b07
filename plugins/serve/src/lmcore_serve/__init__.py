"""Server of trained models over HTTP: its interfaces, its page, and a client for a terminal."""
