"""Choice of a run's tokenizer and data."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmcore.base.errors import ConfigError, DataError
from lmcore.cli.main import main
from lmcore.config.load import load_config
from lmcore.data.blend.check import inspect_sources
from lmcore.data.tokenizer import ByteTokenizer
from lmcore.families.sample_format import sample_format
from lmcore.train.datasets import build_datasets, choose_tokenizer


def choose(flags: str, extra: Any = None, copy: Path | None = None) -> Any:
    loaded = load_config(flags.split())
    sources, _ = inspect_sources(loaded.sources[0])
    return choose_tokenizer(loaded.config.data, sources, extra or {}, copy=copy)


def test_bundled_text_is_bytes() -> None:
    """Without data the tokenizer is bytes."""
    assert isinstance(choose(""), ByteTokenizer)


def test_tokenizer_of_the_data(data_prefix: str) -> None:
    """Prepared data bring their tokenizer; naming the same one is fine."""
    assert isinstance(choose(f"--data-path {data_prefix}"), ByteTokenizer)
    assert isinstance(
        choose(f"--data-path {data_prefix} --tokenizer-type ByteTokenizer"), ByteTokenizer
    )


def test_another_tokenizer(data_prefix: str) -> None:
    """A tokenizer that did not make the data is refused."""
    flags = f"--data-path {data_prefix} --tokenizer-type NullTokenizer --vocab-size 300"
    with pytest.raises(ConfigError, match="was not prepared with this tokenizer") as caught:
        choose(flags)
    assert "`ByteTokenizer`" in str(caught.value.why)


def test_sentinels_of_the_run_alone(tmp_path: Path) -> None:
    """Data of the tokenizer without sentinels fit: no text has one, and T5's samples get them."""
    vocabulary = tmp_path / "vocab.txt"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "put", "lamp"]
    vocabulary.write_text("\n".join(words))
    (tmp_path / "d.jsonl").write_text('{"text": "put lamp"}\n')
    kind = f"--tokenizer-type BertWordPieceLowerCase --vocab-file {vocabulary}".split()
    prepare = ["data", "prepare", "--input", f"{tmp_path}/d.jsonl", "--workers", "1", *kind]
    assert main([*prepare, "--output-prefix", f"{tmp_path}/d", "--presplit-sentences"]) == 0
    flags = f"--data-path {tmp_path}/d_text_sentence {' '.join(kind)} --vocab-extra-ids"
    assert choose(f"{flags} 3").vocab_size == choose(f"{flags} 0").vocab_size + 3
    with pytest.raises(ConfigError, match="was not prepared with this tokenizer") as caught:
        choose(f"{flags} 0 --no-add-special-tokens")
    assert str(caught.value.why) == (
        "its token ids come from another `BertWordPieceLowerCase`: only the dataset's has "
        "`[BOS]` and `[EOS]`"
    )
    vocabulary.write_text("\n".join([*words[:-1], "book", "read"]))
    with pytest.raises(ConfigError, match="was not prepared with this tokenizer") as caught:
        choose(f"{flags} 0")
    assert "the dataset's has 9 tokens and this run's 10" in str(caught.value.why), (
        "the files that made the dataset have changed"
    )


@pytest.mark.parametrize("tokens, accepted", [(300, True), (200, False)])
def test_another_tokenizer_of_a_checkpoint(data_prefix: str, tokens: int, accepted: bool) -> None:
    """Ids without a row in the checkpoint's model cannot be accepted, so no hint says so."""
    loaded = load_config(f"--tokenizer-type NullTokenizer --vocab-size {tokens}".split())
    sources, _ = inspect_sources(load_config(["--data-path", data_prefix]).sources[0])
    with pytest.raises(ConfigError, match="not prepared with the checkpoint's") as caught:
        choose_tokenizer(loaded.config.data, sources, {}, of_checkpoint=True)
    assert ("--change-tokenizer" in str(caught.value.hint)) == accepted


