"""Questions about the facts of `tables`. What is held out for measuring is a way to ask, never the fact itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from random import Random

from demo_model.corpus.document import Chat, ask
from demo_model.corpus.phrasing import Phrasings, dressed
from demo_model.corpus.tables.rows import groups, table
from demo_model.corpus.words import a, upper


@dataclass(frozen=True, slots=True)
class Fact:
    """A question, its answer, and the words that a right answer holds."""

    question: str
    answer: str
    needed: str


Family = Callable[[Random, bool], Fact]

CAPITAL = Phrasings(
    ("What is the capital of {x}?", "What's the capital of {x}?", "Tell me the capital of {x}.", "Name the capital of "
     "{x}.", "Which city is the capital of {x}?", "I need the capital of {x}.", "What is the capital city of {x}?",
     "{x}: what is its capital?", "Do you remember the capital of {x}?", "The capital of {x} is which city?",
     "Give me the capital of {x}.", "What is {x}'s capital?", "Which city is {x}'s capital?"),
    ("Do you know the capital of {x}?", "Can you name the capital city of {x}?", "What city is the capital of {x}?",
     "I forgot the capital of {x}. What is it?"),
)  # fmt: skip
COUNTRY = Phrasings(
    ("{y} is the capital of which country?", "Which country has the capital {y}?", "What country is {y} the capital "
     "of?", "Which country's capital is {y}?", "Name the country whose capital is {y}."),
    ("Of which country is {y} the capital?", "Tell me which country has {y} as its capital."),
)  # fmt: skip
CONTINENT = Phrasings(
    ("On which continent is {x}?", "Which continent is {x} in?", "What continent is {x} on?", "Where is {x}?",
     "Name the continent of {x}.", "Tell me which continent {x} belongs to.", "Where in the world is {x}?",
     "In which part of the world is {x}?", "{x} is on which continent?"),
    ("Which continent does {x} lie in?", "Do you know which continent {x} is on?", "On what continent do I find {x}?"),
)  # fmt: skip
OPPOSITE = Phrasings(
    ("What is the opposite of {x}?", "What's the opposite of {x}?", "Give me the opposite of {x}.", "Name the opposite "
     "of {x}.", "Tell me the opposite of {x}.", "Which word is the opposite of {x}?", "The opposite of {x} is what?",
     "What is the opposite of the word {x}?", "What word means the opposite of {x}?", "{x}: what is the opposite?"),
    ("Do you know the opposite of {x}?", "Could you give me the opposite of {x}?", "I need the opposite of {x}."),
)  # fmt: skip
PLURAL = Phrasings(
    ("What is the plural of {x}?", "What's the plural of {x}?", "Give me the plural of {x}.", "Tell me the plural of "
     "{x}.", "One {x}, two what?", "How do you say more than one {x}?", "Write the plural of {x}.",
     "Name the plural of {x}.", "The plural of {x} is what?"),
    ("Do you know the plural of {x}?", "Could you tell me the plural of {x}?", "I need the plural of {x}."),
)  # fmt: skip
PAST = Phrasings(
    ("What is the past tense of {x}?", "What's the past tense of {x}?", "Give me the past tense of {x}.", "Tell me the "
     "past tense of {x}.", "Write the past tense of {x}.", "The past tense of {x} is what?", "Today I {x}. Yesterday I "
     "did what?", "Name the past tense of {x}."),
    ("Do you know the past tense of {x}?", "Could you tell me the past tense of {x}?", "I need the past tense of {x}."),
)  # fmt: skip
SYMBOL = Phrasings(
    ("What is the symbol of {x}?", "What is the chemical symbol for {x}?", "Tell me the chemical symbol of {x}.",
     "Which symbol does {x} have?", "Give me the symbol for {x}.", "What's the symbol for {x}?", "The chemical symbol "
     "of {x} is what?"),
    ("Do you know the chemical symbol of {x}?", "What symbol stands for {x}?"),
)  # fmt: skip
NUMBER = Phrasings(
    ("What is the atomic number of {x}?", "Tell me the atomic number of {x}.", "Which atomic number does {x} have?",
     "What's the atomic number of {x}?", "Give me the atomic number of {x}.", "The atomic number of {x} is what?"),
    ("Do you know the atomic number of {x}?", "I need the atomic number of {x}."),
)  # fmt: skip
YOUNG = Phrasings(
    ("What is a young {x} called?", "What is a baby {x} called?", "What do you call a young {x}?", "Give me the name "
     "for a young {x}.", "What's the name of a baby {x}?", "The young of {an} is called what?", "Name the young of "
     "{an}."),
    ("What do we call a baby {x}?", "Do you know what a young {x} is called?"),
)  # fmt: skip
SOUND = Phrasings(
    ("What sound does {an} make?", "What does {an} do to make a sound?", "How does {an} sound?", "Tell me what sound "
     "{an} makes.", "Which sound does {an} make?", "What noise does {an} make?"),
    ("Do you know what sound {an} makes?", "Could you tell me the noise that {an} makes?"),
)  # fmt: skip
COLOUR = Phrasings(
    ("What colour is {x}?", "Which colour is {x}?", "What is the colour of {x}?", "Tell me the colour of {x}.", "What "
     "color is {x}?", "What's the colour of {x}?", "{x} is what colour?", "Name the colour of {x}."),
    ("Do you know the colour of {x}?", "Could you tell me what colour {x} is?"),
)  # fmt: skip
KIND = Phrasings(
    ("Is {x} {y}?", "Tell me, is {x} {y}?", "Would you say that {x} is {y}?", "Is it true that {x} is {y}?", "Do "
     "people call {x} {y}?", "Can I say that {x} is {y}?"),
    ("Is it right to call {x} {y}?", "Do you think that {x} is {y}?"),
)  # fmt: skip
WHAT_KIND = Phrasings(
    ("What is {x}?", "What kind of thing is {x}?", "Tell me what {x} is.", "What sort of thing is {x}?", "What's {x}?"),
    ("Do you know what {x} is?", "Could you tell me what kind of thing {x} is?"),
)  # fmt: skip
EXAMPLE = Phrasings(
    ("Name {y}.", "Give me an example of {y}.", "Tell me the name of {y}.", "Can you name {y}?", "Think of {y}."),
    ("Do you know {y}?", "I need an example of {y}."),
)  # fmt: skip
BIGGER = Phrasings(
    ("Which is bigger, {x} or {y}?", "What is bigger: {x} or {y}?", "{x} or {y}: which is "
     "bigger?", "Tell me which is bigger, {x} or {y}."),
    ("Do you know which is bigger, {x} or {y}?", "Of {x} and {y}, which is bigger?"),
)  # fmt: skip
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
NEXT = Phrasings(
    ("Which {w} comes after {x}?", "What {w} comes after {x}?", "What is the {w} after {x}?", "Tell me the {w} after "
     "{x}.", "Which {w} follows {x}?", "After {x} comes which {w}?"),
    ("Do you know which {w} comes after {x}?", "Name the {w} that follows {x}."),
)  # fmt: skip
BEFORE = Phrasings(
    ("Which {w} comes before {x}?", "What {w} comes before {x}?", "What is the {w} before {x}?", "Tell me the {w} "
     "before {x}.", "Before {x} comes which {w}?"),
    ("Do you know which {w} comes before {x}?", "Name the {w} just before {x}."),
)  # fmt: skip
UNCOUNTED = ("grass", "snow", "blood", "coal", "chocolate", "milk", "spinach", "salt", "broccoli")
WITH_THE = ("moon", "Earth", "Sun")


def capital(random: Random, held_out: bool) -> Fact:
    """A country's capital, or one time in four the country of a capital."""
    country, city, _ = random.choice(table("countries"))
    if random.random() < 0.25 and city != country:
        return Fact(COUNTRY.pick(random, held_out, y=city), f"{city} is the capital of {country}.", country)
    return Fact(CAPITAL.pick(random, held_out, x=country), f"The capital of {country} is {city}.", city)


