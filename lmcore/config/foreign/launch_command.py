"""Commands that start training in Megatron's forks: the program, its launcher, its arguments."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lmcore.base.errors import ConfigError
from lmcore.config.foreign.shell import ShellScript
from lmcore.config.foreign.shell_values import shell_line

__all__ = [
    "OtherProgram",
    "TrainingCommand",
    "is_program",
    "other_programs",
    "programs_by_hand",
    "training_command",
    "trains",
]

_FAMILIES = {
    "pretrain_bert": "bert",
    "pretrain_ict": "ict",
    "pretrain_retro": "retro",
    "pretrain_t5": "t5",
}
_TRAINS = re.compile(r"(pretrain|finetune|train)_(gpt|llama|bert|t5|ict|retro)\w*\.py")
_OTHER_MODELS = re.compile(r"(pretrain|finetune|train)_\w+\.py")
_OTHER_PROGRAMS: Mapping[str, str] = {
    "preprocess_data.py": "lmcore data prepare",
    "preprocess_data_many_cores.py": "lmcore data prepare",
    "preprocess_data_dist.py": "lmcore data prepare",
    "merge_datasets.py": "lmcore data merge",
    "merge_preprocessed_data.py": "lmcore data merge",
    "split_json.py": "lmcore data split",
    "run_text_generation_server.py": "lmcore serve",
    "generate_samples_gpt.py": "lmcore generate",
    "generate_samples_gpt2.py": "lmcore generate",
    "gpt_static_inference.py": "lmcore generate",
    "simple_gpt_batch_inference.py": "lmcore generate",
    "text_generation_cli.py": "lmcore ask",
    "create_doc_index.py": "lmcore index build",
    **dict.fromkeys(
        (
            *("checkpoint_util.py", "merge_mp_partitions.py", "deepspeed_to_megatron.py"),
            *("deepspeed_to_transformers.py", "hf2megads_weight_converter.py", "zero_to_fp32.py"),
        ),
        "lmcore checkpoint convert",
    ),
}
"""Programs beside training, by file name, with the command that replaces each."""
_BY_PATH: Mapping[str, str] = {
    "tasks/main.py": "lmcore evaluate",
    "checkpoint/convert.py": "lmcore checkpoint convert",
    "checkpoint/util.py": "lmcore checkpoint convert",
}
"""The same, by the end of their path."""
_BY_HAND: Mapping[str, str] = {
    "get_meta_data.py": "`lmcore data weights --input DIR --metadata-output FILE`",
    "gen_file_list.py": "`lmcore data weights --metadata FILE --epochs FILE --output FILE`",
    "merge_datasets_split.py": "`lmcore data split --datasets PREFIX --samples N`",
    "load_ratios_meg_ds_format.py": "`lmcore data weights`, or a list of your own",
    "inspect_checkpoint.py": "`lmcore checkpoint inspect DIR`",
    "adjust_checkpoint.py": "`lmcore checkpoint edit`",
    "convert_bloom_original_checkpoint_to_pytorch.py": (
        "`lmcore checkpoint convert IN OUT --to huggingface`"
    ),
    "blacklist_urls.py": "`lmcore data clean url`",
    **dict.fromkeys(
        ("cleanup_dataset.py", "cleanup_fix_dataset.py"), "`lmcore data clean fix language length`"
    ),
    **dict.fromkeys(
        (
            *("find_duplicates.py", "group_duplicate_url.py", "group_duplicates_url.py"),
            "remove_group_duplicates.py",
        ),
        "`lmcore data clean near`",
    ),
    "filter_ngrams.py": "`lmcore data clean ngram --tasks FILE`",
    "add_id.py": "nothing: `lmcore data clean` names documents by file and line",
    "merge_jsons.py": "nothing: `--input` takes several files, patterns and directories",
    **dict.fromkeys(
        ("perspective_api.py", "perspective_api_annotate.py", "filter-selfgeneration.py"),
        "the example `detoxify.sh` of lmcore's sources, with a scorer of your own",
    ),
    "mix_datasets.py": "`lmcore data weights --epochs FILE`, or a list of your own",
}
"""Programs whose flags are not translated, with what takes their place."""
_BY_HAND_PATH: Mapping[str, str] = dict.fromkeys(
    ("retro/main.py", "retro/preprocess_data.py"),
    "`lmcore data retro --retro-project-dir DIR`, with the options of the Retro's training",
)
"""The same, by the end of their path."""
_PRINTS = frozenset({"echo", "printf"})
_SUBMITS = frozenset({"bash", "sh", "sbatch", "qsub"})
_VARIABLE = re.compile(r"\$\{?[A-Za-z_]\w*(\[[@*]\])?\}?")
_MENTION = re.compile(r"(?:pretrain|finetune)_[^\s\"']*")
_OUTER = frozenset({"srun", "mpiexec", "mpirun", "aprun"})
_LAUNCHERS = _OUTER | {"torchrun", "deepspeed"}
_MODULES = frozenset({"torch.distributed.launch", "torch.distributed.run"})
_PYTHON = re.compile(r"python[\d.]*|-u|-W\w*")
"""Words of a launcher's command that start Python, which `lmcore` does not need."""
_PROCESSES = ("--nproc_per_node", "--nproc-per-node", "--num_gpus", "--ppn")
_NODES = ("--nnodes", "--num_nodes", "-N", "--nodes")
_OF_TASKS = re.compile(r"\$\{?(SLURM_(PROC|NODE|LOCAL)ID|PMI_RANK|PALS_\w*RANK\w*|OMPI_\w*RANK)\b")
"""Variables that differ between the tasks of `srun` or `mpiexec`."""


