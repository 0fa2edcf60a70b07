"""The commands `lmcore serve` and `lmcore ask`."""
