"""Section `ict`: what the inverse cloze task's models and samples have beside BERT's."""

from __future__ import annotations

from dataclasses import dataclass

from lmcore.config.need import Need
from lmcore.config.option import CHECKED, INPUT_PATH, option

_ICT = Need("`--model-family ict`", lambda run: run.family in {"ICT", ""})


@dataclass(frozen=True)
class IctSection:
    """Encoders of questions and blocks, and their samples; the names are Megatron's flags."""

    biencoder_projection_dim: int = option(
        0,
        "Channels of the vectors of questions and blocks, after a projection; 0: the hidden state "
        "of the first token as it is.",
        minimum=0,
        maximum=1 << 16,
        on_resume=CHECKED,
        needs=_ICT,
    )
    biencoder_shared_query_context_model: bool = option(
        False,
        "Encode questions and blocks by one encoder, not by two.",
        on_resume=CHECKED,
        needs=_ICT,
    )
    retriever_score_scaling: bool = option(
        False,
        "Divide the scores by the root of the hidden size before the softmax.",
        on_resume=CHECKED,
        needs=_ICT,
    )
    query_in_block_prob: float = option(
        0.1,
        "Fraction of samples whose block keeps the sentence that is the question.",
        minimum=0,
        maximum=1,
        needs=_ICT,
    )
    use_one_sent_docs: bool = option(
        False,
        "Take documents of one sentence too.",
        on_resume=CHECKED,
        needs=_ICT,
    )
    titles_data_path: str | None = option(
        None,
        "Prefix of a dataset with the title of each document, which is put before its blocks.",
        metavar="PREFIX",
        on_resume=CHECKED,
        needs=_ICT.else_error("no other family reads titles"),
        paths=INPUT_PATH,
    )
    bert_load: str | None = option(
        None,
        "Run or checkpoint of a BERT whose weights both encoders begin with.",
        metavar="DIR",
        needs=_ICT.else_error("no other family begins with the weights of a BERT"),
        paths=INPUT_PATH,
    )
