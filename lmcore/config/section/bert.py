"""Section `bert`: what BERT models and their samples have beside what all models have."""

from __future__ import annotations

from dataclasses import dataclass

from lmcore.config.need import Need
from lmcore.config.option import CHECKED, option

_ENCODER = Need("`--model-family bert` or `ict`", lambda run: run.family in {"BERT", "ICT", ""})
_BERT = Need("`--model-family bert`", lambda run: run.family in {"BERT", ""})
_PRETRAINING = Need(
    "`--model-family bert` or `t5`, without `--task`",
    lambda run: run.family in {"BERT", "T5", ""} and run.config.task.task is None,
)


@dataclass(frozen=True)
class BertSection:
    """BERT models and their samples; the names are Megatron's flags where it has them."""

    bert_binary_head: bool = option(
        True,
        "Train a second head, which tells whether the two segments of a sample are swapped.",
        on_resume=CHECKED,
        needs=_BERT,
    )
    bert_post_norm: bool = option(
        False,
        "Normalize after each branch, as the original BERT, not before it, as Megatron.",
        on_resume=CHECKED,
        needs=_ENCODER,
    )
    bert_gelu: str = option(
        "tanh",
        "GELU: the tanh approximation in the feed-forward layers and the exact one in the head, as "
        "Megatron; the exact one by erf, as the original BERT; or the approximation in the head "
        "too, as `gelu_new` of Hugging Face.",
        choices=("tanh", "erf", "tanh-all"),
        on_resume=CHECKED,
        needs=_ENCODER,
    )
    bert_token_types: int = option(
        2,
        "Number of segments with an embedding; 0: none.",
        minimum=0,
        maximum=1024,
        on_resume=CHECKED,
        needs=_ENCODER,
    )
    mask_prob: float = option(
        0.15,
        "Fraction of a sample's tokens that are masked; of T5, that the decoder has to restore.",
        above=0,
        below=1,
        needs=_PRETRAINING,
    )
    short_seq_prob: float = option(
        0.1,
        "Fraction of samples that are shorter than seq_length.",
        minimum=0,
        maximum=1,
        needs=_PRETRAINING,
    )
