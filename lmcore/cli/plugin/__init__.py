"""Commands about plugins: `lmcore plugins`, and `lmcore plugin check|new|versions`."""