def test_data_of_other_programs(tmp_path: Path, data_prefix: str) -> None:
    """Without metadata a flag must name the tokenizer."""
    prefix = str(tmp_path / "foreign")
    for suffix in (".bin", ".idx"):
        Path(prefix + suffix).write_bytes(Path(data_prefix + suffix).read_bytes())
    with pytest.raises(ConfigError, match="nothing says which tokenizer"):
        choose(f"--data-path {prefix}")
    named = choose(f"--data-path {prefix} --tokenizer-type ByteTokenizer")
    assert isinstance(named, ByteTokenizer)


def test_changed_files(tmp_path: Path, data_prefix: str) -> None:
    """A tokenizer that is no longer what made the data is refused."""
    prefix = str(tmp_path / "copy")
    for suffix in (".bin", ".idx", ".meta.json"):
        Path(prefix + suffix).write_bytes(Path(data_prefix + suffix).read_bytes())
    path = Path(prefix + ".meta.json")
    content = json.loads(path.read_text())
    place = content if "fingerprint" in content else content["tokenizer"]
    place["fingerprint"] = "0" * len(str(place["fingerprint"]))
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="have changed"):
        choose(f"--data-path {prefix}")


def test_plugin_tokenizer() -> None:
    """A type that a plugin brings is built by its factory."""
    made = []

    def factory(**options: Any) -> ByteTokenizer:
        made.append(options)
        return ByteTokenizer()

    assert isinstance(choose("--tokenizer-type Mine", {"Mine": factory}), ByteTokenizer)
    assert len(made) == 1


def test_parts(make_plan: Any, make_datasets: Any) -> None:
    """Training and validation read separate documents, as many samples as the plan says."""
    plan = make_plan("--split 80,20,0 --eval-iters 2 --eval-interval 4")
    corpus = make_datasets(plan)
    assert len(corpus.train) == plan.train_samples == 8 * 4
    assert len(corpus.valid) == plan.valid_samples == 3 * 2 * 4
    first, last = corpus.documents["train"]
    assert first == 0
    assert corpus.documents["valid"][0] == last
    assert corpus.documents["valid"][1] == corpus.indexed.document_count


def test_no_validation(make_plan: Any, make_datasets: Any) -> None:
    """A run that does not validate needs no validation documents."""
    corpus = make_datasets(make_plan("--eval-iters 0 --split 100,0,0"))
    assert corpus.valid is None


def test_split_without_validation_documents(make_plan: Any, make_datasets: Any) -> None:
    """A share too small for one document is an error before training."""
    with pytest.raises(DataError, match="validation"):
        make_datasets(make_plan("--eval-iters 1 --eval-interval 2 --split 999999,1,0"))


