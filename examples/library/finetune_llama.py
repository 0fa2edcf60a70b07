"""Fine-tuning of a Llama of `transformers` on a text file, with evaluation and a checkpoint.

Without `--model` it is a small Llama with random weights.  Tokens are the bytes of the text, so
that no tokenizer has to be fetched.

Try:
    python examples/library/finetune_llama.py --text FILE --steps 200 --save runs/llama
    lmcore run --nproc-per-node 2 examples/library/finetune_llama.py --model DIRECTORY --kernels
"""

import argparse
from pathlib import Path

import torch
from torch.utils.data import DataLoader

import lmcore

try:
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError as error:
    why = f"this example needs transformers ({error}): pip install transformers"
    raise SystemExit(why) from None


def make_model(directory=None):
    """Return the model in a local directory, or a small one with random weights."""
    if directory is not None:
        return LlamaForCausalLM.from_pretrained(directory, local_files_only=True)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def windows(text, length):
    """Return the text as windows of byte tokens, [windows, length]."""
    tokens = torch.frombuffer(bytearray(text, "utf-8"), dtype=torch.uint8).long()
    return tokens[: len(tokens) // length * length].view(-1, length)


def train(rt, text, steps=20, length=64, accumulate=2, directory=None, *, kernels=False):
    """Train on the first nine tenths of the text, with the device's kernels in the model or not.

    Returns the loss of each micro-batch on this rank, the losses of the rest of the text before and
    after, the model and its optimizer.
    """
    data = windows(text, length)
    if len(data) < 2:
        raise SystemExit(f"the text needs {2 * length} bytes or more, and has {len(text)}")
    unseen = max(len(data) // 10, 1)
    torch.manual_seed(1)
    model = make_model(directory)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    model, optimizer = rt.prepare(model, optimizer)
    if kernels:
        rt.print(rt.use_kernels(model))
    batches = rt.loader(DataLoader(data[:-unseen], batch_size=4, shuffle=True))
    rest = rt.loader(DataLoader(data[-unseen:], batch_size=4))
    losses, evaluations = [], [evaluate(rt, model, rest)]
    while rt.updates < steps:
        model.train()
        for tokens in batches:
            with rt.accumulate(accumulate):
                with rt.autocast():
                    loss = model(input_ids=tokens, labels=tokens).loss
                rt.backward(loss)
                rt.step(optimizer, clip=1.0)
            losses.append(loss.item())
            if rt.updates == steps:
                break
    evaluations.append(evaluate(rt, model, rest))
    return losses, evaluations, model, optimizer


def evaluate(rt, model, batches):
    """Return the mean of the losses of all batches."""
    model.eval()
    losses = []
    with torch.no_grad():
        for tokens in batches:
            with rt.autocast():
                loss = model(input_ids=tokens, labels=tokens).loss
            losses += rt.gather_for_metrics(loss).tolist()
    return sum(losses) / len(losses)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--text", type=Path, default=Path(__file__), help="a text file")
    parser.add_argument("--model", help="local directory of a Llama with 256 tokens or more")
    parser.add_argument("--kernels", action="store_true", help="use the device's kernels")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save", help="directory for the checkpoint")
    options = parser.parse_args()
    with lmcore.start() as rt:
        text = options.text.read_text(encoding="utf-8")
        chosen = {"directory": options.model, "kernels": options.kernels}
        trained = train(rt, text, options.steps, **chosen)
        losses, (before, after), model, optimizer = trained
        rt.print(f"{rt.updates} steps on {rt.device}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
        rt.print(f"unseen text: {before:.3f} -> {after:.3f}")
        if options.save:
            rt.save(options.save, model=model, optimizer=optimizer)
