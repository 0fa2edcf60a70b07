"""The commands of the core and of the packages made beside it: a record for each.

Help, dispatch and documents are made from the records.  A command of a package that is not
installed is listed with what to install, and is an error that says so when it is used.
"""

from __future__ import annotations

from collections.abc import Mapping

from lmcore.model.command import Command

__all__ = ["COMMANDS", "GROUPS", "known_commands", "known_inner", "own_names"]

COMMANDS: Mapping[str, tuple[Command, ...]] = {
    "model": (
        Command(
            "train",
            "Train a model of a family; without arguments a small GPT on a bundled text.",
            "lmcore.cli.train:run",
        ),
        Command("generate", "Continue a text with a trained model.", "lmcore.cli.generate:run"),
        Command(
            "evaluate",
            "Score trained models on tasks, or by the perplexity of a text.",
            "lmcore.cli.evaluate:run",
        ),
        Command(
            "serve",
            "Answer requests for text over HTTP, with a page to try a model.",
            package="lmcore-serve",
            extra="serve",
        ),
        Command(
            "ask",
            "Send prompts to a running lmcore or Megatron-LM server.",
            package="lmcore-serve",
            extra="serve",
        ),
        Command(
            "checkpoint",
            "Inspect, verify, diff, edit and convert checkpoints.",
            "lmcore.cli.checkpoint:run",
        ),
        Command(
            "migrate",
            "Turn the launch script of a Megatron fork into settings and commands of lmcore.",
            "lmcore.cli.migrate:run",
        ),
    ),
    "search": (
        Command(
            "index",
            "Build an index of blocks of text, and search it by questions.",
            "lmcore.cli.index:run",
        ),
    ),
    "your own script": (
        Command(
            "run",
            "Run a Python script of your own in one process for each device.",
            "lmcore.cli.run:run",
        ),
    ),
    "a cluster": (
        Command(
            "launch",
            "Write or submit the job that runs a command on a host, hosts or a cluster.",
            "lmcore.cli.launch:run",
        ),
    ),
    "data": (
        Command(
            "data",
            "Prepare and inspect datasets, list the bundled texts.",
            "lmcore.cli.data:run",
        ),
    ),
    "this machine": (
        Command(
            "config",
            "Show every setting of a run and its source; check them.",
            "lmcore.cli.config:run",
        ),
        Command(
            "plugins",
            "List the installed accelerators, and why one is not used.",
            "lmcore.cli.plugin.list:run",
        ),
        Command(
            "ops",
            "List the ops and their kernels, and explain which kernel a case gets.",
            "lmcore.cli.ops:run",
        ),
        Command("doctor", "Check this installation and name the fixes.", "lmcore.cli.doctor:run"),
        Command(
            "plugin",
            "Write or check a plugin; the package lmcore-conformance adds the commands.",
            "lmcore.cli.plugin:run",
        ),
    ),
}
"""Every command of one word, under the title that the help groups it by."""

