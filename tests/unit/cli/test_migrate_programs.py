"""`lmcore migrate` of programs beside training: data, evaluation, generation, conversion."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lmcore.cli.migrate import run
from lmcore.cli.migrate.programs import migrate_program
from lmcore.config.foreign.launch_command import OtherProgram

LISTS = Path(__file__).resolve().parents[4] / "shared" / "data" / "flags"
GPT2 = "--tokenizer-type GPT2BPETokenizer --vocab-file v.json --merge-file m.txt"


@pytest.mark.parametrize(
    "command,line",
    [
        (
            (
                f"tools/preprocess_data.py --input a.jsonl --output-prefix b {GPT2} "
                "--dataset-impl mmap --append-eod --workers 8 --json_keys=text"
            ),
            (
                f"lmcore data prepare --input a.jsonl --output-prefix b {GPT2} --dataset-impl mmap "
                "--append-eod --workers 8 --json_keys=text"
            ),
        ),
        (
            "preprocess_data_many_cores.py --vocab v.json --input a",
            "lmcore data prepare --vocab-file v.json --input a",
        ),
        (
            "merge_preprocessed_data.py --datasets a b --output-prefix c",
            "lmcore data merge --datasets a b --output-prefix c",
        ),
        (
            "scripts/split_json.py --input_files a.json --output_dir b --test_percent 0.05 0.01",
            "lmcore data split --input_files a.json --output_dir b --test_percent 0.05 0.01",
        ),
        (
            "tools/merge_datasets.py --input dir --output-prefix c --multimodal",
            "lmcore data merge --input dir --output-prefix c",
        ),
        (
            (
                "Megatron-LM/tasks/main.py --task LAMBADA --valid-data l.jsonl --strict-lambada "
                "--load ckpt --num-layers 2 --micro-batch-size 8"
            ),
            "lmcore evaluate ckpt --task lambada_strict --task-data lambada_strict=l.jsonl",
        ),
        (
            (
                f"generate_samples_gpt.py --load ckpt --num-layers 2 {GPT2} --genfile out.json "
                "--num-samples 3 --top_p 0.9 --out-seq-length 100 --recompute"
            ),
            (
                f"lmcore generate --load ckpt {GPT2} --sample-output-file out.json --num-samples 3 "
                "--top_p 0.9 --out-seq-length 100 --no-cache"
            ),
        ),
        ("tools/text_generation_cli.py localhost:5000", "lmcore ask localhost:5000"),
        (
            (
                "tools/run_text_generation_server.py --load ckpt --num-layers 2 --port 5001 --bf16 "
                "--temperature 1.0"
            ),
            "lmcore serve --load ckpt --port 5001 --precision bf16",
        ),
        (
            (
                "tools/run_text_generation_server.py --load ckpt --max-batch-size 8 "
                "--max-tokens-to-oom 90 --num-tokens-to-generate 30 --return-log-probs --stream"
            ),
            "lmcore serve --load ckpt --max-requests 8 --max-tokens-to-oom 90",
        ),
        (
            (
                "examples/gpt_static_inference.py --load ckpt --inference-max-requests 4 --stream "
                "--num-tokens-to-generate 30 --return-log-probs --prompts Once --top_k 1"
            ),
            (
                "lmcore generate --load ckpt --micro-batch-size 4 --tokens 30 --json --logprobs 0 "
                "--prompt=Once --top_k 1"
            ),
        ),
        (
            (
                "tools/checkpoint_util.py --model-type GPT --load-dir a --save-dir b "
                "--target-tensor-parallel-size 2"
            ),
            (
                "lmcore checkpoint convert a b --tensor-model-parallel-size 2 --to megatron "
                "--megatron-names legacy"
            ),
        ),
        (
            (
                "tools/create_doc_index.py --ict-load a --data-path d --num-layers 2 "
                "--block-data-path b --indexer-batch-size 8 --batch-size 4"
            ),
            "lmcore index build --ict-load a --data-path d --output b --micro-batch-size 8",
        ),
        (
            (
                "tasks/main.py --task RACE --train-data t --valid-data u v --num-layers 2 "
                "--pretrained-checkpoint c --save s --fp16 --weight-decay 0.5 --epochs 3 "
                "--eval-iters 10"
            ),
            (
                "lmcore evaluate c --task race --finetune --train-data t --valid-data u v --save s "
                "--epochs 3 -- --num-layers 2 --precision fp16 --weight-decay 0.5"
            ),
        ),
        (
            "tools/convert_checkpoint/deepspeed_to_megatron.py --input_folder a --output_folder b",
            "lmcore checkpoint convert a b --to megatron --megatron-names legacy",
        ),
        (
            (
                "tools/merge_mp_partitions.py --model-type GPT --tensor-model-parallel-size 4 "
                "--target-pipeline-model-parallel-size 2 --load a --save b --num-layers 2"
            ),
            (
                "lmcore checkpoint convert a b --pipeline-model-parallel-size 2 --to megatron "
                "--megatron-names legacy"
            ),
        ),
    ],
)
def test_a_program_becomes_a_command(command, line, capsys):
    """The command is the standard output, and each flag has a row on the standard error."""
    assert run(["--", "python", *command.split()]) == 0
    out, err = capsys.readouterr()
    assert out == f"{line}\n"
    given = re.findall(r"(?<!\S)--[a-z][\w-]*", command)
    rows = [row for row in err.splitlines() if row.startswith("--")]
    assert [re.match(r"--[a-z][\w-]*", row)[0] for row in rows] == given
    assert "unknown" not in err


@pytest.mark.skipif(not LISTS.is_dir(), reason="the lists of flags are not here")
@pytest.mark.parametrize("program", ["run_text_generation_server", "generate_samples_gpt"])
def test_no_flag_of_a_server_or_generation_tool_is_unknown(program, capsys):
    """Every flag of the tools, and of the runs whose flags they take, has a row with its fate."""
    paths = [*LISTS.glob("*generate.tsv"), *LISTS.glob("*mega*.tsv")]
    assert len(paths) == 5
    for path in paths:
        lines = path.read_text("utf-8").splitlines()[1:]
        flags = [line.split("\t")[0] for line in lines]
        for values in ([], ["1"]):
            words = [word for flag in flags for word in (flag, *values)]
            run(["--", "python", f"{program}.py", *words])
            err = capsys.readouterr().err
            assert [row for row in err.splitlines() if "  unknown" in row] == []


def test_programs_of_a_script(tmp_path, capsys):
    """Variables are followed; each program has a command, in order; the file has them alone."""
    script = tmp_path / "data.sh"
    script.write_text(
        'IN=/data/oscar\nfor n in 0 1; do\npython tools/preprocess_data.py --input "$IN/a b.jsonl" '
        "--output-prefix x --no-such-flag 3\ndone\n"
        "srun python merge_datasets.py --input $WHERE --output-prefix all\n"
    )
    assert run([str(script), "--output", str(tmp_path / "all.sh")]) == 0
    assert (tmp_path / "all.sh").read_text() == (
        "lmcore data prepare --input '/data/oscar/a b.jsonl' --output-prefix x\n"
        'lmcore data merge --input "$WHERE" --output-prefix all\n'
    )
    err = capsys.readouterr().err
    assert re.search(r"--no-such-flag 3 +unknown", err)
    assert re.search(r"--input '\$WHERE' +has no value", err)


def test_a_script_that_trains_too(tmp_path, capsys):
    """The settings are of the training; the other program's table and command follow."""
    script = tmp_path / "all.sh"
    script.write_text(
        "python preprocess_data.py --input a --output-prefix b\n"
        "python pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 2\n"
    )
    assert run([str(script)]) == 0
    out, err = capsys.readouterr()
    assert "num_layers: 2" in out
    assert "preprocess_data.py:" in err
    assert "start it by:  lmcore data prepare --input a --output-prefix b" in err
    assert "start it by:  lmcore train run.yaml" in err


