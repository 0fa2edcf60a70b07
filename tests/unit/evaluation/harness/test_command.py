"""`lmcore evaluate --harness`, on tasks whose data are local files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from suite.selection import peer

from lmcore.base.errors import ConfigError, MissingPackageError, RunError
from lmcore.checkpoint import save_checkpoint
from lmcore.cli.evaluate import run
from lmcore.contract import OP_SPECS, OpTable
from lmcore.data.tokenizer import ByteTokenizer
from lmcore.data.tokenizer.saved import save_tokenizer
from lmcore.families.gpt.model import GPT
from lmcore.families.op_binding import OpBinding
from lmcore.model.shape import ModelShape

SHAPE = ModelShape(1, 24, 4, 40, 96, 384, init_method_std=0.3)
TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
fewshot_split: test
doc_to_text: "Q: {{{{q}}}} A:"
{rest}
metadata: {{version: 1.5}}
"""
CHOICES = """\
output_type: multiple_choice
doc_to_choice: "{{a}}"
doc_to_target: "{{gold}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
TEXTS = """\
output_type: generate_until
doc_to_target: "{{a[0]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8}
metric_list: [{metric: exact_match}]
"""
GROUP = "group: both\ntask: [mine]\naggregate_metric_list: [{metric: acc, weight_by_size: true}]\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte model of random weights, and YAML files of tasks."""
    directory: Path = tmp_path_factory.mktemp("harness")
    model = GPT(SHAPE, OpBinding(OpTable(OP_SPECS), "cpu", "float32"))
    model.initialize(3)
    tensors = {f"model.{name}": tensor.detach() for name, tensor in model.named_parameters()}
    save_checkpoint(directory / "run/checkpoints", 5, tensors, {}, model_shape=SHAPE.to_dict())
    save_tokenizer(ByteTokenizer(), directory / "run/tokenizer")
    rows = [{"q": f"Is it {one}?", "a": ["yes", "no"], "gold": one % 2} for one in range(6)]
    data = directory / "rows.json"
    data.write_text("\n".join(json.dumps(one) for one in rows))
    tasks = directory / "tasks"
    tasks.mkdir()
    for name, rest in {"mine": CHOICES, "texts": TEXTS}.items():
        (tasks / f"{name}.yaml").write_text(TASK.format(name=name, data=data, rest=rest))
    (tasks / "both.yaml").write_text(GROUP)
    return directory


def call(folder: Path, *flags: str) -> int:
    return run([str(folder / "run"), "--device", "cpu", "--precision", "fp32", *flags])


def test_without_the_package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(MissingPackageError, match="`--harness` needs the package `lm_eval`"):
        call(folder, "--harness", "mine")


@pytest.mark.parametrize(
    "flags", [["--num-fewshot", "0"], ["--harness-include", "a"], ["--apply-chat-template"]]
)
def test_options_without_tasks(folder: Path, flags: list[str]) -> None:
    with pytest.raises(ConfigError, match=rf"`{flags[0]}` needs `--harness`"):
        call(folder, "--text", "a.txt", *flags)


@pytest.mark.full
@pytest.mark.peer
@pytest.mark.filterwarnings("ignore")
class TestWithThePackage:
    @pytest.fixture(autouse=True)
    def _needs_the_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        peer("lm_eval")
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def test_tasks_of_a_directory(
        self, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        flags = ["--harness", "both,texts", "--harness-include", str(folder / "tasks")]
        flags += ["--num-fewshot", "1", "--limit", "4"]
        flags += ["--output", str(tmp_path / "a.json"), "--examples", str(tmp_path / "a.jsonl")]
        assert call(folder, *flags) == 0
        rows = [line.split()[:3] for line in capsys.readouterr().out.splitlines()]
        assert sorted(rows[1:]) == [
            *(["both", "4", "acc"], ["mine", "4", "acc"], ["mine", "4", "acc_norm"]),
            ["texts", "4", "exact_match"],
        ]
        (found,) = json.loads((tmp_path / "a.json").read_text()).values()
        assert (found["mine"]["version"], found["mine"]["num_fewshot"]) == (1.5, 1)
        assert not list(tmp_path.glob("*.part"))
        lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
        assert [line["task"] for line in lines].count("texts") == 4
        mine = [line for line in lines if line["task"] == "mine"]
        assert sum(line["acc"] for line in mine) / 4 == found["mine"]["metrics"]["acc"]["value"]

    def test_beside_tasks_of_lmcore(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """The same questions as a YAML file of lm-eval-harness, and as a task of lmcore."""
        (folder / "own.py").write_text(
            "from lmcore.evaluation.files import json_rows\n"
            "from lmcore.evaluation.task import Choices, Task\n"
            "def read(path):\n"
            "    for row in json_rows(path):\n"
            "        answers = tuple(' ' + one for one in row.texts('a'))\n"
            "        yield Choices((f'Q: {row.text(\"q\")} A:',), answers, row.number('gold'))\n"
            "OWN = Task('own', 'Own.', ('rows.json',), read, ('acc', 'acc_norm'), 'me')\n"
        )
        flags = ["--harness", str(folder / "tasks/mine.yaml"), "--task", str(folder / "own.py")]
        assert call(folder, *flags, "--task-data", str(folder), "--json") == 0
        (found,) = json.loads(capsys.readouterr().out).values()
        for name, value in found["own"]["metrics"].items():
            assert found["mine"]["metrics"][name] == pytest.approx(value)

    def test_unknown_task(self, folder: Path) -> None:
        flags = ["--harness", "minn", "--harness-include", str(folder / "tasks")]
        with pytest.raises(ConfigError, match="lm-eval-harness has no task `minn`") as caught:
            call(folder, *flags)
        assert "`mine`" in str(caught.value.hint)

    def test_a_data_set_that_is_not_here(self, folder: Path, tmp_path: Path) -> None:
        text = TASK.format(name="away", data="nothing.json", rest=CHOICES)
        (tmp_path / "away.yaml").write_text(text)
        with pytest.raises(RunError, match="lm-eval-harness fails on") as caught:
            call(folder, "--harness", str(tmp_path / "away.yaml"))
        assert "nothing.json" in str(caught.value.why)