def continent(random: Random, held_out: bool) -> Fact:
    """Where a country is."""
    country, _, where = random.choice(table("countries"))
    return Fact(CONTINENT.pick(random, held_out, x=country), f"{country} is in {where}.", where)


def opposite(random: Random, held_out: bool) -> Fact:
    """Of an adjective, verb or adverb."""
    word, other = random.choice(table("opposites"))
    return Fact(OPPOSITE.pick(random, held_out, x=word), f"The opposite of {word} is {other}.", other)


def plural(random: Random, held_out: bool) -> Fact:
    """Of a noun."""
    one, many = random.choice(table("plurals"))
    return Fact(PLURAL.pick(random, held_out, x=one), f"The plural of {one} is {many}.", many)


def past(random: Random, held_out: bool) -> Fact:
    """Of a verb."""
    verb, form = random.choice(table("past"))
    return Fact(PAST.pick(random, held_out, x=verb), f"The past tense of {verb} is {form}.", form)


def element(random: Random, held_out: bool) -> Fact:
    """Symbol or number."""
    name, symbol, number = random.choice(table("elements"))
    if random.random() < 0.5:
        return Fact(SYMBOL.pick(random, held_out, x=name), f"The chemical symbol of {name} is {symbol}.", symbol)
    return Fact(NUMBER.pick(random, held_out, x=name), f"The atomic number of {name} is {number}.", number)


