"""Commands about plugins: `lmcore plugins`, and the commands that plugins add."""
