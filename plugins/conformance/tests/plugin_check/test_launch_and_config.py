"""Wrong plugins whose launch environment and judgement of configurations look right by default."""

from __future__ import annotations

import pytest

from .test_effects import PRESENT, details, unlike

CPU = PRESENT.replace("    change()\n", "").replace('{"float32"}', '{"float32", "bfloat16"}')


def test_a_launch_environment_that_is_set_by_the_hook(install, check):
    """The launcher's environment and the hook's argument stay, and torch is not loaded."""
    install(
        CPU,
        """
        @hookimpl
        def lmcore_launch_env(rank_info):
            import torch

            os.environ["GUEST_VISIBLE"] = str(rank_info.pop("local_rank"))
            return {}
        """,
    )
    status, found = check("guest")
    assert status == 1
    failed = details(found)
    assert failed.keys() == {"lmcore_launch_env", "hook effects"}
    assert failed["lmcore_launch_env"] == ["for rank 0 of 4 it changes its argument `rank_info`"]
    hook = "`lmcore_launch_env`: "
    assert not unlike(
        failed["hook effects"],
        f"{hook}it changes the environment variable `GUEST_VISIBLE`",
        f"{hook}it imports torch, in the process that starts the workers: ",
    )
    (fix,) = {line["fix"] for line in found["plugins"][0]["checks"] if "VISIBLE" in line["detail"]}
    assert fix.startswith("return the variable")


def test_threads_for_more_workers_than_cores(install, check):
    """A launch environment without threads for a worker is a fault."""
    install(
        CPU,
        """
        @hookimpl
        def lmcore_launch_env(rank_info):
            return {"OMP_NUM_THREADS": str(8 // rank_info["local_world_size"])}
        """,
    )
    _, found = check("guest")
    (fault,) = details(found)["lmcore_launch_env"]
    assert fault.startswith("for rank 63 of 64, with 64 on the host, it returned OMP_NUM_THREADS=0")


def test_more_workers_than_devices_may_be_refused(install, check):
    """A launch environment for each device of a host need have none for further workers."""
    install(
        CPU.replace('"cpu", ProbeState.PRESENT, 1', '"chip", ProbeState.PRESENT, 3'),
        """
        @hookimpl
        def lmcore_launch_env(rank_info):
            card = ("a", "b", "c")[rank_info["local_rank"]]
            return {"CHIP_VISIBLE": card, "RAYON_NUM_THREADS": "0"}
        """,
    )
    _, found = check("guest")
    assert details(found, "ok")["lmcore_launch_env"] == ["CHIP_VISIBLE=a, RAYON_NUM_THREADS=0"]


def test_wrong_judgements_of_other_configurations(install, check):
    """The hook is asked about real configurations, and about the policies that are offered."""
    install(
        CPU,
        """
        ASKED = []

        @hookimpl
        def lmcore_precision_policies(device):
            return standard_precision_policies(device)

        @hookimpl
        def lmcore_validate_config(config):
            ASKED.append(config)
            if config.accelerator.recompute == "full":
                return [Problem(config.model.num_attention_heads.name)]
            if config.parallel.context_parallel_size > 1:
                return Problem("no context parallelism")
            if config.accelerator.precision == "bf16":
                return [Problem("no bf16")]
            if config.training.compile:
                object.__setattr__(config.training, "compile", False)
            if config.training.step_graph:
                return [Problem("enough")] * (len(ASKED) % 2)
            return []
        """,
    )
    status, found = check("guest")
    assert status == 1
    assert not unlike(
        details(found)["lmcore_validate_config"],
        "for `--preset llama-1b --recompute full` it raised AttributeError",
        "for `--context-parallel-size 2` it returned `Problem`, not a list",
        "it refuses `--precision bf16`, which the plugin offers: no bf16",
        "for `--compile`: it changes the configuration, which is read-only",
        "for `--step-graph` it answers differently the second time: [",
    )


def test_ends_of_runs_and_their_plans(install, check):
    """A run that failed is ended as well, and the plan is read-only."""
    install(
        CPU,
        """
        @hookimpl
        def lmcore_run_start(run):
            run["plan"]["config"]["training"].clear()

        @hookimpl
        def lmcore_run_end(run):
            return {"completed": None, "received SIGTERM": None}[run["status"]]
        """,
    )
    _, found = check("guest")
    failed = details(found)
    assert failed["lmcore_run_start"] == ["it changes the plan of the run"]
    (fault,) = failed["lmcore_run_end"]
    assert fault.startswith("for a run with status `failed: out of memory` it raised KeyError")


