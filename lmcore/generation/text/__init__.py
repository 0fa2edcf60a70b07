"""Text in and out: prompts, decoding, stop texts, samples."""
