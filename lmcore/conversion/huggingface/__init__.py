"""Hugging Face model directories: `config.json`, safetensors files and tokenizer files."""

from lmcore.conversion.huggingface.directory import incomplete_huggingface, is_huggingface
from lmcore.model.checkpoint_format import CheckpointFormat

__all__ = ["FORMAT"]

FORMAT = CheckpointFormat(
    name="huggingface",
    title="Hugging Face",
    described="a model of Hugging Face",
    matches=is_huggingface,
    read="lmcore.conversion.huggingface.read:HuggingFaceState",
    write="lmcore.conversion.huggingface.write:write_huggingface",
    options=("largest_file",),
    lacks=incomplete_huggingface,
)
