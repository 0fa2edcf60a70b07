"""`lmcore launch`: the files that it writes, and the errors of profiles."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from lmcore.cli.main import main
from lmcore.config.load import load_config

TRAIN = ("train", "--train-iters", "3", "--save", "runs/a b $X 'q'")
TENSOR_4 = ("train", "--tensor-model-parallel-size", "4")
NODES = ("--nodes", "2", "--processes-per-node", "2")
FLAGS: dict[str, tuple[str, ...]] = {
    "local": ("--restarts", "2", "--processes-per-node", "2"),
    "hostfile": ("--hostfile", "hosts", "--restarts", "1"),
    "slurm": (*NODES, "--wall-time", "01:00:00", "--requeue", "--restarts", "3"),
    "pbs": (*NODES, "--wall-time", "01:00:00", "--requeue", "--filesystems", "home"),
    "k8s": (*NODES, "--container", "image:1", "--secret", "lmcore", "--restarts", "2"),
}
COMMON = ("--before", 'export Y="$HOME"', "--env", 'Z=it\'s "$HOME"', "--interface", "eth0")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the empty working directory of the commands, with a hostfile."""
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_text("one slots=2  # comment\n\ntwo slots=2\n", "utf-8")
    return tmp_path


def rendered(kind: str, *words: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what `lmcore launch KIND` prints."""
    assert main(["launch", kind, *words]) == 0
    return capsys.readouterr().out


def shell_of(text: str) -> str:
    """Return the shell script of a rendered file."""
    if not text.startswith("#!"):
        spec = yaml.safe_load(text)["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
        return "#!/bin/sh\n" + spec["containers"][0]["args"][0].replace("$$", "$")
    return text


@pytest.mark.parametrize("kind", FLAGS)
def test_scripts_are_shell(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every script is accepted by the shell, and by shellcheck where it is installed."""
    text = shell_of(rendered(kind, *FLAGS[kind], *COMMON, *TRAIN, capsys=capsys))
    Path("script").write_text(text, "utf-8")
    subprocess.run(["bash", "-n", "script"], check=True)
    if (shellcheck := shutil.which("shellcheck")) is not None:
        # Words in single quotes are meant so, the sender of ssh expands, traps are reached.
        left_out = "SC2016,SC2029,SC2317,SC2329"
        done = subprocess.run(
            [shellcheck, "-e", left_out, "script"], capture_output=True, text=True, check=False
        )
        assert done.stdout == ""


def stand_in(name: str, script: str) -> None:
    """Put a program *name* into `bin`."""
    Path("bin").mkdir(exist_ok=True)
    path = Path("bin", name)
    path.write_text(f"#!/bin/bash\n{script}\n", "utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def run_script(text: str, **env: str) -> str:
    """Run a script with the stand-ins of `bin`; return its standard output."""
    Path("script").write_text(text, "utf-8")
    path = f"{Path('bin').absolute()}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "script"],
        env={**os.environ, "PATH": path, **env},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=60,
    )
    return f"{done.stdout}status {done.returncode}\n"


SHOW = """line=$(for word in "$@"; do printf '<%s>' "$word"; done)
echo "$line Y=$Y Z=$Z"
"""
LAST = 'while [ "$1" != lmcore ]; do shift; done; "$@"'
"""Stand-in for a program that starts lmcore: it runs the words from `lmcore` on."""


@pytest.mark.parametrize("kind", FLAGS)
@pytest.mark.parametrize("continues", [False, True])
def test_words_arrive_unchanged(
    kind: str, continues: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Words and variables with spaces, `$` and quotes reach lmcore as they were given.

    A run with a checkpoint is continued.
    """
    stand_in("lmcore", SHOW)
    for name in ("srun", "mpiexec"):
        stand_in(name, LAST)
    stand_in("ssh", 'shift 3; shift; sh -c "$*"')
    stand_in("scontrol", "exit 1")
    if continues:
        Path("runs/a b $X 'q'/checkpoints/iter_0000001").mkdir(parents=True)
        Path("runs/a b $X 'q'/summary.json").write_text('{"status": "completed"}', "utf-8")
    text = shell_of(rendered(kind, *FLAGS[kind], *COMMON, *TRAIN, capsys=capsys))
    text = text.replace("sleep 5", "sleep 0")
    env = {"PBS_O_WORKDIR": str(Path.cwd()), "HOME": "/h"}
    if kind == "k8s":  # variables that Kubernetes sets
        env |= {"Z": 'it\'s "$HOME"'}
    shown = run_script(text, **env).splitlines()
    words: Sequence[str] = ["train", "--continue", TRAIN[-1]] if continues else TRAIN
    line = "".join(f"<{word}>" for word in words)
    more = {"local": "<--nproc-per-node><2>", "pbs": "<--exit-duration-in-mins><58>"}.get(kind, "")
    shown = [re.sub(r"<5[78]\.\d{3}>", "<58>", one) for one in shown]  # the time that is left
    expected = f'{line}{more} Y=/h Z=it\'s "$HOME"'
    assert shown[:-1] == [expected] * (2 if kind == "hostfile" else 1)


PYXIS = ("--container", "/shared/a.sqsh", "--container-runtime", "pyxis")


@pytest.mark.parametrize("own", [None, "--container-workdir=/w"])
def test_pyxis(own: str | None, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Processes in pyxis' containers begin where the job does, and share a secret."""
    stand_in("srun", 'printf "%s\\n" "$@" "$LMCORE_SECRET"')
    options = () if own is None else ("--srun-options", own, "--directives", "--exclusive")
    text = rendered("slurm", *NODES, *PYXIS, *options, *TRAIN, capsys=capsys)
    shown = run_script(text, LMCORE_SECRET="").splitlines()
    assert [one for one in shown if one.startswith("--container-workdir")] == [
        own or f"--container-workdir={folder}"
    ]
    assert ("#SBATCH --exclusive" in text) == (own is not None)
    assert re.fullmatch("[0-9a-f]{64}", shown[-2])
    assert run_script(text, LMCORE_SECRET="").splitlines()[-2] != shown[-2]
    assert run_script(text, LMCORE_SECRET="0" * 32).splitlines()[-2] == "0" * 32


@pytest.mark.parametrize("secret", ["LMCORE_SECRET", "LMCORE_SECRET_FILE"])
def test_secret_of_the_profile(secret: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A secret of the profile stays; one process, or one without a container, needs none."""
    given = ("--env", f"{secret}=/shared/secret")
    text = rendered("slurm", *NODES, *PYXIS, *given, *TRAIN, capsys=capsys)
    assert re.findall(r"LMCORE_SECRET\S*", text) == [f"{secret}=/shared/secret"]
    for flags in (PYXIS, NODES, (*NODES, "--container", "a.sif")):
        assert "LMCORE_SECRET" not in rendered("slurm", *flags, *TRAIN, capsys=capsys)


@pytest.mark.parametrize(
    "kind, text, words",
    [
        ("slurm", "nodes: 2\nnodse: 3\n", "p.yaml:2: unknown key `nodse`"),
        ("slurm", "nodes: two\n", "p.yaml:1: `nodes: two`: expected an integer"),
        ("slurm", "partition:\n  name: gpu\n", "`partition` has no keys"),
        ("slurm", "model:\n  num_layers: 3\n", "follows the flags, without `--profile`"),
        ("slurm", "preset: gpt2-124m\n", "`preset` belongs to a file of a run's settings"),
        ("slurm", "nodes: 1\nmodel:\n  num_layers: 3\n", "p.yaml:2: `model` has no keys"),
        ("k8s", "partition: gpu\ncontainer: a\n", "p.yaml:1: unknown key `partition`"),
        ("slurm", "env:\n  1A: 1\n", "`1A=1` is not NAME=VALUE"),
        ("slurm", "mounts: [/a:/b]\n", "`mounts` and no `container`"),
        ("slurm", "container: a\nmounts: [/a]\n", "`/a` is not SOURCE:/PATH"),
        ("slurm", "container: a\nmounts: [$DATA:/a]\n", "`$DATA:/a`: variables are not expanded"),
        ("slurm", "directory: ~/runs\n", "`directory: ~/runs`: `~` is not expanded here"),
        ("k8s", "container: $IMAGE\n", "`container: $IMAGE`: variables are not expanded here"),
        ("slurm", "processes_per_node: 8\ndevices_per_node: 4\n", "is more than `devices_per_no"),
        ("slurm", "wall_time: 4h\n", "`4h` is not [D-]HH:MM:SS"),
        ("slurm", "wall_time: 00:01:00\n", "is not longer than `save_seconds` 120"),
        ("slurm", "requeue: true\n", "`requeue` needs `wall_time`"),
        ("slurm", "partition: a\nqueue: b\n", "has `queue` and `partition`"),
        ("slurm", 'job_name: "a\\nb"\n', "is not one printable line"),
        ("slurm", "job_name: 'a\"b'\n", "Slurm reads no quotes"),
        ("slurm", "container: a\ncontainer_runtime: docker\n", "unknown choice"),
        ("pbs", "job_name: a b\n", "PBS reads no spaces"),
        ("pbs", "mpi: lam\n", "unknown choice"),
        ("k8s", "nodes: 1\n", "needs a container image"),
        ("k8s", "container: a\nnodes: 2\n", "several nodes need `secret`"),
        ("k8s", "container: a\njob_name: A_b\n", "is no name of a Kubernetes object"),
        ("k8s", "container: a\ndevices_per_node: 2\n", "and no `device_resource`"),
        ("k8s", "container: a\nmounts: ['a b:/c']\n", "neither a path of a node nor a claim"),
        ("k8s", "container: a\nmemory: lots\n", "is no quantity"),
        ("hostfile", "nodes: 1\n", "needs a hostfile"),
        ("hostfile", "hostfile: absent\n", "hostfile `absent`\nwhy: No such file"),
        ("hostfile", "hostfile: hosts\nnodes: 3\n", "more than the 2 hosts"),
        ("hostfile", "hostfile: hosts\nprocesses_per_node: 3\n", "more than the 2 slots of `one`"),
        ("hostfile", "hostfile: differ\n", "different numbers of slots: 1, 2"),
        ("hostfile", "hostfile: twice\n", "twice:2: the host `a` is listed twice"),
        ("hostfile", "hostfile: wrong\n", "wrong:1: `a gpus=2` is not `HOST slots=N`"),
        ("hostfile", "hostfile: empty\n", "names no host"),
        ("local", "nodes: 2\n", "starts processes on this host only"),
        ("local", "[]\n", "does not hold sections"),
    ],
)
def test_wrong_profiles(
    kind: str, text: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong profile is an error that names the line or the key, before anything is written."""
    Path("p.yaml").write_text(text, "utf-8")
    Path("differ").write_text("a slots=2\nb slots=1\n", "utf-8")
    Path("twice").write_text("a slots=2\na slots=2\n", "utf-8")
    Path("wrong").write_text("a gpus=2\n", "utf-8")
    Path("empty").write_text("# none\n", "utf-8")
    flags = ("--profile", "p.yaml", "--output", "job")
    assert main(["launch", kind, *flags, "train", "--save", "r", "--train-iters", "3"]) == 2
    assert words in capsys.readouterr().err
    assert not Path("job").exists()


@pytest.mark.parametrize(
    "words, message",
    [
        ((), "the command to launch is missing"),
        (("train", "--hidden-size", "65", "--num-attention-heads", "2"), "is not divisible by"),
        (("train", "--tensor-model-parallel-size", "3"), "--tensor-model-parallel-size 3"),
        (("data", "prepare", "--input", "a"), "starts `lmcore data` in one process only"),
        (("no.yaml",), "no.yaml"),
        (("--save", "runs/a"), "flags of `lmcore train` without its name: `--save`"),
        (("--profile", "none.yaml", "train"), "there is no profile `none.yaml`"),
        (("--nodse", "3", "train"), "unknown flag `--nodse`"),
        (("--restarts", "1", "train", "--train-iters", "3"), "needs a run directory"),
        (("train", "--output", "a.sbatch", "--submit"), "after the command: --output, --submit"),
        (("run.yaml", "--wall-time=01:00:00"), "after the command: --wall-time"),
        (
            ("--nodes", "1", "--processes-per-node", "3", *TENSOR_4),
            "use `--processes-per-node 4` before the command, or use smaller sizes",
        ),
        (
            ("--processes-per-node", "3", *TENSOR_4),  # on two nodes
            "use `--processes-per-node 2` or `--processes-per-node 4` before the command, other",
        ),
    ],
)
def test_wrong_commands(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The settings of the run are checked with the number of its processes."""
    assert main(["launch", "slurm", *NODES, *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["hostfile", "k8s"])
@pytest.mark.parametrize("words", [("evaluate", "run", "--text", "a"), ("data", "merge")])
def test_commands_of_one_process(
    kind: str, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """A command that does not start the processes of its node is refused for several."""
    assert main(["launch", kind, *FLAGS[kind], *words]) == 2
    assert f"starts `lmcore {words[0]}` in one process only" in capsys.readouterr().err


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install plugins of two devices, `chip` and `dice`, which this host lacks."""
    site = tmp_path / "site"
    for name in ("chip", "dice"):
        info = site / f"lmcore_{name}-1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: lmcore-{name}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[lmcore.plugins]\n{name} = launch_{name}\n")
        (site / f"launch_{name}.py").write_text(
            "from lmcore.contract import PluginInfo, Probe, ProbeState\n"
            "from lmcore.hookspecs import hookimpl\n\n"
            "@hookimpl\ndef lmcore_plugin_info():\n"
            f"    names = {{'k8s': 'example.com/{name}', 'slurm': 'gpu'}}\n"
            f"    return PluginInfo('{name}', '>=1.3,<2', provides=('{name}_type',),\n"
            "                      device_resources=names)\n\n"
            "@hookimpl\ndef lmcore_probe():\n"
            f"    return Probe('{name}_type', ProbeState.ABSENT)\n\n"
            "@hookimpl\ndef lmcore_create_device(): ...\n"
        )
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("LMCORE_PLUGINS", "chip,dice")  # others name devices as well
    for variable in ("LMCORE_PLUGIN_OFF", "LMCORE_DEVICE"):
        monkeypatch.delenv(variable, raising=False)


def resources_of(text: str) -> dict[str, str]:
    """Return what a pod requests."""
    spec = yaml.safe_load(text)["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    found: dict[str, str] = spec["containers"][0]["resources"]["requests"]
    return found


DEVICES = ("--container", "a", "--devices-per-node", "2")
STEPS = ("--train-iters", "3")


@pytest.mark.usefixtures("plugins")
@pytest.mark.parametrize(
    "flags, words, resource",
    [
        ((), ("train", *STEPS, "--device", "chip_type"), "example.com/chip"),
        ((), ("train", *STEPS, "--device", "dice"), "example.com/dice"),
        ((), ("train", *STEPS, "--plugin-off", "dice"), "example.com/chip"),
        ((), ("evaluate", "runs/a", "--device", "dice_type"), "example.com/dice"),
        (("--device-resource", "b.c/d"), ("train", *STEPS, "--device", "dice"), "b.c/d"),
        (("--device-resource", "b.c/d"), ("train", *STEPS), "b.c/d"),
    ],
)
def test_devices_are_named_by_their_plugin(
    flags: tuple[str, ...],
    words: tuple[str, ...],
    resource: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A pod requests devices by the plugin's name for them, unless the profile has another."""
    assert resources_of(rendered("k8s", *DEVICES, *flags, *words, capsys=capsys)) == {resource: "2"}


@pytest.mark.usefixtures("plugins")
def test_devices_of_a_settings_file(capsys: pytest.CaptureFixture[str]) -> None:
    """The device of a settings file counts like the flag."""
    Path("run.yaml").write_text("accelerator:\n  device: dice_type\n", "utf-8")
    text = rendered("k8s", *DEVICES, "train", "run.yaml", *STEPS, capsys=capsys)
    assert resources_of(text) == {"example.com/dice": "2"}


@pytest.mark.usefixtures("plugins")
def test_devices_with_several_names(capsys: pytest.CaptureFixture[str]) -> None:
    """Plugins that differ need a choice; plugins that agree, and none, need no name."""
    assert main(["launch", "k8s", *DEVICES, "train", *STEPS]) == 2
    error = capsys.readouterr().err
    assert "`example.com/chip` by `chip`; `example.com/dice` by `dice`" in error
    assert main(["launch", "k8s", *DEVICES, "train", *STEPS, "--device", "cpu"]) == 2
    assert "which no installed plugin for the run's device names" in capsys.readouterr().err
    assert main(["launch", "k8s", "--container", "a", "train", *STEPS]) == 0
    assert "example.com" not in capsys.readouterr().out
    nodes = ("--devices-per-node", "2")
    for more in ((), ("--plugin-off", "chip", "--plugin-off", "dice")):
        shown = rendered("slurm", *nodes, "train", *STEPS, *more, capsys=capsys)
        assert "#SBATCH --gres=gpu:2\n" in shown
    shown = rendered("slurm", *nodes, "--device-resource", "tile", "train", *STEPS, capsys=capsys)
    assert "#SBATCH --gres=tile:2\n" in shown


def test_files_of_other_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    """Data that this host lacks is a warning if the job runs elsewhere, and else an error."""
    words = ("train", "--data-path", "/shared/text_document", "--train-iters", "3")
    assert main(["launch", "slurm", *words]) == 0
    shown = capsys.readouterr()
    assert " --data-path /shared/text_document " in shown.out
    assert "no such dataset on this host; the job needs it where it runs" in shown.err
    assert main(["launch", "local", *words]) == 2
    assert "no such dataset" in capsys.readouterr().err


def test_output(capsys: pytest.CaptureFixture[str]) -> None:
    """A file of another origin is kept; a file of this command is replaced."""
    words = ["launch", "slurm", "--output", "job.sbatch", "train", "--train-iters", "3"]
    Path("job.sbatch").write_text("mine\n", "utf-8")
    assert main(words) == 2
    assert "did not write it" in capsys.readouterr().err
    Path("job.sbatch").unlink()
    assert main(words) == main(words) == 0
    assert capsys.readouterr().out.endswith("submit it by: sbatch job.sbatch\n")
    assert Path("job.sbatch").read_text("utf-8").startswith("#!/bin/bash\n#SBATCH --job-name=lmco")


def test_submit_chains_jobs_of_pbs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each restart is a job after the one before; a dry run submits none."""
    stand_in("qsub", 'echo "$*" >> submitted; n=$(wc -l < submitted); echo "$n.host"')
    monkeypatch.setenv("PATH", f"{Path('bin').absolute()}{os.pathsep}{os.environ['PATH']}")
    words = ["--restarts", "2", "--submit", "train", "--save", "runs/a"]
    assert main(["launch", "pbs", "--dry-run", *words]) == 0
    assert not Path("submitted").exists()
    assert not Path("lmcore.pbs").exists()
    assert main(["launch", "pbs", *words]) == 0
    assert capsys.readouterr().out.endswith("1.host\n2.host\n3.host\n")
    assert Path("submitted").read_text("utf-8").splitlines() == [
        "lmcore.pbs",
        "-W depend=afterany:1.host lmcore.pbs",
        "-W depend=afterany:2.host lmcore.pbs",
    ]
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["launch", "pbs", *words]) == 1
    assert "cannot run `qsub`" in capsys.readouterr().err


EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "aws_slurm_kubernetes"
PAGE = (EXAMPLE / "README.md").read_text("utf-8")
SIZES = re.findall(r"^\| [\d.]+B \| `(.*)` \|$", PAGE, re.MULTILINE)
NUM_NODES = (4, 8, 16, 32, 64, 128, 192, 240)
"""Nodes of 8 GPUs in the table of the paper."""


@pytest.mark.parametrize("nodes, flags", [*zip(NUM_NODES, SIZES, strict=True)])
def test_sizes_of_the_example(nodes: int, flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The layouts of the example divide the models, the batches and the paper's numbers of GPUs."""
    for kind, name in (("slurm", "slurm"), ("k8s", "kubernetes")):
        profile = ("--profile", str(EXAMPLE / f"{name}.yaml"), "--nodes", str(nodes))
        words = ("train", str(EXAMPLE / "gpt.yaml"), *flags.split(), "--vocab-file", "v")
        words += ("--merge-file", "m", "--save", "runs/gpt")
        assert "--preset gpt-" in rendered(kind, *profile, *words, capsys=capsys)
    assert main(["launch", "slurm", *profile[2:], "--processes-per-node", "5", *words]) == 2


def test_settings_of_the_example() -> None:
    """The published log has 1.638E-08 as learning rate of sample 50, and Adam's betas."""
    config = load_config([str(EXAMPLE / "gpt.yaml")]).config
    optimizer = config.optimizer
    assert f"{optimizer.lr * 50 / optimizer.lr_warmup_samples:.3E}" == "1.638E-08"
    assert (optimizer.adam_beta1, optimizer.adam_beta2) == (0.9, 0.95)
    assert config.training.train_samples // config.training.global_batch_size == 508_626
    assert config.logging.log_interval == 1


@pytest.mark.parametrize("kind", ["local", "hostfile", "slurm", "pbs", "k8s"])
@pytest.mark.parametrize(
    "program",
    [
        *("lmcore", "/venv/bin/lmcore", "python -m lmcore", "/usr/bin/python3 -u -m lmcore"),
        *("python3 -m lmcore.cli.main", "python bin/lmcore", "env A=1 lmcore"),
        "torchrun --nproc-per-node 2 -m lmcore",
    ],
)
def test_the_command_is_given_without_lmcore(
    kind: str, program: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The error says so and shows the command without it, for each kind of job."""
    (tmp_path / "hosts").write_text("one slots=1\n")
    flags = {"hostfile": ["--hostfile", f"{tmp_path}/hosts"], "k8s": ["--container", "a"]}
    argv = [*flags.get(kind, []), "--", *program.split(), "train", "run.yaml"]
    assert main(["launch", kind, *argv]) == 2
    said = capsys.readouterr().err
    assert f"error: the command to launch begins with `{program}`" in said
    assert f"hint: write `lmcore launch {kind} ... train run.yaml`" in said
    assert "cannot read the file" not in said


def test_a_path_that_ends_with_lmcore_is_a_value(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the program before the command is refused."""
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("training:\n  train_iters: 1\n")
    assert main(["launch", "local", "run.yaml", "--save", "runs/lmcore"]) == 0
    assert "lmcore train run.yaml --save runs/lmcore" in capsys.readouterr().out
