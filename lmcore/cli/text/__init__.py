"""Text for terminals: wrapped output, progress lines and samples as they are generated."""
