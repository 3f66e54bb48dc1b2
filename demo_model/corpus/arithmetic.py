"""Sums, differences and small products, with and without thinking aloud. One pair of numbers in ten is held out."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from random import Random

from demo_model.corpus.document import Chat, ask
from demo_model.corpus.phrasing import Phrasings
from demo_model.corpus.words import PEOPLE

SYMBOLS = {"plus": "+", "minus": "-", "times": "x"}
BARE = Phrasings(
    ("What is {x} {s} {y}?", "{x} {s} {y}", "{x} {s} {y} = ?", "Compute {x} {s} {y}.", "How much is {x} {s} {y}?",
     "{x} {s} {y} is what?", "What's {x} {s} {y}?", "Calculate {x} {s} {y}.", "What is {x} {w} {y}?", "{x} {w} {y}?",
     "How much is {x} {w} {y}?", "Work out {x} {s} {y}.", "Tell me what {x} {w} {y} is.", "Solve {x} {s} {y}.",
     "I need {x} {s} {y}.", "Give me the result of {x} {s} {y}."),
    ("What does {x} {s} {y} make?", "Could you compute {x} {s} {y}?", "Do you know what {x} {w} {y} is?"),
)  # fmt: skip
NAMED = {
    "plus": Phrasings(
        ("Add {x} and {y}.", "What is the sum of {x} and {y}?", "Find the sum of {x} and {y}.", "Add {y} to {x}."),
        ("Could you add {x} and {y}?",),
    ),
    "minus": Phrasings(
        ("Subtract {y} from {x}.", "What is the difference of {x} and {y}?", "Take {y} away from {x}."),
        ("Could you subtract {y} from {x}?",),
    ),
    "times": Phrasings(
        ("Multiply {x} by {y}.", "What is the product of {x} and {y}?", "Find the product of {x} and {y}."),
        ("Could you multiply {x} by {y}?",),
    ),
}
THINGS = "apples pears books stones shells stamps nuts coins pencils cards marbles flowers eggs cookies balls".split()


@dataclass(frozen=True, slots=True)
class Sum:
    """x operation y, asked for in words."""

    question: str
    operation: str
    x: int
    y: int

    @property
    def value(self) -> int:
        """What comes out."""
        return {"plus": self.x + self.y, "minus": self.x - self.y, "times": self.x * self.y}[self.operation]

    @property
    def answer(self) -> str:
        """The short one."""
        return f"{self.x} {SYMBOLS[self.operation]} {self.y} = {self.value}."


def is_held_out(operation: str, x: int, y: int) -> bool:
    """Whether training never sees these numbers together. A function of them alone."""
    return zlib.crc32(f"{operation} {x} {y}".encode()) % 10 == 0


def numbers(random: Random, operation: str, digits: int, held_out: bool) -> tuple[int, int]:
    """Two numbers of at most so many digits; a difference is not negative."""
    top = 10**digits - 1 if operation != "times" else 12
    while True:
        x, y = random.randint(0, top), random.randint(0, top)
        if digits == 2 and operation != "times" and max(x, y) < 10:
            continue
        x, y = (max(x, y), min(x, y)) if operation == "minus" else (x, y)
        if is_held_out(operation, x, y) == held_out:
            return x, y


def make_sum(random: Random, held_out: bool = False, operation: str | None = None, digits: int | None = None) -> Sum:
    """Any, or as asked for."""
    operation = operation or random.choices(("plus", "minus", "times"), (5, 3, 2))[0]
    digits = digits or random.choice((1, 2, 2, 2))
    x, y = numbers(random, operation, digits, held_out)
    asked = NAMED[operation] if random.random() < 0.25 else BARE
    question = asked.pick(random, held_out, x=x, y=y, s=SYMBOLS[operation], w=operation)
    return Sum(question, operation, x, y)


def thoughts(made: Sum) -> str:
    """Digit by digit, as one does on paper."""
    x, y = made.x, made.y
    if made.operation == "times" or max(x, y) < 10:
        return f"I compute {x} {SYMBOLS[made.operation]} {y}. That is {made.value}."
    (x1, x0), (y1, y0) = divmod(x, 10), divmod(y, 10)
    if made.operation == "plus":
        ones = x0 + y0
        carry, digit = divmod(ones, 10)
        steps = f"Ones: {x0} + {y0} = {ones}, write {digit}, carry {carry}. Tens: {x1} + {y1} + {carry} = "
        return f"{steps}{x1 + y1 + carry}. Together: {made.value}."
    borrow = int(x0 < y0)
    steps = (
        f"Ones: {x0 + 10 * borrow} - {y0} = {x0 + 10 * borrow - y0}, borrow {borrow}. Tens: {x1} - {y1} - {borrow} ="
    )
    return f"{steps} {x1 - y1 - borrow}. Together: {made.value}."


def told(random: Random, held_out: bool) -> Chat:
    """A sum as a little story."""
    operation = random.choice(("plus", "minus"))
    x, y = numbers(random, operation, random.choice((1, 2)), held_out)
    x, y = max(x, 2), max(y, 2)
    x = max(x, y)
    if is_held_out(operation, x, y) != held_out:
        return told(random, held_out)
    name, things = random.choice(PEOPLE), random.choice(THINGS)
    if operation == "plus":
        turn = random.choice(("gets {y} more", "finds {y} more", "buys {y} more", "is given {y} more"))
        total = x + y
    else:
        turn = random.choice(
            ("loses {y}", "gives away {y}", "sells {y}", "breaks {y}" if things == "eggs" else "drops {y}")
        )
        total = x - y
    question = f"{name} has {x} {things} and {turn.format(y=y)}. How many {things} does {name} have now?"
    made = Sum(question, operation, x, y)
    noun = things if total != 1 else things.rstrip("s")
    return ask(
        question, f"{made.answer} {name} has {total} {noun} now.", thoughts(made) if random.random() < 0.3 else None
    )


def document(random: Random, held_out: bool = False) -> Chat:
    """Three in ten think first."""
    if random.random() < 0.15:
        return told(random, held_out)
    made = make_sum(random, held_out)
    return ask(made.question, made.answer, thoughts(made) if random.random() < 0.3 else None)
