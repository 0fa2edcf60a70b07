"""Causal language models of the GPT and Llama families."""