@dataclass(frozen=True)
class TrainingCommand:
    """Command of a script that trains a model.

    Attributes:
        launch: Words before the program: the launcher with its flags, and Python.
        program: Name of the program's file.
        flags: Arguments of the program.
    """

    launch: Sequence[str]
    program: str
    flags: Sequence[str]

    @property
    def family(self) -> str | None:
        """Family of models that the program trains; None for GPT, whose flags say the rest."""
        return next(
            (name for start, name in _FAMILIES.items() if self.program.startswith(start)), None
        )

    def start(self, name: str, unknown: Sequence[str] = ()) -> str:
        """Return the command that starts the run with the processes of the original's launcher.

        Args:
            name: Path of the file of settings.
            unknown: Texts of the words that a shell replaces.
        """
        command = ["lmcore", "train", name]
        values = dict(_launch_values(self.launch))
        processes = next((values[one] for one in _PROCESSES if values.get(one, "").isdigit()), None)
        nodes = next((values[one] for one in _NODES if values.get(one)), "1")
        words = list(self.launch)
        if _MODULES & {*words}:  # `python -u -m torch.distributed.launch`
            place = next(n for n, one in enumerate(words) if one in _MODULES)
            begin = max(n for n in range(place) if words[n].rpartition("/")[2].startswith("python"))
            words[begin : place + 1] = ["torchrun"]
        names = [one.rpartition("/")[2] for one in words]
        if nodes == "1" and not {*names} & _OUTER:
            return shlex.join([*command, *(["--nproc-per-node", processes] if processes else [])])
        while words and _PYTHON.fullmatch(words[-1].rpartition("/")[2]):
            words.pop()
        if "deepspeed" in names:
            return f'{shell_line(words, unknown)} "$(command -v lmcore)" train {shlex.quote(name)}'
        if "torchrun" not in names:
            return shell_line([*words, *command], unknown)
        place = names.index("torchrun")
        inner = shell_line([*words[place:], "-m", *command], unknown)
        if _OF_TASKS.search(inner):  # each task has its own value, which its own shell reads
            inner = f"bash -c {shlex.quote(inner)}"
        return f"{shell_line(words[:place], unknown)} {inner}".lstrip()


@dataclass(frozen=True)
class OtherProgram:
    """Command of a script that runs a program beside training.

    Attributes:
        program: Name of the program's file.
        command: Command of lmcore that replaces it.
        flags: Arguments of the program.
    """

    program: str
    command: str
    flags: Sequence[str]


def _other_command(word: str) -> str | None:
    """Return the command of lmcore for a word that is the path of a program; None if it is not."""
    if word.endswith((*_BY_HAND_PATH,)):
        return None
    by_path = next((command for end, command in _BY_PATH.items() if word.endswith(end)), None)
    return by_path or _OTHER_PROGRAMS.get(word.rpartition("/")[2])


def other_programs(script: ShellScript) -> list[OtherProgram]:
    """Return the commands of a script that run a program beside training, each once, in order."""
    found: list[OtherProgram] = []
    for words in script.commands:
        for number, word in enumerate(words):
            command = _other_command(word)
            if command is not None:
                program = word.rpartition("/")[2]
                one = OtherProgram(program, command, words[number + 1 :])
                found += [] if one in found else [one]
                break
    return found