def test_what_is_refused_is_listed(install, check):
    """To refuse a configuration is no fault; the line names it."""
    install(
        CPU,
        """
        @hookimpl
        def lmcore_validate_config(config):
            return [Problem("no compiler")] if config.training.compile else []
        """,
    )
    status, found = check("guest")
    assert status == 0
    (line,) = details(found, "ok")["lmcore_validate_config"]
    assert line == "asked about 10 configurations; it refuses `--compile`"


def test_registrations_that_can_be_found_and_not_used(install, check):
    """A text that is no UTF-8, and a tokenizer with ids beyond its vocabulary."""
    install(
        CPU,
        """
        from lmcore.contract.tokenizer import Tokenizer

        class Bytes(Tokenizer):
            name, vocab_size, eod = "Guest", 100, None

            def encode(self, text):
                return list(text.encode())

            def decode(self, ids):
                return bytes(ids).decode(errors="replace")

            def describe(self):
                return {"type": "Guest"}

        @hookimpl
        def lmcore_add_tokenizers(registry):
            registry.add("Guest", lambda *, vocab_file, merge_file, vocab_size: Bytes())

        @hookimpl
        def lmcore_add_corpora(registry):
            file = Path(__file__).parent / "odd.txt"
            file.write_bytes(b"odd \\xff\\n")
            registry.add("odd", file, "Odd bytes")
        """,
    )
    _, found = check("guest")
    failed = details(found)
    assert "odd.txt cannot be read as UTF-8" in failed["lmcore_add_corpora"][0]
    assert "gives 111, not below its `vocab_size` 100" in failed["lmcore_add_tokenizers"][-1]


@pytest.mark.parametrize(
    "target,status,line",
    [
        ("GOOD", "ok", "`guest-task`"),
        ("ODD", "failed", "has no metric `accuracy`"),
        ("NONE", "failed", "cannot be loaded"),
    ],
)
def test_each_task_is_loaded(install, check, target, status, line):
    """A task that is right, one with a metric that there is not, and one that is missing."""
    install(
        CPU,
        f"""
        from lmcore.evaluation.task import Task

        GOOD = Task("guest-task", "A task.", ("a.jsonl",), list, ("acc",), "me")
        ODD = Task("guest-task", "A task.", ("a.jsonl",), list, ("accuracy",), "me")

        @hookimpl
        def lmcore_add_tasks(registry):
            registry.add("guest-task", __name__ + ":{target}")
        """,
    )
    _, found = check("guest")
    assert line in details(found, status)["lmcore_add_tasks"][0]


def test_each_text_that_a_tokenizer_loses(install, check):
    """ASCII comes back; letters that are normalized, leading spaces and a return do not."""
    install(
        CPU,
        """
        import unicodedata

        from lmcore.contract.tokenizer import Tokenizer

        class Normal(Tokenizer):
            name, vocab_size, eod = "Normal", 256, None

            def encode(self, text):
                if text.strip():
                    text = text.lstrip(" ").replace("\\r\\n", "\\n")
                return list(unicodedata.normalize("NFKC", text).encode())

            def decode(self, ids):
                return bytes(ids).decode(errors="replace")

            def describe(self):
                return {"type": "Normal"}

        def build(*, vocab_file, merge_file, vocab_size):
            return Normal()

        @hookimpl
        def lmcore_add_tokenizers(registry):
            registry.add("Normal", build)
        """,
    )
    _, found = check("guest")
    assert details(found, "warning")["lmcore_add_tokenizers"][1:] == [
        f"`Normal` loses something: {text!r} is {back!r} after `decode`"
        for text, back in {
            "\ufb01 \uff21 \u00bd": "fi A 1\u20442",
            "  two spaces": "two spaces",
            "two\r\nlines": "two\nlines",
        }.items()
    ]


def test_text_that_spells_a_special_token_is_ordinary_text(install, check):
    """The end of a document in a text ends no document; what a type refuses is passed over."""
    install(
        CPU,
        """
        from lmcore.contract.tokenizer import Tokenizer
        from lmcore.base.errors import DataError

        END = "<|end|>"

        class Ends(Tokenizer):
            name, vocab_size, eod, encodes_any_text = "Ends", 257, 256, False

            def encode(self, text):
                if "</s>" in text:
                    raise DataError("no such text")
                ids = [256] if text.startswith(END) else []
                return ids + list(text.removeprefix(END).encode())

            def decode(self, ids):
                return END if ids == [256] else bytes(ids).decode(errors="replace")

            def describe(self):
                return {"type": "Ends"}

        class Plain(Ends):
            name = "Plain"

            def encode(self, text):
                if "</s>" in text:
                    raise DataError("no such text")
                return list(text.encode())

        def build(*, vocab_file, merge_file, vocab_size):
            return Ends()

        def plain(*, vocab_file, merge_file, vocab_size):
            return Plain()

        @hookimpl
        def lmcore_add_tokenizers(registry):
            registry.add("Ends", build)
            registry.add("Plain", plain)
        """,
    )
    _, found = check("guest")
    words = "text that spells a special token is ordinary text"
    assert details(found)["lmcore_add_tokenizers"][1:] == [
        f"`Ends`: `encode` of '<|end|>' gives its `eod` 256: {words}",
        "`Plain` encodes and decodes 7 texts",
    ]