def test_bundled_is_prepared_once(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bundled text is prepared into the run directory, and found there by the next start."""
    from lmcore.config.resolve import resolve
    from lmcore.config.tokenizer import TokenizerIdentity
    from lmcore.config.validate import validate

    argv = ["--train-iters", "2", "--eval-iters", "0", "--seq-length", "16"]
    plan = resolve(validate(load_config(argv)), tokenizer=TokenizerIdentity(vocab_size=257))
    first = build_datasets(plan, tokenizer, tmp_path / "data")
    assert first.indexed.tokens > 1_000_000
    (made,) = (tmp_path / "data").glob("*.bin")
    before = made.stat().st_mtime_ns
    build_datasets(plan, tokenizer, tmp_path / "data")
    assert made.stat().st_mtime_ns == before


def test_a_datasets_tokenizer_whose_files_are_gone(tmp_path: Path, caplog: Any) -> None:
    """The copy of the run that is loaded is used if it is the same one."""
    from lmcore.data.prepare.plain_text import prepare_text
    from lmcore.data.tokenizer import build_tokenizer
    from lmcore.data.tokenizer.saved import save_tokenizer

    caplog.set_level("INFO")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "one", "two"]
    for name in ("vocab.txt", "others.txt"):
        (tmp_path / name).write_text("\n".join([*words, name]) + "\n")
        made = build_tokenizer(
            "BertWordPieceCase",
            vocab_file=str(tmp_path / name),
            merge_file=None,
            vocab_size=None,
        )
        save_tokenizer(made, tmp_path / f"copy of {name}")
        if name == "vocab.txt":
            (tmp_path / "text.txt").write_text("one two\n" * 20)
            prepare_text(tmp_path / "text.txt", made, tmp_path / "text", document_characters=16)
            fingerprint = made.fingerprint()
    (tmp_path / "vocab.txt").unlink()
    flags = f"--data-path {tmp_path / 'text'}_text_document"
    for copy in (None, tmp_path / "absent", tmp_path / "copy of others.txt"):
        with pytest.raises(ConfigError, match="cannot be built"):
            choose(flags, copy=copy)
    found = choose(flags, copy=tmp_path / "copy of vocab.txt")
    assert found.fingerprint() == fingerprint
    assert "its copy" in caplog.text


def test_a_checkpoint_without_its_tokenizer(data_prefix: str) -> None:
    """Bytes are no answer; flags and prepared data are."""
    sources, _ = inspect_sources(load_config([]).sources[0])
    undecided = ConfigError("which?")
    with pytest.raises(ConfigError, match="which"):
        choose_tokenizer(load_config([]).config.data, sources, {}, undecided=undecided)
    for flags in ("--tokenizer-type ByteTokenizer", f"--data-path {data_prefix}"):
        loaded = load_config(flags.split())
        found, _ = inspect_sources(loaded.sources[0])
        chosen = choose_tokenizer(loaded.config.data, found, {}, undecided=undecided)
        assert isinstance(chosen, ByteTokenizer)


def test_a_source_without_a_sample_is_named(
    tmp_path: Path, data_prefix: str, tokenizer: Any, caplog: Any
) -> None:
    """A weight too small for a single sample is reported, for training and validation."""
    import shutil

    from lmcore.config.resolve import resolve
    from lmcore.config.tokenizer import TokenizerIdentity
    from lmcore.config.validate import validate

    for name in ("rare", "other"):
        for ending in ("bin", "idx", "meta.json"):
            shutil.copy(f"{data_prefix}.{ending}", tmp_path / f"{name}.{ending}")

    def datasets_of(weight: str) -> Any:
        flags = "--seq-length 16 --train-iters 8 --eval-iters 2 --eval-interval 4 --split 50,50,0"
        blend = f"0.618 {data_prefix} 0.382 {tmp_path}/other {weight} {tmp_path}/rare"
        loaded = load_config([*flags.split(), "--data-path", *blend.split()])
        sources, problems = inspect_sources(loaded.sources[0])
        valid, made_by = validate(loaded, further=problems), TokenizerIdentity(vocab_size=257)
        return build_datasets(
            resolve(valid, tokenizer=made_by, sources=sources), tokenizer, tmp_path
        )

    caplog.set_level("WARNING")
    datasets = datasets_of("1e-7")
    assert datasets.train.unused == [f"{tmp_path}/rare"]
    why = "too small a weight, or too few samples"
    assert [message for message in caplog.messages if "no sample of" in message] == [
        f"no sample of `{tmp_path}/rare` among the {len(samples)} samples of {part}: {why}"
        for part, samples in (("training", datasets.train), ("validation", datasets.valid))
    ]
    caplog.clear()
    datasets_of("0.1")
    assert not [message for message in caplog.messages if "no sample of" in message]


def test_a_tokenizer_of_bert(make_plan: Any, tokenizer: Any, caplog: Any) -> None:
    """A warning says that the model is a decoder."""
    sample_format(make_plan(), tokenizer)
    assert not caplog.records
    sample_format(make_plan(), SimpleNamespace(name="BertWordPieceCase"))
    assert "`BertWordPieceCase` is the tokenizer of BERT, and the model of the run" in caplog.text
