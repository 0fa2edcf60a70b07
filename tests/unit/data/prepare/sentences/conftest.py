"""Tables of Punkt, trained here on a page of English, and stored as NLTK's data is."""

from __future__ import annotations

from pathlib import Path

import pytest
from nltk.tokenize import punkt

TEXT = (
    "Dr. Smith met Mr. Jones at 5 p.m. on Monday. They spoke about the U.S. market. It was late! "
    "Was it? Yes. Prof. Miller came, too. He lives in St. Louis, Mo. and works for Example Inc. "
    "in the city.\n\nA second paragraph begins here. See fig. 3 for details, e.g. the numbers. "
    "Prices rose by 3.5 percent. The Corp. said so... And then? Nothing."
) * 20


def write_tables(parameters: punkt.PunktParameters, folder: Path) -> Path:
    """Write the four files of `punkt_tab`."""
    folder.mkdir(parents=True)
    lines = {
        "abbrev_types.txt": parameters.abbrev_types,
        "sent_starters.txt": parameters.sent_starters,
        "collocations.tab": ("\t".join(pair) for pair in parameters.collocations),
        "ortho_context.tab": (f"{k}\t{v}" for k, v in parameters.ortho_context.items()),
    }
    for name, content in lines.items():
        (folder / name).write_text("\n".join(sorted(content)), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def parameters() -> punkt.PunktParameters:
    """Parameters that NLTK's trainer learns from the text, and two collocations."""
    trainer = punkt.PunktTrainer()
    trainer.ABBREV = 0.1
    trainer.train(TEXT)
    found = trainer.get_params()
    found.abbrev_types |= {"dr", "mr", "prof", "p.m", "st", "u.s", "inc", "e.g", "fig"}
    found.collocations |= {("louis", "mo"), ("##number##", "percent")}
    found.sent_starters |= {"they", "he"}
    return found


@pytest.fixture
def nltk_data(tmp_path, parameters, monkeypatch) -> Path:
    """A directory of NLTK's data with English tables, and nothing else to be found."""
    root = tmp_path / "nltk_data"
    write_tables(parameters, root / "tokenizers/punkt_tab/english")
    monkeypatch.setenv("NLTK_DATA", str(root))
    return root