def animal(random: Random, held_out: bool) -> Fact:
    """Its young, or its sound."""
    if random.random() < 0.5:
        name, young = random.choice(table("young"))
        return Fact(YOUNG.pick(random, held_out, x=name, an=a(name)), f"A young {name} is called {a(young)}.", young)
    name, does = random.choice(table("sounds"))
    return Fact(SOUND.pick(random, held_out, an=a(name)), f"{upper(a(name))} {does}.", does)


def colour(random: Random, held_out: bool) -> Fact:
    """Of a thing that has one."""
    thing, its = random.choice(table("colours"))
    thing = thing if thing in UNCOUNTED else a(thing)
    return Fact(upper(COLOUR.pick(random, held_out, x=thing)), f"{upper(thing)} is {its}.", its)


@cache
def kinds_of() -> dict[str, tuple[str, ...]]:
    """Word -> what it is: some are two things."""
    found: dict[str, tuple[str, ...]] = {}
    for kind, words in groups("kinds").items():
        for word in words:
            found[word] = (*found.get(word, ()), kind)
    return found


def named(word: str, kind: str) -> str:
    """A word of `kinds` as it stands in a sentence."""
    if kind == "ocean":
        return f"the {word}"
    return word if kind in ("planet", "sport", "drink", "metal", "colour") else a(word)


def category(random: Random, held_out: bool) -> Fact:
    """Yes or no, what something is, or an example."""
    kind, words = random.choice(list(groups("kinds").items()))
    word = random.choice(words)
    thing, draw = named(word, kind), random.random()
    if draw < 0.3:
        return Fact(upper(KIND.pick(random, held_out, x=thing, y=a(kind))), f"Yes, {thing} is {a(kind)}.", "Yes")
    if draw < 0.6:
        other = random.choice([name for name in groups("kinds") if name not in kinds_of()[word]])
        if other in ("mammal", "tree") and kind in ("mammal", "fruit"):
            other = "planet"
        answer = f"No, {thing} is not {a(other)}. It is {a(kind)}."
        return Fact(upper(KIND.pick(random, held_out, x=thing, y=a(other))), answer, "No")
    if draw < 0.85:
        return Fact(WHAT_KIND.pick(random, held_out, x=thing), f"{upper(thing)} is {a(kind)}.", kind)
    return Fact(EXAMPLE.pick(random, held_out, y=a(kind)), f"{upper(thing)} is {a(kind)}.", kind)


def bigger(random: Random, held_out: bool) -> Fact:
    """Of two things."""
    order = [row[0] for row in table("sizes")]
    small, big = sorted(random.sample(range(len(order)), 2))
    pair = [f"the {order[n]}" if order[n] in WITH_THE else a(order[n]) for n in (small, big)]
    shown = pair if random.random() < 0.5 else pair[::-1]
    question = upper(BIGGER.pick(random, held_out, x=shown[0], y=shown[1]))
    return Fact(question, f"{upper(pair[1])} is bigger than {pair[0]}.", f"{order[big]} is bigger than")


def calendar(random: Random, held_out: bool) -> Fact:
    """The day or month before or after another."""
    word, names = random.choice((("day", DAYS), ("month", MONTHS)))
    at, step = random.randrange(len(names)), random.choice((1, -1))
    there = names[(at + step) % len(names)]
    asked, side = (NEXT, "after") if step == 1 else (BEFORE, "before")
    return Fact(asked.pick(random, held_out, w=word, x=names[at]), f"{there} comes {side} {names[at]}.", there)


def short(random: Random, held_out: bool) -> Fact:
    """One of a kind each. The last way to ask is held out."""
    question, answer, others = random.choice(table("short"))
    ways = [question, *others.split("|")]
    asked = ways[-1] if held_out else random.choice(ways[:-1])
    return Fact(dressed(asked, random, held_out), answer, answer)


FAMILIES: dict[str, tuple[Family, float]] = {
    "capital": (capital, 3.0),
    "continent": (continent, 2.0),
    "opposite": (opposite, 1.5),
    "plural": (plural, 1.0),
    "past tense": (past, 1.0),
    "element": (element, 1.0),
    "animal": (animal, 1.0),
    "colour": (colour, 0.7),
    "category": (category, 2.0),
    "bigger": (bigger, 0.6),
    "calendar": (calendar, 0.7),
    "short": (short, 2.0),
}


def fact(random: Random, held_out: bool = False) -> Fact:
    """Of any family, by weight."""
    makers, weights = zip(*FAMILIES.values(), strict=True)
    return random.choices(makers, weights)[0](random, held_out)


def document(random: Random, held_out: bool = False) -> Chat:
    """A question and its answer."""
    found = fact(random, held_out)
    return ask(found.question, found.answer)
