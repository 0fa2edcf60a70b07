"""Where trained models are scored: perplexity, cloze and multiple-choice tasks.  Nothing yet."""
