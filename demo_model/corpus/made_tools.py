"""Tools that are put together from a verb, a thing and details of it, and names of any spelling.

Nobody has seen such a tool before: what it is called, what it does and what it wants can only be read from the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

from demo_model.corpus.tables.rows import table
from demo_model.corpus.words import PEOPLE, invented, upper

Values = Mapping[str, Any]
TEXT, NUMBER = "string", "integer"


@dataclass(frozen=True, slots=True)
class Tool:
    """What a tool is for. `names` and each parameter's names vary; the last name is held out where there are more."""

    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    parameters: Mapping[str, tuple[str, tuple[str, ...]]]  # gap -> JSON type, names
    asks: tuple[str, ...]
    held_asks: tuple[str, ...]
    draw: Callable[[Random], Values]
    give: Callable[[Random, Values], tuple[Any, str]]  # what it gives back, and that in words


@dataclass(frozen=True, slots=True)
class Detail:
    """One parameter of a made tool: how it is said behind the thing, and what it may be."""

    said: str
    kind: str
    names: tuple[str, ...]
    draw: Callable[[Random], Any]


VERBS = (
    "paint order rent repair count clean wrap deliver sell print copy move open close lock check feed wash pack bake "
    "cook draw plant pick sort store scan ship fill buy bring carry build hide weigh test hire reserve cancel find"
).split()
THINGS = (
    "chair boat bike lamp room cake door box letter ticket garden fence window car tent kite hat coat pizza book bag "
    "bed clock cup drum flag gift hammer jar key ladder map net oven pen piano plate rope seat shirt sofa spoon vase"
).split()
COLOURS = tuple(row[-1].strip() for row in table("colours"))
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
DETAILS = (
    Detail("for {p}", TEXT, ("person", "owner", "customer", "user", "client", "name"), lambda r: r.choice(PEOPLE)),
    Detail("for {p} guests", NUMBER, ("guests", "seats", "persons", "size"), lambda r: r.randint(2, 12)),
    Detail("in {p}", TEXT, ("color", "colour", "paint", "shade"), lambda r: r.choice(COLOURS)),
    Detail("on {p}", TEXT, ("day", "date", "weekday", "when"), lambda r: r.choice(DAYS)),
    Detail("at {p}", TEXT, ("time", "hour", "at", "start"), lambda r: f"{r.randint(6, 22)}:{r.choice(('00', '30'))}"),
    Detail("at the {p}", TEXT, ("place", "shop", "location", "site"), lambda r: place(r)),
    Detail("from {p}", TEXT, ("source", "from", "start_city", "origin"), lambda r: r.choice(table("countries"))[1]),
    Detail("to {p}", TEXT, ("destination", "to_city", "target", "goal"), lambda r: r.choice(table("countries"))[1]),
    Detail("for {p} dollars", NUMBER, ("price", "cost", "budget", "amount"), lambda r: r.randint(5, 900)),
    Detail("within {p} days", NUMBER, ("days", "limit", "deadline", "wait"), lambda r: r.randint(2, 30)),
)
ASKS = ("{v} {x}.", "Please {v} {x}.", "I want to {v} {x}.", "I need to {v} {x}.", "I would like to {v} {x}.",
        "Can you {v} {x}?", "Help me {v} {x}.", "Let us {v} {x}.")  # fmt: skip
COINS = (
    "dollars euros pounds crowns pesos rubles yen francs coins points tokens grams cups hours stones bottles".split()
)
CHANGES = (
    "How many {t} are {n} {f}?", "How many {t} do I get for {n} {f}?", "Change {n} {f} to {t}.", "{n} {f} in {t}?",
    "Turn {n} {f} into {t}.", "What are {n} {f} in {t}?", "How much is {n} {f} in {t}?", "Swap {n} {f} for {t}.",
)  # fmt: skip


@cache
def lexicon() -> tuple[str, ...]:
    """Words of the tables, small and of letters only."""
    names = ("colours", "countries", "elements", "kinds", "opposites", "past", "plurals", "short", "sounds", "young")
    text = " ".join(" ".join(row) for name in names for row in table(name)).lower()
    words = {word.strip(".,;!?()'\"") for word in text.replace("-", " ").split()}
    return tuple(sorted(word for word in words if len(word) > 1 and word.isascii() and word.isalpha()))


