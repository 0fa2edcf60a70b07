"""Commands about plugins: `lmcore plugins`, and those that plugins add."""
