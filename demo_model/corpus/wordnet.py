"""Common words and what they mean, from WordNet 3.0's files: questions about meaning, kind and synonyms.

WordNet is fetched by the name of its Debian package and never committed:

    python -m demo_model.corpus.wordnet FOLDER

Its file format: the manual pages wndb(5WN) and cntlist(5WN). Its licence stands in NOTICE.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

from demo_model.corpus.document import Chat, ask
from demo_model.corpus.phrasing import Phrasings
from demo_model.corpus.words import a, upper
from jaxserve.errors import CheckpointError

PACKAGE, INSIDE = "wordnet-base", Path("usr/share/wordnet")
PARTS = {"noun": "1", "verb": "2", "adj": "3"}  # file's ending -> the digit in a sense's key
FILES = ("cntlist.rev", *(f"{kind}.{part}" for kind in ("data", "index") for part in PARTS))
LEAST_COUNT = 3  # times that a word was met in WordNet's tagged texts, in its first sense
LONGEST_GLOSS = 90  # characters
_LEFT_OUT = re.compile(
    r"sex|slave|nazi|rape|kill|murder|corpse|genital|penis|vagina|breast|buttock|prostitut|racial|negro|offensive|"
    r"slang|disparag|suicid|erotic|drunk|whore|bastard|damn|excrement|urin|feces|terroris|weapon|drug"
)

MEANING = Phrasings(
    ("What does {w} mean?", "What is the meaning of {w}?", "Explain the word {w}.", "What does the word {w} mean?",
     "Tell me what {w} means.", "Define {w}.", "Give me the meaning of {w}.", "{w}: what does it mean?"),
    ("Do you know what {w} means?", "I need the meaning of {w}.", "How would you explain {w}?"),
)  # fmt: skip
SYNONYM = Phrasings(
    ("What is another word for {w}?", "Give me another word for {w}.", "Tell me a synonym of {w}.", "Which word means "
     "the same as {w}?", "Name another word for {w}.", "What word is like {w}?"),
    ("Do you know another word for {w}?", "I need another word for {w}."),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Entry:
    """A word in its most common sense."""

    word: str
    part: str  # noun, verb or adj
    gloss: str
    synonyms: tuple[str, ...]
    count: int


def fetch(folder: Path) -> None:
    """Download the package with apt-get and unpack FILES into `folder`. Raises CheckpointError with what to do."""
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise CheckpointError(f"{tool}: not found, expected: a Debian system, or WordNet 3.0's files in {folder}")
    with tempfile.TemporaryDirectory() as place:
        got = subprocess.run(["apt-get", "download", PACKAGE], cwd=place, capture_output=True, text=True)
        archives = list(Path(place).glob("*.deb"))
        if got.returncode or not archives:
            raise CheckpointError(f"apt-get download {PACKAGE}: {got.stderr.strip()[-200:]}, expected: the package")
        subprocess.run(["dpkg-deb", "-x", archives[0], place], check=True)
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            shutil.copy(Path(place) / INSIDE / name, folder / name)


@cache
def entries(folder: Path) -> tuple[Entry, ...]:
    """The common words by alphabet, one entry each. Raises CheckpointError where WordNet's files are not there."""
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(f"{folder}: has no {missing[0]}, expected: what python -m {__spec__.name} FOLDER fetches")
    counts = first_sense_counts(folder / "cntlist.rev")
    best: dict[str, Entry] = {}  # a word that is noun and verb is what it is more often
    for entry in (entry for part in PARTS for entry in of_part(folder, part, counts)):
        if entry.word not in best or entry.count > best[entry.word].count:
            best[entry.word] = entry
    return tuple(entry for _, entry in sorted(best.items()) if is_fit(entry))


def first_sense_counts(path: Path) -> dict[tuple[str, str], int]:
    """(word, digit of its part of speech) -> how often its first sense was met."""
    found = {}
    for line in path.read_text(encoding="ascii").splitlines():
        key, sense, count = line.split()
        if sense == "1":
            word, rest = key.split("%")
            found[word, rest[0]] = int(count)
    return found


def of_part(folder: Path, part: str, counts: dict[tuple[str, str], int]) -> Iterator[Entry]:
    """Every word of a part of speech that was met often enough, in its first sense."""
    data = (folder / f"data.{part}").read_bytes()
    for line in (folder / f"index.{part}").read_text(encoding="ascii").splitlines():
        if line.startswith(" "):
            continue  # the licence
        fields = line.split()
        count = counts.get((fields[0], PARTS[part]), 0)
        if count < LEAST_COUNT:
            continue
        senses = int(fields[2])
        start = int(fields[-senses])
        record = data[start : data.index(b"\n", start)].decode("ascii")
        facts, gloss = record.split(" | ", 1)
        columns = facts.split()
        words = [columns[4 + 2 * n].split("(")[0] for n in range(int(columns[3], 16))]
        others = tuple(word for word in words if word.lower() != fields[0] and "_" not in word)
        yield Entry(fields[0], part, plain_gloss(gloss), others, count)


def plain_gloss(gloss: str) -> str:
    """The first explanation, without examples and remarks in brackets."""
    text = re.split(r';\s*"', gloss.strip())[0]
    return re.sub(r"\s*\([^)]*\)", "", text).split(";")[0].strip().strip('"')


def is_fit(entry: Entry) -> bool:
    """Whether a small model should learn it: one plain word, a short gloss, nothing that hurts."""
    plain = entry.word.isalpha() and entry.word.islower() and len(entry.word) > 2
    short = 8 <= len(entry.gloss) <= LONGEST_GLOSS and entry.gloss.isascii() and ":" not in entry.gloss
    return plain and short and not _LEFT_OUT.search(f"{entry.word} {entry.gloss} {' '.join(entry.synonyms)}".lower())


def document(random: Random, held_out: bool, folder: Path) -> Chat:
    """What a word means, or another word for it."""
    entry = random.choice(entries(folder))
    synonyms = [word for word in entry.synonyms if word.islower()]
    if synonyms and random.random() < 0.35:
        question = SYNONYM.pick(random, held_out, w=entry.word)
        return ask(question, f"Another word for {entry.word} is {synonyms[0]}.")
    return ask(upper(MEANING.pick(random, held_out, w=entry.word)), meaning(entry))


def meaning(entry: Entry) -> str:
    """As a sentence."""
    if entry.part == "noun":
        return f"{upper(a(entry.word))} is {entry.gloss}." if starts_as_thing(entry.gloss) else means(entry)
    return f"To {entry.word} means to {entry.gloss}." if entry.part == "verb" else means(entry)


def starts_as_thing(gloss: str) -> bool:
    """Whether the gloss stands behind "is"."""
    return gloss.split()[0] in ("a", "an", "any", "one", "the", "something", "someone")


def means(entry: Entry) -> str:
    """For what is no countable thing."""
    return f"{upper(entry.word)} means {entry.gloss}."


def main() -> int:
    """Fetch; 4 where that fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="where WordNet's files go")
    folder = parser.parse_args().folder
    try:
        fetch(folder)
        print(f"{len(entries(folder))} common words in {folder}")
    except CheckpointError as error:
        print(f"wordnet: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
