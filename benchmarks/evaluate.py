"""`lmcore evaluate` beside lm-eval-harness: the log-likelihood of each request, scores, and time.

    python benchmarks/evaluate.py --task-data DIR --vocab-file FILE --merge-file FILE

Both read the same files and the same model, in float32, with the prompts that each has.  The model
is a GPT-2 of random weights, written for Hugging Face.  lm-eval-harness's tasks read the files by
way of copies in the layout of its data sets.  The two run in turns; the first turn is not counted.
Sliding windows are compared with the usual loop of `transformers`.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from installed import check, parse

_TASKS = {
    "lambada_strict": "lambada_openai",
    "arc_easy": "arc_easy",
    "openbookqa": "openbookqa",
    "wikitext2": "wikitext",
}
"""lm-eval-harness's name of each task."""


def rows_for_peer(name: str, files: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a task's files in the layout of lm-eval-harness's data set."""
    from lmcore.evaluation.files import json_rows
    from lmcore.evaluation.tasks import TASKS

    if name == "wikitext2":
        (task,) = (one for one in TASKS if one.name == name)
        for path in files:
            yield from ({"page": example.original} for example in task.examples(path))
        return
    for path in files:
        for row in json_rows(path):
            values = dict(row.values)
            if name == "lambada_strict":
                yield {"text": values["text"]}
                continue
            labels = "ABCDEFGH"[: len(values["choices"])]
            question = "question_stem" if name == "openbookqa" else "question"
            yield {
                question: values["query"].removeprefix("Question: "),
                "choices": {"text": values["choices"], "label": list(labels)},
                "answerKey": labels[values["gold"]],
            }


def peer_task(name: str, files: Sequence[Path], limit: int, folder: Path) -> dict[str, Any]:
    """Return the configuration of lm-eval-harness's task that reads copies of some files."""
    import lm_eval
    from lm_eval.tasks._yaml_loader import load_yaml

    path = folder / f"{name}.json"
    rows = [json.dumps(one) for one in itertools.islice(rows_for_peer(name, files), limit)]
    path.write_text("\n".join(rows) + "\n")
    known = Path(lm_eval.__file__).parent / "tasks"
    (found,) = known.glob(f"**/{_TASKS[name]}.yaml")
    config = load_yaml(found)
    left_out = ("tag", "dataset_name", "training_split", "validation_split", "test_split")
    return {key: value for key, value in config.items() if key not in left_out} | {
        "task": f"{name}_of_files",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}},
        "test_split": "test",
    }


def measure_peer(asked: argparse.Namespace, configs: Sequence[tuple[str, Any]]) -> Any:
    """Return lm-eval-harness's samples and metrics of each task, and the seconds of its passes."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    model = HFLM(pretrained=asked.model, device="cpu", dtype="float32", batch_size=asked.batch)
    found = {}
    for name, config in configs:
        begin = time.perf_counter()
        result = simple_evaluate(
            model=model,
            tasks=[dict(config)],
            log_samples=True,
            bootstrap_iters=0,
            verbosity="ERROR",
        )
        seconds = time.perf_counter() - begin
        key = config["task"]
        found[name] = (result["samples"][key], result["results"][key], seconds)
    return found


def measure_lmcore(asked: argparse.Namespace, tasks: Sequence[tuple[Any, list[Path]]]) -> Any:
    """Return lmcore's result of each task; the model is loaded before."""
    from lmcore.evaluation.run import Evaluation

    found = {}
    with loaded_model(asked.model) as loaded:
        evaluation = Evaluation(loaded, tokens=asked.batch_tokens, limit=asked.limit)
        for task, files in tasks:
            begin, records = time.perf_counter(), []
            result = evaluation.score(evaluation.ask(task, files), record=records.append)
            found[task.name] = (result, records, time.perf_counter() - begin)
    return found


@contextmanager
def loaded_model(path: str) -> Iterator[Any]:
    """Load a model on the CPU in float32, as the command does."""
    from lmcore.config.section import AcceleratorSection, Config
    from lmcore.evaluation.passes import BLOCK
    from lmcore.inference.load import load_model
    from lmcore.plugin import discover
    from lmcore.runtime.device_choice import select_device
    from lmcore.runtime.launch.rank import only_process
    from lmcore.runtime.runtime import start_runtime

    plugins, rank = discover(), only_process({})
    config = Config(accelerator=AcceleratorSection(device="cpu", precision="fp32"))
    selection = select_device(plugins, "cpu", rank)
    with start_runtime(config, plugins, selection, rank, None) as runtime:
        yield load_model(Path(path), runtime, rows=BLOCK)