def test_an_incomplete_command_says_what_is_missing(capsys):
    """A task without its file is shown as far as it goes, with the reason."""
    assert run(["--", "python", "tasks/main.py", "--task", "LAMBADA", "--load", "x"]) == 0
    assert "incomplete: `--task LAMBADA` needs `--valid-data FILE`" in capsys.readouterr().err


def test_a_conversion_without_a_target_is_incomplete(capsys):
    """The layout to write is no layout of the checkpoint, and the directory is asked for."""
    flags = "--target-pipeline-model-parallel-size 2 --load a"
    assert run(["--", "python", "tools/merge_mp_partitions.py", *flags.split()]) == 0
    err = capsys.readouterr().err
    assert "incomplete: no directory to write is given: add TARGET" in err
    assert re.search(r"parallel-size 2 +renamed: --pipeline-model-parallel-size", err)


PROGRAMS = {
    "convert": ("checkpoint_util.py", "lmcore checkpoint convert"),
    "generate": ("generate_samples_gpt.py", "lmcore generate"),
    "preprocess": ("preprocess_data.py", "lmcore data prepare"),
    "tasks": ("main.py", "lmcore evaluate"),
}


@pytest.mark.parametrize("tool", PROGRAMS)
@pytest.mark.parametrize("fork", ["argonne", "bigscience"])
def test_no_flag_of_the_tools_is_unknown(fork, tool):
    """Each flag of the lists has a row with its meaning here, or the reason against it."""
    if not LISTS.is_dir():
        pytest.skip(f"no lists at {LISTS}")
    rows = (LISTS / f"{fork}_{tool}.tsv").read_text().splitlines()[1:]
    program, command = PROGRAMS[tool]
    unknown = []
    for row in rows:
        flag = row.partition("\t")[0]
        for words in ([flag], [flag, "1"]):
            found, *strays = migrate_program(OtherProgram(program, command, words)).rows
            assert [one.flag for one in strays] in ([], words[1:])  # a switch takes no value
            if found.kind == "unknown":
                unknown.append(found.flag)
    assert unknown == []
