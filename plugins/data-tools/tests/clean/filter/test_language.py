"""Step `language`."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest

from lmcore.base.errors import ConfigError, MissingPackageError
from lmcore_data_tools.clean.document import Document, Drop
from lmcore_data_tools.clean.filter.language import LanguageStep

TEXTS = {
    "en": "The committee will meet again next week to discuss what the new rules mean for schools.",
    "de": "Der Ausschuss trifft sich nächste Woche wieder, um über die neuen Regeln zu sprechen.",
    "fr": "Le comité se réunira de nouveau la semaine prochaine pour parler des nouvelles règles.",
    "es": "El comité se reunirá de nuevo la próxima semana para hablar de las nuevas normas.",
    "tr": "Komite, yeni kuralları görüşmek üzere gelecek hafta yeniden toplanacak.",  # noqa: RUF001
    "ru": "Комитет снова соберётся на следующей неделе, чтобы обсудить новые правила для школ.",
    "ja": "委員会は来週再び集まり、新しい規則が学校にとって何を意味するかを話し合います。",
}


@pytest.fixture
def english() -> LanguageStep:
    """The step that keeps English."""
    return LanguageStep(["en"])


@pytest.mark.parametrize("language", TEXTS)
def test_told(english: LanguageStep, make_document: Callable, language: str) -> None:
    """A sentence's language is reported, and is the reason when it goes."""
    verdict = english.judge(make_document(TEXTS[language]))
    assert verdict == (None if language == "en" else Drop(language))


def test_several_languages(make_document: Callable[..., Document]) -> None:
    """All languages that are wanted stay; so it is in a worker process."""
    step = pickle.loads(pickle.dumps(LanguageStep(["tr", "de"])))
    kept = [language for language, text in TEXTS.items() if not step.judge(make_document(text))]
    assert kept == ["de", "tr"]


def test_language_of_long_text_is_read_at_three_places(english: LanguageStep) -> None:
    """An English menu at the start does not make a German page English."""
    page = TEXTS["en"] * 4 + TEXTS["de"] * 200
    assert english.language(page) == "de"


@pytest.mark.parametrize("text", ["", "   \n", "12. 3", "\ud800"])
def test_no_words(english: LanguageStep, make_document: Callable, text: str) -> None:
    """A text without letters has no language."""
    assert english.judge(make_document(text)) == Drop("unknown")


def test_unknown_language() -> None:
    """A language that the detector does not know is named with its neighbours."""
    with pytest.raises(ConfigError, match="`--languages Turkish`: unknown") as caught:
        LanguageStep(["Turkish"])
    assert caught.value.hint == "use `tr`"
    with pytest.raises(ConfigError, match="`--languages eng`: unknown language"):
        LanguageStep(["eng"])


def test_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the detector the command that installs it is named."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"pip install py3langid"):
        LanguageStep(["en"])