def programs_by_hand(script: ShellScript) -> list[str]:
    """Return a line for each program of a script whose flags are not translated, in order."""
    found = dict.fromkeys(
        (word.rpartition("/")[2], here)
        for words in script.commands
        for word in words
        if (here := _by_hand(word)) is not None
    )
    return [f"`{name}` is not translated; in its place: {here}" for name, here in found]


def _by_hand(word: str) -> str | None:
    """Return what takes the place of a program that is not translated; None for other words."""
    by_path = next((here for end, here in _BY_HAND_PATH.items() if word.endswith(end)), None)
    return by_path or _BY_HAND.get(word.rpartition("/")[2])


def trains(script: ShellScript) -> bool:
    """Return True if a command of the script is a program that trains a model, also of others."""
    names = (word.rpartition("/")[2] for words in script.commands for word in words)
    return any(_OTHER_MODELS.fullmatch(name) for name in names)


def is_program(word: str) -> bool:
    """Return True for the first word of a command that is given in place of a script."""
    name = word.rpartition("/")[2]
    return name.endswith(".py") or name.startswith("python") or name in _LAUNCHERS


def training_command(script: ShellScript) -> TrainingCommand:
    """Return the one command of a script that trains a model.

    Args:
        script: The script.

    Raises:
        ConfigError: There is none, or there are several that differ.
    """
    found: list[TrainingCommand] = []
    printed: list[TrainingCommand] = []  # `echo $CMD`
    others: list[str] = []
    for words in script.commands:
        for number, word in enumerate(words):
            name = word.rpartition("/")[2]
            command = _other_command(word)
            if command is not None:
                others.append(f"`{name}` is `{command}` here")
            elif _TRAINS.fullmatch(name):
                one = TrainingCommand(words[:number], name, words[number + 1 :])
                (printed if words[0] in _PRINTS else found).append(one)
            elif _OTHER_MODELS.fullmatch(name):
                others.append(f"the model of `{name}` is not trained here")
            else:
                continue
            break
    found = found or [TrainingCommand(one.launch[1:], one.program, one.flags) for one in printed]
    if not found:
        raise _no_training([*others, *programs_by_hand(script)], script)
    if any(one.flags != found[0].flags for one in found):
        raise ConfigError(
            f"the script trains {len(found)} times, with different flags",
            hint="give one of the commands: `lmcore migrate -- python pretrain_gpt.py ...`",
        )
    return found[0]


def _no_training(others: Sequence[str], script: ShellScript) -> ConfigError:
    """Return the error for a script without a command that trains, with what it has instead."""
    reasons, hint = list(others), ""
    if others and [*others] == programs_by_hand(script):
        hint = "replace it by hand; `--help` after a command of lmcore lists its flags"
    for words in script.commands:
        called = next((one for one in words[1:] if not one.startswith("-")), "")
        if words[0].rpartition("/")[2] in _SUBMITS and called and not _is_open(called):
            reasons.append(f"`{words[0]} {called}` runs another script, which is not read")
            hint = hint or f"read that one: `lmcore migrate {shlex.quote(called)}`"
        elif _VARIABLE.fullmatch(words[0]):
            reasons.append(f"the command `{words[0]}` is the value of a variable without a value")
            hint = hint or (
                "let the script print the command instead of running it, and give what it prints: "
                "`lmcore migrate -- mpiexec ... pretrain_gpt.py ...`"
            )
    lines = enumerate(script.text.splitlines(), 1)
    mention = next(
        ((n, held) for n, line in lines if (held := _MENTION.search(line.partition("#")[0]))), None
    )
    if not reasons and mention is not None:
        reasons.append(
            f"line {mention[0]} has `{mention[1].group()}`, which is not the name of a program, or "
            "which no command starts"
        )
    return ConfigError(
        "the script has no command that trains a model",
        why="; ".join(dict.fromkeys(reasons))
        or "none of its commands runs `pretrain_gpt.py` or a program like it",
        hint=hint
        or "give the command that starts it: `lmcore migrate -- python pretrain_gpt.py ...`",
    )


def _is_open(word: str) -> bool:
    """Return True for a word with a value that only a run of the script has."""
    return "$" in word or "`" in word


def _launch_values(launch: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the flags of a launcher, each with the word after it."""
    for word, after in zip(launch, [*launch, ""][1:], strict=True):
        if word.startswith("-"):
            flag, equals, value = word.partition("=")
            yield flag, value if equals else after
