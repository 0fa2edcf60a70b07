"""Tokenizers of Hugging Face's `tokenizer.json`, with the chat templates beside it."""
