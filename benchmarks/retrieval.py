"""Vectors of blocks and searches beside transformers and Faiss; found blocks beside BM25, chance.

    python benchmarks/retrieval.py speed
    python benchmarks/retrieval.py quality RUN INDEX

`speed`: blocks a second of `TextEncoder.blocks` and of a loop with a BERT of `transformers` over
the same blocks, also sorted by length, in turns; searches a second of `lmcore index search` and a
flat index of Faiss on random vectors.  `quality`: a sentence of each of the last documents of the
data asks for its block, which the run did not train on with `--split 90,10,0`; the share that is
among the first five is printed for the encoders, for BM25 and for chance.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from installed import check, parse

_OWN = {
    "bert_post_norm": True,
    "bert_gelu": "erf",
    "bert_token_types": 2,
    "biencoder_projection_dim": 0,
    "biencoder_shared_query_context_model": True,
    "retriever_score_scaling": False,
}
_K1, _B = 1.2, 0.75
"""Usual constants of BM25."""


def encoder(stack: ExitStack, layers: int, hidden: int, length: int, vocabulary: int) -> Any:
    """Return an encoder of random weights on the CPU, as `lmcore index` loads one."""
    from lmcore.cli.selection import find_plugins
    from lmcore.config.section import AcceleratorSection, Config
    from lmcore.data.tokenizer import build_tokenizer
    from lmcore.families.build import build_model
    from lmcore.inference.fix_weights import fix_layers
    from lmcore.inference.text_model import PLAIN
    from lmcore.model.shape import ModelShape
    from lmcore.retrieval.encoder import TYPICAL_TOKENS, TextEncoder
    from lmcore.runtime.device_choice import choose_device
    from lmcore.runtime.launch.rank import RankInfo
    from lmcore.runtime.runtime import start_runtime

    plugins = find_plugins([])
    selection = choose_device(plugins, "cpu", RankInfo())
    config = Config(accelerator=AcceleratorSection(device="cpu", precision="fp32"))
    runtime = stack.enter_context(start_runtime(config, plugins, selection, RankInfo()))
    shape = ModelShape(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=hidden // 64,
        ffn_hidden_size=4 * hidden,
        max_position_embeddings=length,
        padded_vocab_size=vocabulary,
        layernorm_epsilon=1e-12,
        model_family="ict",
        further=tuple(sorted(_OWN.items())),
    )
    model: Any = build_model(shape, runtime, masked=True)
    model.initialize(1)
    with tempfile.TemporaryDirectory() as folder:
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(str, range(vocabulary - 5))]
        path = Path(folder) / "vocab.txt"
        path.write_text("\n".join(words), encoding="utf-8")
        tokenizer = build_tokenizer("BertWordPieceLowerCase", vocab_file=str(path))
        found = TextEncoder(model.eval(), tokenizer, PLAIN, Path())
    fix_layers(model, runtime, TYPICAL_TOKENS)
    return found


def peer(layers: int, hidden: int, length: int, vocabulary: int) -> Any:
    """Return a BERT of transformers of the same sizes."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        intermediate_size=4 * hidden,
        max_position_embeddings=length,
    )
    return BertModel(config, add_pooling_layer=False).eval()


def peer_vectors(model: Any, rows: list[Any], batch: int) -> Any:
    """Return the first tokens' states, computed in batches sorted by length."""
    import torch

    order = sorted(range(len(rows)), key=lambda number: -len(rows[number]))
    found = np.empty((len(rows), model.config.hidden_size), dtype=np.float32)
    for start in range(0, len(rows), batch):
        chosen = order[start : start + batch]
        length = len(rows[chosen[0]])
        ids = np.zeros((len(chosen), length), dtype=np.int64)
        mask = np.zeros_like(ids)
        for place, number in enumerate(chosen):
            ids[place, : len(rows[number])] = rows[number]
            mask[place, : len(rows[number])] = 1
        with torch.inference_mode():
            out = model(input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask))
        found[chosen] = out.last_hidden_state[:, 0].numpy()
    return found


