"""Choice of the next token: probabilities, options, constraints."""
