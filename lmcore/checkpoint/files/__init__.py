"""Files of a checkpoint on the disk: checksummed, written past the page cache, and synced."""
