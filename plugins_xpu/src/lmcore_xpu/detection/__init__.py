"""Facts that the probe decides by: cards, masks, host; torch-free."""
