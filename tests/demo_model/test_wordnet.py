"""Reading WordNet's files: a small one of our own words in its format."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from demo_model.corpus import wordnet
from demo_model.corpus.mix import documents
from jaxserve.errors import CheckpointError

LICENCE = "  1 This is a licence.\n"
NOUNS = [  # words, gloss, index's word, count of the first sense
    (["pebble", "small_stone"], 'a small round stone (in a river); something smooth; "he threw a pebble"', 9),
    (["walk", "stroll"], "the act of going on foot", 3),
    (["oddity"], "a strange thing", 2),
    (["killer"], "someone who kills", 50),
]
VERBS = [(["walk", "go_on_foot", "Amble"], 'go on foot; "we walked home"', 40)]
ADJECTIVES = [(["smooth(a)", "even"], "having no rough places", 5)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    counts = []
    for part, rows in zip(wordnet.PARTS, (NOUNS, VERBS, ADJECTIVES), strict=True):
        data, index = LICENCE, [LICENCE.rstrip("\n")]
        for words, gloss, count in rows:
            start = len(data)
            names = " ".join(f"{word} 0" for word in words)
            data += f"{start:08} 03 n {len(words):02x} {names} 000 | {gloss}  \n"
            lemma = words[0].split("(")[0]
            index.append(f"{lemma} n 1 0 1 1 {start:08}  ")
            counts.append(f"{lemma}%{wordnet.PARTS[part]}:03:00:: 1 {count}")
        (tmp_path / f"data.{part}").write_text(data)
        (tmp_path / f"index.{part}").write_text("\n".join(index) + "\n")
    (tmp_path / "cntlist.rev").write_text("\n".join(counts) + "\n")
    return tmp_path


def test_common_harmless_words_in_their_most_common_sense(folder: Path) -> None:
    found = {entry.word: entry for entry in wordnet.entries(folder)}
    assert list(found) == ["pebble", "smooth", "walk"]
    assert found["pebble"].gloss == "a small round stone"
    assert found["walk"].part == "verb" and found["walk"].synonyms == ("Amble",)
    assert found["smooth"].synonyms == ("even",)
    sentences = {word: wordnet.meaning(entry) for word, entry in found.items()}
    assert sentences == {
        "pebble": "A pebble is a small round stone.",
        "smooth": "Smooth means having no rough places.",
        "walk": "To walk means to go on foot.",
    }


def test_documents_about_words_are_in_the_mix_where_there_is_a_folder(folder: Path) -> None:
    def texts(place: Path | None) -> str:
        return repr(list(documents("train", 1, 0, 200, place)))

    assert "A pebble is a small round stone." in texts(folder)
    assert "pebble" not in texts(None)
    taught = {wordnet.document(Random(n), False, folder).messages[0]["content"] for n in range(500)}
    assert not taught & {wordnet.document(Random(n), True, folder).messages[0]["content"] for n in range(100)}


def test_a_folder_without_the_files_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"has no cntlist\.rev, expected: what python -m demo_model.corpus.wordnet"
    ):
        wordnet.entries(tmp_path)


def test_a_system_without_apt_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CheckpointError, match="apt-get: not found, expected: a Debian system"):
        wordnet.fetch(tmp_path)
