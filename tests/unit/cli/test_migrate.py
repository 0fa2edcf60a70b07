"""`lmcore migrate`: launch scripts of Megatron's forks become files of settings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lmcore.base.errors import ConfigError
from lmcore.cli.main import main
from lmcore.cli.migrate import run
from lmcore.config.load import load_config

BIGSCIENCE = """\
#!/bin/bash
CHECKPOINT_PATH=checkpoints/gpt2
MICRO=1
N_GPUS=2
GPT_ARGS=" \\
 --num-layers 2 --hidden-size 64 --num-attention-heads 2 \\
 --seq-length 1024 --max-position-embeddings 1024 \\
 --micro-batch-size $MICRO --rampup-batch-size 2 2 1_000 --global-batch-size 16 \\
 --train-samples 100 --lr 1e-4 --lr-warmup-samples 5 --fp16 \\
 --tokenizer-type NullTokenizer --vocab-size 1000 \\
"
# GPT_ARGS="$GPT_ARGS --lr 5"
config_json="./ds_config.json"
cat <<EOT > $config_json
{"train_micro_batch_size_per_gpu": $MICRO, "train_batch_size": 16, "gradient_clipping": 0.5,
 "zero_optimization": {"stage": 1}, "fp16": {"enabled": true, "initial_scale_power": 12},
 "steps_per_print": 2000}
EOT
ARGS="--deepspeed --deepspeed_config ${config_json} --zero-stage 1 --checkpoint-activations \\
 --log-batch-size-to-tensorboard --codecarbon-dir out --no-such-flag 3 --save $CHECKPOINT_PATH"
LAUNCHER="deepspeed --num_gpus $N_GPUS"
CMD="$LAUNCHER pretrain_gpt.py --pipeline-model-parallel-size 2 $GPT_ARGS $ARGS --load $MISSING"
echo $CMD
$CMD
"""


def script(folder: Path, text: str = BIGSCIENCE) -> str:
    path = folder / "train.sh"
    path.write_text(text, encoding="utf-8")
    return str(path)


def migrated(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """Return the settings and the report of a command."""
    assert run(words) == 0
    out, err = capsys.readouterr()
    return out, err


@pytest.mark.parametrize("backend", ["nccl", "ccl", "xccl", "gloo", "$BACKEND"])
@pytest.mark.parametrize("flag", ["--distributed-backend ", "--distributed_backend="])
def test_backend_is_the_devices(
    flag: str, backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The backend of the script's device is left out of the settings, and the table says so."""
    line = f"python pretrain_gpt.py --num-layers 2 {flag}{backend}\n"
    text, report = migrated([script(tmp_path, line)], capsys)
    assert "distributed_backend" not in text
    row = next(one for one in report.splitlines() if flag.strip() in one)
    assert "left out: the device's own backend is the default" in row


def test_a_published_script_becomes_settings_that_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Variables, the here-document of the engine's file and the fork's defaults are settings."""
    text, report = migrated([script(tmp_path), "--defaults", "bigscience"], capsys)
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    loaded = load_config([str(tmp_path / "run.yaml")], announce=False)
    wanted = {
        "num_layers": 2,
        "global_batch_size": 16,
        "rampup_batch_size": (2, 2, 1000),
        "lr": 1e-4,
        "lr_decay_style": "linear",
        "hidden_dropout": 0.1,
        "precision": "fp16",
        "initial_loss_scale": 4096.0,
        "clip_grad": 0.5,
        "zero_stage": 1,
        "pipeline_model_parallel_size": 2,
        "recompute": "full",
        "split_rule": "legacy",
        "engine": "native",
    }
    assert {name: loaded.value(name) for name in wanted} == wanted
    assert loaded.value("save") == str(tmp_path / "checkpoints/gpt2")
    rows = dict(re.findall(r"^(--\S+).*?  (\w[^:\n]*)", report, re.MULTILINE))
    assert rows["--num-layers"] == "same"
    assert rows["--fp16"] == "renamed"
    assert rows["--log-batch-size-to-tensorboard"] == "already so"
    assert rows["--no-such-flag"] == "unknown"
    assert rows["--load"] == "has no value"
    assert "$MISSING" in report
    assert "lmcore train run.yaml --nproc-per-node 2" in report


TENSORBOARD = "python pretrain_gpt.py --num-layers 2 --tensorboard-dir events"


def test_a_value_is_given_for_a_variable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--set` fills what the script lacks; `--output` takes paths relative to the file."""
    out = tmp_path / "configs/run.yaml"
    out.parent.mkdir()
    words = [script(tmp_path), "--set", "MISSING=old", "--set", "MICRO=1", "--output", str(out)]
    text, _ = migrated(words, capsys)
    assert "num-layers" in text  # the table
    settings = out.read_text(encoding="utf-8")
    assert re.search(r"load: .*old", settings)