def piece(random: Random) -> str:
    """A word, a part of one, or letters."""
    draw, word = random.random(), random.choice(lexicon())
    if draw < 0.5:
        return word
    if draw < 0.8:
        start = random.randrange(max(1, len(word) - 1))
        return word[start : start + random.randint(1, 5)]
    return "".join(random.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(random.randint(1, 5)))


def spelled(random: Random) -> str:
    """A name of one to three pieces, parted by underscores, by capitals or not at all."""
    pieces = [piece(random) for _ in range(random.choice((1, 1, 2, 2, 2, 3)))]
    draw = random.random()
    if draw < 0.6:
        return "_".join(pieces)
    return "".join(pieces) if draw < 0.8 else pieces[0] + "".join(map(str.capitalize, pieces[1:]))


def place(random: Random) -> str:
    """As a shop or an inn is called."""
    first = random.choice(lexicon()).capitalize() if random.random() < 0.6 else invented(random)
    return f"{first} {random.choice(('House', 'Inn', 'Shop', 'Corner', 'Garden', 'Mill', 'Hotel', 'Market', 'Star'))}"


def changer(random: Random) -> Tool:
    """Gives an amount of one thing in another."""

    def draw(random: Random) -> Values:
        one, other = random.sample(COINS, 2)
        return {"n": random.randint(2, 400), "f": one, "t": other}

    def give(random: Random, at: Values) -> tuple[Any, str]:
        value = random.randint(1, 900)
        return {"result": value}, f"{at['n']} {at['f']} are {value} {at['t']}."

    parameters = [
        ("n", (NUMBER, ("amount", "number", "quantity", "sum"))),
        ("f", (TEXT, ("source", "from", "old", "unit_in"))),
        ("t", (TEXT, ("target", "to", "new", "unit_out"))),
    ]
    if random.random() < 0.3:
        random.shuffle(parameters)
    described = ("Change an amount into another unit.", "Swaps one kind for another.", "Turns a number of one into "
                 "another.", "Exchange values.")  # fmt: skip
    names = ("exchange", "swap_units", "changer", "unit_change", "money_change")
    return Tool(names, described, dict(parameters), CHANGES, (), draw, give)


def made_tool(random: Random) -> Tool:
    """Does something to one or several things, with up to three details; one time in six it is a `changer`."""
    if random.random() < 1 / 6:
        return changer(random)
    verb, thing = random.choice(VERBS), random.choice(THINGS)
    details = random.sample(DETAILS, random.choice((0, 1, 1, 2, 2, 3)))
    counted = not details or random.random() < 0.4
    slots = {f"d{index}": detail for index, detail in enumerate(details)}
    count = {"n": (NUMBER, ("count", "number", "how_many", "quantity", "amount"))} if counted else {}
    parameters = count | {gap: (detail.kind, detail.names) for gap, detail in slots.items()}
    said = [detail.said.replace("{p}", f"{{{gap}}}") for gap, detail in slots.items()]
    ordered = list(parameters.items())
    if random.random() < 0.3:  # else as they are said: of two names without meaning only the order tells which is which
        random.shuffle(ordered)
    what = " ".join([f"{{n}} {thing}s" if counted else f"the {thing}", *said])
    asks = tuple(upper(ask.replace("{v}", verb).replace("{x}", what)) for ask in ASKS)
    described = (f"{upper(verb)} a {thing}.", f"{upper(verb)}s {thing}s.", f"To {verb} a {thing}.", f"For {thing}s.")

    def draw(random: Random) -> Values:
        return {"n": random.randint(2, 60)} | {gap: detail.draw(random) for gap, detail in slots.items()}

    names = (f"{verb}_{thing}", f"{thing}_{verb}", verb, f"{verb}_{thing}s", f"{thing}s")
    return Tool(names, described, dict(ordered), asks, (), draw, done(f"Done: {verb} {what}."))


def done(text: str) -> Callable[[Random, Values], tuple[Any, str]]:
    """A tool that only does something."""
    return lambda random, at: ({"status": "ok"}, text.format(**at))