def rates(contenders: dict[str, Callable[[], object]], count: int, turns: int) -> None:
    """Print the median rate of each contender, which take turns, and its ratio to the first."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(turns + 1):
        for name, work in contenders.items():
            began = time.perf_counter()
            work()
            if turn:
                seconds[name].append(time.perf_counter() - began)
    first = statistics.median(next(iter(seconds.values())))
    for name, values in seconds.items():
        middle = statistics.median(values)
        print(f"{name:<28}{count / middle:>10.1f}/s{middle / first:>8.2f}x of the first's time")


def speed(stack: ExitStack, asked: argparse.Namespace) -> None:
    """Print blocks a second, then searches a second."""
    sizes = (asked.layers, asked.hidden, asked.length, 30592)
    drawn = np.random.default_rng(1)
    lengths = drawn.integers(asked.length // 4, asked.length + 1, asked.blocks)
    rows = [drawn.integers(5, 30000, length) for length in lengths]
    own = encoder(stack, *sizes)
    contenders: dict[str, Callable[[], object]] = {
        "blocks, lmcore": lambda: own.blocks(rows, batch=asked.batch)
    }
    try:
        other = peer(*sizes)
    except ImportError:
        print("blocks, transformers sorted: left out, not installed", file=sys.stderr)
    else:
        contenders["blocks, transformers sorted"] = lambda: peer_vectors(other, rows, asked.batch)
    rates(contenders, asked.blocks, asked.turns)
    search_speed(asked, drawn)


def search_speed(asked: argparse.Namespace, drawn: np.random.Generator) -> None:
    """Print searches a second in random vectors."""
    from lmcore.retrieval.search import search

    vectors = drawn.standard_normal((asked.vectors, 128), dtype=np.float32)
    questions = drawn.standard_normal((64, 128), dtype=np.float32)
    index: Any = SimpleNamespace(
        record=SimpleNamespace(blocks=len(vectors), size=128), shards=lambda: [(0, vectors)]
    )
    contenders: dict[str, Callable[[], object]] = {
        "searches, lmcore exact": lambda: search(index, questions, top=20)
    }
    try:
        import faiss
    except ImportError:
        print("faiss: left out, not installed", file=sys.stderr)
    else:
        flat = faiss.IndexFlatIP(128)
        flat.add(vectors)
        contenders["searches, Faiss flat"] = lambda: flat.search(questions, 20)
        same = flat.search(questions, 20)[1] == search(index, questions, top=20).blocks
        print(f"results equal to Faiss's: {same.mean():.2%}")
    rates(contenders, len(questions), asked.turns)


def quality(asked: argparse.Namespace) -> None:
    """Print the share of held-out sentences whose block is among the first five."""
    from lmcore.retrieval.index import BlockIndex
    from lmcore.retrieval.search import search

    index = BlockIndex(asked.index)
    with loaded(asked.run) as own:
        source = index.source(own)
        documents = int(source.rows[:, 2].max()) + 1
        held_out = np.flatnonzero(source.rows[:, 2] >= 0.9 * documents)
        drawn, asks, wanted = np.random.default_rng(1), [], []
        for number in held_out:
            sentences = source.text(int(number)).text.split(" . ")
            if len(sentences) > 1:
                asks.append(sentences[drawn.integers(len(sentences))])
                wanted.append(number)
        found = search(index, own.questions(asks), top=5).blocks
    texts = [source.text(number).text.split() for number in range(len(source.rows))]
    shares = {
        "encoders": np.mean([want in row for want, row in zip(wanted, found, strict=True)]),
        "BM25": np.mean([want in row for want, row in zip(wanted, bm25(texts, asks), strict=True)]),
        "chance": 5 / len(texts),
    }
    print(
        f"{len(asks)} sentences of held-out documents, {len(texts)} blocks; block in the first 5:"
    )
    for name, share in shares.items():
        print(f"{name:<12}{share:>8.2%}")


def loaded(run: Path) -> Any:
    """Return a context with the encoder of a run on the CPU."""
    from lmcore.cli.index.build import BuildSection, loaded_encoder
    from lmcore.cli.selection import find_plugins
    from lmcore.config.plugin_section import PluginSettings

    section = BuildSection(checkpoint=str(run), data_path="", output="", device="cpu")
    return loaded_encoder(section, run, find_plugins([], probe=True), PluginSettings())


def bm25(texts: list[list[str]], asks: list[str]) -> list[list[int]]:
    """Return the five texts of the highest BM25 for each question.

    Source: Robertson and Zaragoza 2009.
    """
    counts = [Counter(words) for words in texts]
    mean = sum(map(len, texts)) / len(texts)
    within: dict[str, list[int]] = {}
    for number, words in enumerate(counts):
        for word in words:
            within.setdefault(word, []).append(number)
    found = []
    for ask in asks:
        scores = np.zeros(len(texts))
        for word in set(ask.split()):
            having = within.get(word, [])
            weight = math.log(1 + (len(texts) - len(having) + 0.5) / (len(having) + 0.5))
            for number in having:
                times = counts[number][word]
                norm = _K1 * (1 - _B + _B * len(texts[number]) / mean)
                scores[number] += weight * times * (_K1 + 1) / (times + norm)
        found.append(np.argsort(-scores, kind="stable")[:5].tolist())
    return found


def main() -> None:
    """Run the part that the command line names."""
    parser = argparse.ArgumentParser(description="Blocks and searches a second; found blocks.")
    parser.add_argument("part", nargs="?", default="speed", choices=("speed", "quality"))
    parser.add_argument("run", nargs="?", type=Path, help="a run of ICT, for `quality`")
    parser.add_argument("index", nargs="?", type=Path, help="its index, for `quality`")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--vectors", type=int, default=200_000)
    parser.add_argument("--turns", type=int, default=5)
    asked = parse(parser, layers=1, hidden=64, length=32, blocks=8, vectors=500, turns=1)
    check(asked)
    if asked.part == "speed":
        with ExitStack() as stack:
            speed(stack, asked)
    elif asked.run is None or asked.index is None:
        parser.error("`quality` needs a run and its index")
    else:
        quality(asked)


if __name__ == "__main__":
    main()