def measure_sliding(asked: argparse.Namespace, path: Path, stride: int) -> tuple[Any, ...]:
    """Return the seconds and the perplexity of lmcore, then of the usual loop of `transformers`.

    Both score the same windows of a text: the loop one at a time, with the logits of all tokens.
    """
    import torch
    import transformers

    from lmcore.evaluation.run import Evaluation
    from lmcore.evaluation.tasks import TASKS

    (task,) = (one for one in TASKS if one.name == "wikitext103_stream")
    with loaded_model(asked.model) as loaded:
        positions = loaded.model.shape.max_position_embeddings
        begin = time.perf_counter()
        # The last token of a window of the loop is a target alone.
        evaluation = Evaluation(
            loaded, tokens=asked.batch_tokens, stride=stride, length=positions - 1
        )
        result = evaluation.score(evaluation.ask(task, [path]))
        own = time.perf_counter() - begin
        (example,) = task.examples(path)
        tokens = torch.tensor([loaded.tokenizer.encode(example.text)])
    model = transformers.AutoModelForCausalLM.from_pretrained(asked.model).float().eval()
    total, count, before, begin = 0.0, 0, 0, time.perf_counter()
    for start in range(0, tokens.shape[1], stride):
        end = min(start + positions, tokens.shape[1])
        targets = tokens[:, start:end].clone()
        targets[:, : before - end] = -100
        with torch.inference_mode():
            loss = model(tokens[:, start:end], labels=targets).loss.item()
        number = int((targets[:, 1:] != -100).sum())
        total, count, before = total + loss * number, count + number, end
        if end == tokens.shape[1]:
            break
    value = result.metrics["token_perplexity"].value
    return own, value, time.perf_counter() - begin, math.exp(total / count)


def _print_sliding(turns: Sequence[tuple[Any, ...]]) -> None:
    """Print the times and the perplexities of sliding windows."""
    own, other = (statistics.median(turn[place] for turn in turns) for place in (0, 2))
    print(f"sliding windows, lmcore: {own:.2f} s, perplexity {turns[0][1]:.8g}")
    print(f"sliding windows, transformers: {other:.2f} s, {other / own:.2f} times lmcore's")
    print(f"sliding windows, perplexity of transformers: {turns[0][3]:.8g}")


def difference(records: Sequence[Any], samples: Sequence[Any]) -> float:
    """Return the largest difference of a log-likelihood, of all requests of a task."""
    worst = 0.0
    for record, sample in zip(records, samples, strict=True):
        values = sample["filtered_resps"]
        pairs = [one[0] if isinstance(one, tuple | list) else one for one in values]
        own = record["logprobs"]
        own = own if len(own) == len(pairs) else [sum(own)]
        for ours, theirs in zip(own, pairs, strict=True):
            worst = max(worst, abs(ours - float(theirs)))
    return worst


