"""Takes a random generator and perhaps a topic; gives a story of 100 to 250 words.

A plot is a file of moments, parted by blank lines; each line of a moment is one way to tell it, with gaps in braces for
str.format.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from random import Random

from demo_model.corpus.words import PEOPLE, a, upper

FOLDER = Path(__file__).parent
FEMALE = frozenset(
    "Ada Anna Carla Clara Dora Elena Emma Eva Grace Hana Ida Ines Julia Lara Lina Maja Mara Maria Mila Mona Nadia Nina "
    "Nora Olga Petra Priya Rosa Ruth Sara Sofia Tara Vera Wanda Yara Zoe".split()
)
PROJECTS = (
    "a tree house", "a little bridge", "a snow fort", "a bird house", "a raft", "a swing", "a scarecrow", "a windmill",
    "a wooden cart", "a tower of stones",
)  # fmt: skip
INSIDE, ON = frozenset("forest park garden meadow valley village".split()), frozenset(("farm", "mountain"))
COLOURS = frozenset("red blue green yellow golden silver purple orange white grey brown black".split())
OPENINGS = (
    "Once upon a time there was {a_who} named {n}. {He} lived in {home}.",
    "In {home} lived {a_who} named {n}.",
    "There once was {a_who} called {n} who lived in {home}.",
    "{n} was {a_who}. {He} lived in {home}.",
    "This is the story of {n}, {a_who} who lived in {home}.",
    "Long ago, in {home}, there lived {a_who} whose name was {n}.",
)


@cache
def lexicon(kind: str) -> tuple[tuple[str, ...], ...]:
    """Entries of a kind, each with what belongs to it."""
    lines = (FOLDER / "lexicon.txt").read_text(encoding="utf-8").splitlines()
    rows = [line.split(":", 1) for line in lines if line and not line.startswith("#")]
    return tuple(tuple(text.split("|")) for name, text in rows if name == kind)


@cache
def plots() -> tuple[tuple[tuple[str, ...], ...], ...]:
    """Each a row of moments, and each moment its variants."""
    texts = [path.read_text(encoding="utf-8").strip() for path in sorted((FOLDER / "plots").iterdir())]
    return tuple(tuple(tuple(moment.split("\n")) for moment in text.split("\n\n")) for text in texts)


TOPICS = tuple(row[0] for kind in ("who", "toy", "place") for row in lexicon(kind))


def choose(random: Random, kind: str, topic: str | None, but: str = "") -> tuple[str, ...]:
    """An entry; the topic where it is of this kind."""
    entries = [entry for entry in lexicon(kind) if entry[0] != but]
    named = [entry for entry in entries if entry[0] == topic]
    return (named or [random.choice(entries)])[0]


def person(random: Random, but: str = "") -> str:
    """A name."""
    return random.choice([name for name in PEOPLE if name != but])


def pronouns(name: str) -> tuple[str, str, str]:
    """Of somebody with this name."""
    return ("she", "her", "her") if name in FEMALE else ("he", "him", "his")


def cast(random: Random, topic: str | None) -> dict[str, str]:
    """Everything that a story's gaps name."""
    who, adjectives = choose(random, "who", topic)
    name = person(random)
    while who in ("girl", "boy") and (name in FEMALE) != (who == "girl"):
        name = person(random)
    friend, friend_adjectives, does = choose(random, "friend", None, but=who)
    friend_name = person(random, but=name)
    he, him, his = pronouns(name)
    fhe, fhim, fhis = pronouns(friend_name)
    does = does.replace("her ", f"{fhis} ").replace("his ", f"{fhis} ")
    place, spots = choose(random, "place", topic)
    toy, looks = choose(random, "toy", topic)
    look = random.choice(looks.split(", "))
    sky, weather = choose(random, "weather", None)
    day = choose(random, "time", None)[0]
    early = "One evening" if day == "evening" else f"Early one {day}"
    when = random.choice((f"One {sky} {day}", f"On {a(sky)} {day}", f"One {day}", early, "One day"))
    colour = look if look in COLOURS else random.choice(sorted(COLOURS))
    project = random.choice(PROJECTS)
    at = "in" if place in INSIDE else "on" if place in ON else "at"
    s1, s2, s3 = random.sample(spots.split(", "), 3)
    the_project = f"the {project.split(' ', 1)[1]}"
    return {
        "n": name, "he": he, "him": him, "his": his, "He": upper(he), "His": upper(his),
        "f": friend_name, "fhe": fhe, "fhim": fhim, "fhis": fhis, "Fhe": upper(fhe), "Fhis": upper(fhis), "fv": does,
        "a_who": a(f"{random.choice(adjectives.split(', '))} {who}"),
        "a_f": a(f"{random.choice(friend_adjectives.split(', '))} {friend}"),
        "home": choose(random, "home", None)[0], "place": place, "at": at, "s1": s1, "s2": s2, "s3": s3,
        "toy": toy, "a_toy": a(f"{look} {toy}"), "a_toy0": a(toy), "a_toy_whistle": "a whistle",
        "col": colour, "a_col": a(colour),
        "food": choose(random, "food", None)[0], "When": when, "Weather": weather,
        "project": project, "the_project": the_project, "The_project": upper(the_project),
    }  # fmt: skip


def story(random: Random, topic: str | None = None) -> str:
    """A story; `topic`: who it is about, a thing or a place, of TOPICS."""
    gaps = cast(random, topic)
    gaps["A_f"] = upper(gaps["a_f"])
    about_toys = any(topic == toy for toy, _ in lexicon("toy"))
    fitting = [plot for plot in plots() if not about_toys or any("{a_toy}" in line for line in plot[0] + plot[1])]
    sentences: list[str] = []
    while not sentences or (topic is not None and topic not in " ".join(sentences)):  # some variants do not name it
        moments = [random.choice(OPENINGS), *(random.choice(moment) for moment in random.choice(fitting))]
        sentences = [upper(moment.format(**gaps)) for moment in moments]
    paragraphs, at = [], 0
    while at < len(sentences):
        count = random.choice((2, 3, 3, 4))
        paragraphs.append(" ".join(sentences[at : at + count]))
        at += count
    return "\n\n".join(paragraphs)
