"""Hugging Face model directories: `config.json`, safetensors files and tokenizer files."""

from lmcore.conversion.huggingface.directory import (
    CONFIG_NAME,
    WEIGHT_FILES,
    incomplete_huggingface,
    is_huggingface,
)
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
    files=f"`{CONFIG_NAME}` with {' or '.join(f'`{name}`' for name, _ in WEIGHT_FILES)}, or the "
    "index of several files",
)