@pytest.mark.parametrize("output", ["configs/run.yaml", "{}/configs/run.yaml", "../run.yaml"])
def test_paths_relative_to_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    """A path of the working directory is found from the file, wherever `--output` puts it."""
    work = tmp_path / "work"
    (work / "configs").mkdir(parents=True)
    monkeypatch.chdir(work)
    out = Path(output.format(work))
    assert main(["migrate", "--output", str(out), "--", *TENSORBOARD.split()]) == 0
    (found,) = re.findall(r'tensorboard_dir: "?([^" ]+)', out.read_text(encoding="utf-8"))
    assert (out.resolve().parent / found).resolve() == work / "events"


@pytest.mark.parametrize(
    "launch,start",
    [
        ("python", "lmcore train run.yaml"),
        ("srun", "srun lmcore train run.yaml"),
        ("torchrun --nproc_per_node=8", "lmcore train run.yaml --nproc-per-node 8"),
        (
            "python -m torch.distributed.launch --nproc_per_node 4 --nnodes 1",
            "lmcore train run.yaml --nproc-per-node 4",
        ),
        ("mpiexec -n 24 --ppn 12 python3", "mpiexec -n 24 --ppn 12 lmcore train run.yaml"),
        ("srun -n 4 python -u", "srun -n 4 lmcore train run.yaml"),
        (
            "mpiexec -n 24 --ppn 12 --pmi=pmix --genvall /opt/bin/python3 -Wignore",
            "mpiexec -n 24 --ppn 12 --pmi=pmix --genvall lmcore train run.yaml",
        ),
        (
            "torchrun --nnodes 4 --nproc_per_node 8",
            "torchrun --nnodes 4 --nproc_per_node 8 -m lmcore train run.yaml",
        ),
        (
            "srun python -u -m torch.distributed.launch --nnodes 4",
            "srun torchrun --nnodes 4 -m lmcore train run.yaml",
        ),
        (
            "deepspeed --hostfile hosts --num_nodes 2",
            'deepspeed --hostfile hosts --num_nodes 2 "$(command -v lmcore)" train run.yaml',
        ),
    ],
)
def test_the_start_follows_the_launcher(
    launch: str, start: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command without a script: its launcher's processes are kept."""
    flags = "--num-layers 2 --hidden-size 64 --num-attention-heads 2"
    _, report = migrated(["--", *launch.split(), "pretrain_gpt.py", *flags.split()], capsys)
    assert f"start it by:  {start}" in report


@pytest.mark.parametrize(
    "launch,start",
    [
        (
            'srun -l --image "$(pwd)/a.sqsh" python -m torch.distributed.run --nnodes=$NODES',
            'srun -l --image "$(pwd)/a.sqsh" torchrun "--nnodes=$NODES" -m lmcore train run.yaml',
        ),
        (
            "srun bash -c 'torchrun --nnodes 2 --node_rank $SLURM_PROCID",
            (
                'srun bash -c \'torchrun --nnodes 2 --node_rank "$SLURM_PROCID" '
                "-m lmcore train run.yaml'"
            ),
        ),
    ],
)
def test_the_start_leaves_variables_to_the_shell(
    launch: str, start: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The shell replaces what only a run knows; a task's variables are left to the task."""
    end = "'" if launch.count("'") % 2 else ""
    text = f"{launch} pretrain_gpt.py --num-layers 2{end}\n"
    _, report = migrated([script(tmp_path, text)], capsys)
    assert f"start it by:  {start}\n" in report


@pytest.mark.parametrize("runner", ["bash", "sh", "sbatch"])
def test_the_command_that_starts_the_script(
    runner: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`bash SCRIPT` and `sbatch SCRIPT` name the script; a further word is an error."""
    path = script(tmp_path, "python pretrain_gpt.py --num-layers 3\n")
    text, _ = migrated([runner, path], capsys)
    assert "num_layers: 3" in text
    with pytest.raises(ConfigError, match="needs a script"):
        run([runner, path, "more"])


@pytest.mark.parametrize("program,family", [("bert", "bert"), ("t5", "t5"), ("gpt2", "gpt")])
def test_the_program_names_the_family(
    program: str, family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`pretrain_bert.py` trains a BERT."""
    text, _ = migrated(["python", f"pretrain_{program}.py", "--num-layers", "2"], capsys)
    assert (f"model_family: {family}" in text) == (family != "gpt")


@pytest.mark.parametrize(
    "words,what",
    [
        (["none.sh"], "cannot read the script"),
        ([], "needs a script"),
        (["--set", "A"], "sets nothing"),
        (["python", "pretrain_mamba.py"], "no command that trains"),
    ],
)
def test_what_is_no_training_is_refused(
    words: list[str], what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path that cannot be read, nothing at all, and models that are not trained here."""
    monkeypatch.chdir(tmp_path)
    if words[:1] == ["--set"]:
        words = [script(tmp_path), *words]
    with pytest.raises(ConfigError, match=what) as caught:
        run(words)
    assert "Errno" not in str(caught.value)


@pytest.mark.parametrize(
    "text,why,hint",
    [
        ("bash ./train.sh", "`bash ./train.sh` runs another script", "`lmcore migrate ./train.sh`"),
        (
            'source helpers.sh\nexport run_cmd="${run_cmd}"\neval "${run_cmd}"',
            "`${run_cmd}` is the value of a variable without a value",
            "let the script print the command",
        ),
        ("python u/get_meta_data.py a", "in its place: `lmcore data weights", "replace it by hand"),
        (
            "python blacklist_urls.py a b",
            "in its place: `lmcore data clean url`",
            "by hand; `--help`",
        ),
        (
            "python tools/retro/preprocess_data.py --retro-tasks build",
            "in its place: `lmcore data retro",
            "replace it by hand",
        ),
        ("torchrun tools/retro/main.py", "in its place: `lmcore data retro", "by hand"),
        ("A=1\ntorchrun ./pretrain_<model>.py", "line 2 has `pretrain_<model>.py`", "migrate --"),
    ],
)
def test_a_script_without_training_says_what_it_has(
    text: str, why: str, hint: str, tmp_path: Path
) -> None:
    """Scripts that start others, a sourced command, programs by hand, and places to fill in."""
    with pytest.raises(ConfigError) as caught:
        run([script(tmp_path, text)])
    assert why in str(caught.value.why)
    assert hint in str(caught.value.hint)


def test_a_program_may_start_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A script that runs `./pretrain_gpt.py` has no launcher."""
    words = [script(tmp_path, "./pretrain_gpt.py --num-layers 2")]
    assert "start it by:  lmcore train run.yaml\n" in migrated(words, capsys)[1]


def test_a_command_that_is_printed_first_counts_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """BLOOM's job has `echo $CMD`, whose quotes the shell keeps, before it runs the command."""
    text = "CMD=\"pretrain_gpt.py --num-layers 3 --pp-partition-method 'type:a|b'\"\necho $CMD\n"
    settings, report = migrated([script(tmp_path, text + 'srun bash -c "python $CMD"\n')], capsys)
    assert "num_layers: 3" in settings
    assert "start it by:  srun lmcore train run.yaml" in report
    assert "num_layers: 3" in migrated([script(tmp_path, text)], capsys)[0]


def test_an_engine_file_of_another_machine_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The settings of the flags keep their sources without it."""
    words = ["--num-layers", "2", "--deepspeed", "--deepspeed_config=/none/ds.json"]
    settings, report = migrated(["python", "pretrain_gpt_alcf.py", *words], capsys)
    assert re.search(r"num_layers: 2 +# --num-layers 2", settings)
    assert "cannot read DeepSpeed's file `/none/ds.json`" in report


def test_an_engine_file_of_another_machine_stays_in_the_settings(tmp_path: Path) -> None:
    """The run reads the file where it is: without it, it would train without what it says."""
    out = tmp_path / "run.yaml"
    words = ["--output", str(out), "python", "pretrain_gpt.py", "--num-layers", "2"]
    engine = tmp_path / "engine.json"
    assert run([*words, "--deepspeed", "--deepspeed_config", str(engine)]) == 0
    with pytest.raises(ConfigError, match="cannot read DeepSpeed's file"):
        load_config([str(out)], announce=False)
    engine.write_text('{"gradient_clipping": 0.25}', encoding="utf-8")
    assert load_config([str(out)], announce=False).value("clip_grad") == 0.25


def test_a_broken_engine_file_of_the_script_keeps_its_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The settings name the file that the script would write, not a copy of it."""
    text = (
        "cat <<E > ds.json\n{\nE\npython pretrain_gpt.py --deepspeed --deepspeed_config ds.json\n"
    )
    settings, report = migrated([script(tmp_path, text)], capsys)
    assert re.search(r"^  deepspeed_config: ds.json ", settings, re.MULTILINE)
    assert "ds.json" in report


def test_a_stray_word_is_named_and_leaves_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    """A value after a flag that takes none is left out, alone: the original's defaults stay."""
    words = "--num-layers 2 --fp16 true --hidden-size 64 32 --data-path a b"
    settings, report = migrated(["python", "pretrain_gpt.py", *words.split()], capsys)
    assert re.search(r"precision: fp16 +# --fp16", settings)
    assert re.search(r"hidden_dropout: 0.1 +# Megatron's default", settings)
    assert re.search(r"data_path: \[a, b\]", settings)
    strays = re.findall(r"^(\w+) +left out: no value of `(--[\w-]+)`$", report, re.MULTILINE)
    assert strays == [("true", "--fp16"), ("32", "--hidden-size")]
    assert "cannot read the file" not in report


@pytest.mark.parametrize(
    "given,hint",
    [("HIDEN=8", "`HIDDEN`"), ("hidden=8", "`HIDDEN`"), ("OTHER=8", "known: ")],
)
def test_a_value_for_no_variable_of_the_script_is_refused(
    given: str, hint: str, tmp_path: Path
) -> None:
    """A slip in a name would leave the script's own value in force."""
    text = ': "${HIDDEN:=64}"\nLAYERS=2\npython pretrain_gpt.py --hidden-size $HIDDEN\n'
    with pytest.raises(ConfigError, match="no variable") as caught:
        run([script(tmp_path, text), "--set", given, "LAYERS=4"])
    assert hint in str(caught.value.hint)
    assert run([script(tmp_path, text), "--set", "HIDDEN=8", "LAYERS=4"]) == 0


JOB = """\
#!/bin/bash
#SBATCH --nodes=2 # nodes
#SBATCH --exclusive
#PBS
export NCCL_DEBUG=INFO FI_PROVIDER=efa # of the network
export FLAGS="--num-layers 3"
LATER=1
export LATER
export NOT_SAID=$FLAGS; echo $NOT_SAID
"""


@pytest.mark.parametrize(
    "script_text,wanted",
    [
        (
            JOB + "srun python pretrain_gpt.py $FLAGS --data-path x\n",
            "2 `#SBATCH` lines and exports of `NCCL_DEBUG`, `FI_PROVIDER`, `LATER` around",
        ),
        (
            JOB.replace("#SBATCH", "#PBS -l") + "mpiexec python preprocess_data.py --input x\n",
            "2 `#PBS` lines and exports of `NCCL_DEBUG`, `FI_PROVIDER`, `LATER` around",
        ),
        (
            "export A=1\npython pretrain_gpt.py --num-layers 2\n",
            "the script's exports of `A` around",
        ),
        ("A=1 python pretrain_gpt.py --num-layers 2 # SBATCH\n", ""),
    ],
)
def test_the_rest_of_a_job_is_named(
    script_text: str, wanted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job's directives and the variables that it exports for its programs are not settings."""
    report = migrated([script(tmp_path, script_text)], capsys)[1]
    notes = [line for line in report.splitlines() if "only the command is translated" in line]
    assert len(notes) == bool(wanted)
    assert wanted in "".join(notes)
    kind = {"#SBATCH": "slurm", "#PBS": "pbs"}.get(wanted.split("`")[1] if wanted else "", "")
    assert f"lmcore launch {kind}" in "".join(notes) or not kind


POD = """\
apiVersion: kubeflow.org/v1
kind: PyTorchJob
spec:
  template:
    spec:
      containers:
      - command: [/usr/local/bin/torchrun, "--nproc_per_node=${GPUS}", "--nnodes=${NODES}"]
        args: [pretrain_gpt.py, "--num-layers=${LAYERS}", --data-path=x, --fp16]
"""


def test_a_manifest_becomes_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The template of a PyTorchJob is read as a script is; the report names `lmcore launch k8s`."""
    words = [script(tmp_path, POD), "--set", "GPUS=8", "NODES=2", "LAYERS=3"]
    settings, report = migrated(words, capsys)
    assert "num_layers: 3" in settings
    assert "precision: fp16" in settings
    assert "lmcore launch k8s --profile FILE train run.yaml" in report
    assert "torchrun --nproc_per_node=8 --nnodes=2 -m lmcore train run.yaml" in report


def test_a_number_without_a_value_is_no_wrong_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A variable of the template is listed as missing, for numbers as for paths."""
    _, report = migrated([script(tmp_path, POD)], capsys)
    assert re.search(r"LAYERS}'? +has no value", report)
    assert "wrong value" not in report


def test_values_of_variables_need_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    """The shell has replaced the variables of a command line."""
    with pytest.raises(ConfigError, match="needs a script"):
        run(["--set", "A=1", "--", "python", "pretrain_gpt.py", "--num-layers", "2"])


def test_settings_without_data_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    """A flag that is replaced would leave a run with the bundled text."""
    words = ["python", "pretrain_gpt.py", "--num-layers", "2"]
    assert "name no data" in migrated([*words, "--train-weighted-split-paths-path", "x"], capsys)[1]
    assert "name no data" not in migrated([*words, "--data-path", "x"], capsys)[1]


@pytest.mark.parametrize("output", ["{0}/run.yaml", "../other/run.yaml", "configs/a/run.yaml"])
def test_paths_are_those_of_the_script(
    output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path of the script means the same file, wherever the settings are written."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    path = Path(output.format(tmp_path / "other"))
    path.parent.mkdir(parents=True)
    words = ["--output", str(path), "python", "pretrain_gpt.py", "--save", "ck/gpt"]
    assert run(words) == 0
    saved = load_config([str(path)]).config.checkpoint.save
    assert saved is not None
    assert Path(saved).resolve() == work / "ck/gpt"


@pytest.mark.parametrize("word,here", [("absolute", "learned_absolute"), ("rotary", "rope")])
def test_values_of_bigscience(word: str, here: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its names of positional encodings are understood."""
    words = ["--position-embedding-type", word, "--max-absolute-position-embeddings", "64"]
    settings, _ = migrated(["python", "pretrain_gpt.py", *words], capsys)
    assert f"position_embedding_type: {here} " in settings
    assert "max_position_embeddings: 64" in settings


def test_two_trainings_are_refused(tmp_path: Path) -> None:
    """A script that trains twice with other flags has no one file of settings."""
    text = "python pretrain_gpt.py --lr 1\npython pretrain_gpt.py --lr 2\n"
    with pytest.raises(ConfigError, match="2 times"):
        run([script(tmp_path, text)])


def test_a_wrong_value_leaves_the_rest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The settings are written even if something is left over; what is wrong is named."""
    text, report = migrated(
        ["python", "pretrain_gpt.py", "--num-layers", "many", "--hidden-size", "64"], capsys
    )
    assert "hidden_size: 64" in text
    assert "num_layers" not in text
    assert "wrong value" in report


def test_the_last_value_of_a_flag_counts(capsys: pytest.CaptureFixture[str]) -> None:
    """Overrides at the end of a launch line count, of lists too; the table says which do not."""
    words = "--lr 1e-3 --fp16 --num-layers 2 --data-path a --lr 1e-3 --lr=2e-3 --data-path b c"
    text, report = migrated(["python", "pretrain_gpt.py", *words.split()], capsys)
    assert "lr: 0.002" in text
    assert re.search(r"data_path: \[b, c\]", text)
    lines = [line.split("  ")[0] for line in report.splitlines() if "given again: " in line]
    assert lines == ["--lr 1e-3", "--data-path a", "--lr 1e-3"]
    assert "2 given again" not in report
    assert "3 given again" in report


def test_help_needs_no_script(capsys: pytest.CaptureFixture[str]) -> None:
    """`lmcore migrate --help` prints the options."""
    assert main(["migrate", "--help"]) == 0
    assert "--set" in capsys.readouterr().out