def test_a_tokenizer_of_some_texts_may_refuse_others(install, check):
    """`DataError` for a text is right, unless `encodes_any_text` is claimed."""
    install(
        CPU,
        """
        from lmcore.contract.tokenizer import Tokenizer
        from lmcore.base.errors import DataError

        class Ascii(Tokenizer):
            name, vocab_size, eod, encodes_any_text = "Ascii", 128, None, False

            def encode(self, text):
                if not text.isascii():
                    raise DataError("these letters have no ids")
                return list(text.encode())

            def decode(self, ids):
                return bytes(ids).decode()

            def describe(self):
                return {"type": "Ascii"}

        class Claims(Ascii):
            name, encodes_any_text = "Claims", True

        def ascii(*, vocab_file, merge_file, vocab_size):
            return Ascii()

        def claims(*, vocab_file, merge_file, vocab_size):
            return Claims()

        @hookimpl
        def lmcore_add_tokenizers(registry):
            registry.add("Ascii", ascii)
            registry.add("Claims", claims)
        """,
    )
    _, found = check("guest")
    right, wrong = details(found)["lmcore_add_tokenizers"][1:]
    assert right == "`Ascii` encodes and decodes 5 texts, and refuses 2"
    assert wrong.startswith("`Claims`: it raised DataError: these letters have no ids")


@pytest.mark.parametrize(
    "method, fault",
    [
        (
            "def decode(self, ids): return ''.join(LETTERS[one] for one in ids)",
            "`decode([-1])` returns '\xff': an id outside the vocabulary raises ValueError",
        ),
        (
            "def decode(self, ids): return ''.join(LETTERS[one % 300] for one in ids)",
            "`decode([-1])` raised IndexError: string index out of range",
        ),
        (
            "def encode(self, text): return list(text.encode(errors='replace'))",
            "`encode('a\\ud800b')` returns [97, 63, 98]: a lone surrogate raises Unicode",
        ),
        (
            "def encode_batch(self, texts): return [numpy.array(self.encode(t)) for t in texts]",
            "`encode_batch` gives `int64`, and arrays of int32 are wanted",
        ),
        (
            "def fingerprint(self): return str(hash(self.name))",
            "in another process, not",
        ),
    ],
)
def test_a_tokenizer_that_does_not_keep_its_interface(install, check, method, fault):
    """Ids and text that it does not have raise, arrays are int32, and a fingerprint stays."""
    install(
        CPU,
        f"""
        import numpy
        from lmcore.contract.tokenizer import Tokenizer

        LETTERS = "".join(map(chr, range(256)))

        class Bytes(Tokenizer):
            name, vocab_size, eod = "Bytes", 256, None

            def encode(self, text):
                return list(text.encode())

            def decode(self, ids):
                return bytes(ids).decode(errors="replace")

            def describe(self):
                return {{"type": "Bytes"}}

        class Odd(Bytes):
            {method}

        def build(*, vocab_file, merge_file, vocab_size):
            return Odd()

        @hookimpl
        def lmcore_add_tokenizers(registry):
            registry.add("Bytes", build)
        """,
    )
    status, found = check("guest")
    assert status == 1
    (line,) = details(found)["lmcore_add_tokenizers"][1:]
    assert fault in line


def test_a_doctor_for_devices_that_are_absent_or_broken(install, check):
    """The hook is called whatever the state of the device is."""
    install(
        CPU,
        """
        @hookimpl
        def lmcore_doctor(probe):
            return [Check("driver", CheckStatus.OK, f"{8 // probe.count} ways")]
        """,
    )
    _, found = check("guest")
    (fault,) = details(found)["lmcore_doctor"]
    assert fault.startswith("for a device that is absent it raised ZeroDivisionError")


def test_a_field_of_a_wrong_type_is_one_finding_with_its_place(install, check):
    """`available=None` is no function: one line says so, with the hook's file and line."""
    install(
        CPU,
        """
        @hookimpl
        def lmcore_comm_backends(device):
            return [CommBackend("gloo", "cpu", available=None)]
        """,
    )
    _, found = check("guest")
    (fault,) = details(found)["lmcore_comm_backends"]
    assert "`CommBackend.available` is None" in fault
    assert "(guest_plugin.py, line " in fault
