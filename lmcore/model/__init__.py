"""One transformer, written as if for one device; its ops come bound from the op table."""