GROUPS: Mapping[str, tuple[Command, ...]] = {
    "checkpoint": (
        Command(
            "checkpoint inspect",
            "Show the contents of a checkpoint: its run, its model and its tensors.",
            "lmcore.cli.checkpoint.inspect:run",
        ),
        Command(
            "checkpoint verify",
            "Compare checkpoints with their checksums.",
            "lmcore.cli.checkpoint.verify:run",
        ),
        Command(
            "checkpoint diff",
            "Compare two checkpoints tensor by tensor.",
            "lmcore.cli.checkpoint.diff:run",
        ),
        Command(
            "checkpoint edit",
            "Write an edited copy: tensors renamed, dropped, cast, the vocabulary resized.",
            "lmcore.cli.checkpoint.edit:run",
        ),
        Command(
            "checkpoint convert",
            "Write a checkpoint in another format, such as Hugging Face's.",
            "lmcore.cli.checkpoint.convert:run",
        ),
    ),
    "data": (
        Command(
            "data prepare",
            "Tokenize documents into an indexed dataset.",
            "lmcore.cli.data.prepare:run",
        ),
        Command(
            "data inspect",
            "Show and check the contents of an indexed dataset.",
            "lmcore.cli.data.inspect:run",
        ),
        Command("data merge", "Merge indexed datasets.", "lmcore.cli.data.merge:run"),
        Command(
            "data split",
            "Split datasets into smaller ones, or JSON lines into train, dev and test.",
            "lmcore.cli.data.split:run",
        ),
        Command(
            "data weights",
            "Compute weights of datasets from their tokens, for a data file list.",
            "lmcore.cli.data.weights:run",
        ),
        Command(
            "data repair",
            "Repair names, a missing or damaged index, uncounted end tokens.",
            "lmcore.cli.data.repair:run",
        ),
        Command(
            "data clean",
            "Clean a corpus with a chain of steps.",
            package="lmcore-data-tools",
            extra="data",
        ),
        Command(
            "data train-tokenizer",
            "Train the vocabulary of a tokenizer on text.",
            package="lmcore-data-tools",
            extra="data",
        ),
        Command(
            "data retro",
            "Find the neighbours of a run's samples among the chunks of its data, for Retro.",
            "lmcore.cli.data.retro:run",
        ),
        Command(
            "data corpora",
            "List the texts for `lmcore train --corpus`.",
            "lmcore.cli.data.corpora:run",
        ),
    ),
    "index": (
        Command(
            "index build",
            "Compute the vectors of all blocks of a dataset by a trained encoder.",
            "lmcore.cli.index.build:run",
        ),
        Command(
            "index search",
            "Find the blocks that a question asks for, or score a file of questions.",
            "lmcore.cli.index.search:run",
        ),
    ),
    "launch": (
        Command(
            "launch local",
            "Write or run a script that starts the processes on this host.",
            "lmcore.cli.launch:local",
        ),
        Command(
            "launch hostfile",
            "Write or run a script that starts the processes on several hosts, by ssh.",
            "lmcore.cli.launch:hostfile",
        ),
        Command(
            "launch slurm",
            "Write or submit an sbatch script for Slurm.",
            "lmcore.cli.launch:slurm",
        ),
        Command(
            "launch k8s",
            "Write or create a PyTorchJob of Kubernetes.",
            "lmcore.cli.launch:k8s",
        ),
        Command(
            "launch pbs",
            "Write or submit a script for PBS.",
            "lmcore.cli.launch:pbs",
        ),
    ),
    "config": (
        Command(
            "config show",
            "Show every setting of a run and its source; check them.",
            "lmcore.cli.config:show",
        ),
    ),
    "ops": (
        Command(
            "ops list",
            "List the ops, and the kernels for them on this machine.",
            "lmcore.cli.ops:list_ops",
        ),
        Command(
            "ops explain",
            "Explain which kernel an op would use, and why the others were rejected.",
            "lmcore.cli.ops:explain",
        ),
    ),
    "plugin": (
        Command(
            "plugin new",
            "Write a new plugin: a distribution with tests, to be filled in.",
            package="lmcore-conformance",
        ),
        Command(
            "plugin check",
            "Check a plugin: call its hooks, and name each fault with its cause.",
            package="lmcore-conformance",
        ),
    ),
}
"""Every command of two words by its group, to which plugins add theirs."""


def known_commands() -> dict[str, Command]:
    """Return every command of one word by its name."""
    return {one.name: one for titled in COMMANDS.values() for one in titled}


def known_inner(group: str) -> dict[str, Command]:
    """Return the commands of a group by their second word; empty for another word."""
    return {one.name.partition(" ")[2]: one for one in GROUPS.get(group, ())}


def own_names() -> list[str]:
    """Return the names that are the core's: no plugin can add a command with one of them."""
    inner = [one for group in GROUPS.values() for one in group]
    return [one.name for one in (*known_commands().values(), *inner) if one.load]
