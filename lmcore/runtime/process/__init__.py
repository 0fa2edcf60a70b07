"""Communication between processes: store, channels, consistency checks, process groups."""
