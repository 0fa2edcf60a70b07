"""The HTTP interfaces: Megatron-LM's, and one compatible with OpenAI's."""