def write_model(folder: Path, asked: argparse.Namespace) -> Path:
    """Write a GPT-2 of random weights for Hugging Face; return its directory."""
    from lmcore.checkpoint import save_checkpoint
    from lmcore.contract import OP_SPECS, OpTable
    from lmcore.conversion.convert import convert
    from lmcore.data.tokenizer import build_tokenizer
    from lmcore.data.tokenizer.saved import save_tokenizer
    from lmcore.families.gpt.model import GPT
    from lmcore.families.op_binding import OpBinding
    from lmcore.model.shape import ModelShape

    tokenizer = build_tokenizer(
        "GPT2BPETokenizer", vocab_file=asked.vocab_file, merge_file=asked.merge_file
    )
    heads = max(1, asked.hidden // 64)
    sizes = (asked.layers, asked.hidden, heads, 4 * asked.hidden, 512, tokenizer.vocab_size)
    shape = ModelShape(*sizes)
    model = GPT(shape, OpBinding(OpTable(OP_SPECS), "cpu", "float32"))
    model.initialize(1)
    tensors = {f"model.{name}": one.detach() for name, one in model.named_parameters()}
    run = folder / "run"
    save_checkpoint(run / "checkpoints", 1, tensors, {}, model_shape=shape.to_dict())
    save_tokenizer(tokenizer, run / "tokenizer")
    convert(run, folder / "model", "huggingface")
    return folder / "model"


def write_toy_files(folder: Path) -> Path:
    """Write a few examples of each task; return their directory."""
    rows = [
        {"query": f"Is it {number}?", "choices": ["yes", "no", "maybe"], "gold": number % 3}
        for number in range(4)
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    for name in ("openbook_qa.jsonl", "arc_easy.jsonl"):
        (folder / name).write_text(lines)
    ends = [json.dumps({"text": f"It is a dog {number}"}) + "\n" for number in range(4)]
    (folder / "lambada_test.jsonl").write_text("".join(ends))
    (folder / "wikitext-2").mkdir()
    (folder / "wikitext-2/wiki.test.tokens").write_text(
        " \n = One = \n \n It is well @-@ known . \n"
    )
    return folder


def main() -> None:
    """Compare both on each task, and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab-file", required=True)
    parser.add_argument("--merge-file", required=True)
    parser.add_argument("--task-data", help="directory with the tasks' files")
    parser.add_argument("--tasks", nargs="+", default=list(_TASKS), choices=_TASKS)
    parser.add_argument("--limit", type=int, default=200, help="examples of each task")
    parser.add_argument("--batch", type=int, default=16, help="requests of a pass of the other")
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--stride", type=int, default=128, help="of sliding windows")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    asked = parse(parser, turns=1, limit=4, layers=2, hidden=32)
    check(asked)
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    import torch

    torch.set_num_threads(asked.threads)
    has_peer = importlib.util.find_spec("lm_eval") is not None
    if not has_peer:
        print("lm-eval: left out, not installed")
    from lmcore.evaluation.files import find_files
    from lmcore.evaluation.tasks import TASKS

    with tempfile.TemporaryDirectory() as name:
        os.environ["HF_HOME"] = name
        folder = Path(name)
        data = Path(asked.task_data) if asked.task_data else write_toy_files(folder)
        asked.model = str(write_model(folder, asked))
        chosen = [task for task in TASKS if task.name in asked.tasks]
        tasks = [(task, find_files(task, data)) for task in chosen]
        configs = [
            (task.name, peer_task(task.name, files, asked.limit, folder))
            for task, files in (tasks if has_peer else ())
        ]
        turns = [
            (measure_lmcore(asked, tasks), measure_peer(asked, configs) if has_peer else {})
            for _ in range(asked.turns + (not asked.toy))
        ]
        sliding = []
        if importlib.util.find_spec("transformers") is None:
            print("transformers: left out, not installed")
        else:
            text = folder / "sliding.txt"
            text.write_text(" It is not the last word of a long text .\n" * (10 * asked.limit))
            sliding = [measure_sliding(asked, text, asked.stride) for _ in turns]
    for task, _ in tasks:
        _print_task(task.name, turns[1:] or turns)
    if sliding:
        _print_sliding(sliding[1:] or sliding)


def _print_task(name: str, turns: Sequence[Any]) -> None:
    """Print the times and the metrics of a task, and the differences of both."""
    own = [ours[name] for ours, _ in turns]
    result, records, _ = own[0]
    seconds = statistics.median(one[-1] for one in own)
    count = sum(len(one["logprobs"]) for one in records)
    label, peer = f"{name}, lmcore", f"{name}, lm-eval"
    print(f"{label}: {seconds:.2f} s, {count / seconds:,.1f} requests a second")
    other = [theirs[name] for _, theirs in turns if theirs]
    if not other:
        return
    samples, metrics, _ = other[0]
    slower = statistics.median(one[-1] for one in other)
    worst, ratio = difference(records, samples), slower / seconds
    print(f"{peer}: {slower:.2f} s, {ratio:.2f} times lmcore's")
    print(f"{name}, difference: {worst:.1e} of a log-likelihood at most, of {count:,}")
    for metric, value in result.metrics.items():
        theirs = metrics.get(f"{metric},none")
        if theirs is not None:
            print(f"{name}, {metric}: lmcore {value.value:.8g}, lm-eval {theirs:.8g}")


if __name__ == "__main__":
    main()
