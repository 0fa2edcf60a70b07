"""Write a small Llama with random weights as Hugging Face has it, for `argonne_llama.sh`.

    python examples/argonne_llama/make_llama.py DIRECTORY TOKENIZER.model

The directory has `config.json`, `model.safetensors` and `tokenizer.model`, like a downloaded
`TinyLlama`; nothing of lmcore writes it, and transformers is not needed.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from sentencepiece import SentencePieceProcessor

HIDDEN, INNER, LAYERS, HEADS, GROUPS, POSITIONS = 128, 352, 2, 4, 2, 128
SCALE = 0.02


def weights(vocabulary: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a `LlamaForCausalLM` with this many tokens."""
    draw = torch.Generator().manual_seed(1)
    narrow = GROUPS * HIDDEN // HEADS
    shapes = {"model.embed_tokens": (vocabulary, HIDDEN), "lm_head": (vocabulary, HIDDEN)}
    norms = ["model.norm"]
    for layer in range(LAYERS):
        name = f"model.layers.{layer}."
        for part, rows in (("q", HIDDEN), ("k", narrow), ("v", narrow), ("o", HIDDEN)):
            shapes[f"{name}self_attn.{part}_proj"] = (rows, HIDDEN)
        shapes[f"{name}mlp.gate_proj"] = shapes[f"{name}mlp.up_proj"] = (INNER, HIDDEN)
        shapes[f"{name}mlp.down_proj"] = (HIDDEN, INNER)
        norms += [f"{name}input_layernorm", f"{name}post_attention_layernorm"]
    made = {
        f"{name}.weight": torch.randn(shape, generator=draw) * SCALE
        for name, shape in shapes.items()
    }
    return made | {f"{name}.weight": torch.ones(HIDDEN) for name in norms}


def main(folder: Path, tokenizer: Path) -> None:
    """Write the model of a tokenizer into *folder*."""
    pieces = SentencePieceProcessor(model_file=str(tokenizer))
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "max_position_embeddings": POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": pieces.get_piece_size(),
        "bos_token_id": pieces.bos_id(),
        "eos_token_id": pieces.eos_id(),
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(weights(pieces.get_piece_size()), folder / "model.safetensors", {"format": "pt"})
    shutil.copyfile(tokenizer, folder / "tokenizer.model")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
