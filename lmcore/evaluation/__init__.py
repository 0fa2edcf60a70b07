"""Evaluation of trained models on perplexity, cloze and multiple-choice tasks; still empty."""
