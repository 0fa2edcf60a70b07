"""Model families, written for one device; their ops are bound from the op table."""
