"""Hugging Face model directories: `config.json`, safetensors files and tokenizer files."""
