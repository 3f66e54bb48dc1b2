"""Ways to ask: sentences with gaps, some of which training never sees, and what people put around a question."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from demo_model.corpus.words import lower

_BEFORE = (
    "", "", "", "", "", "", "", "Please tell me: ", "Quick question: ", "Hi! ", "Hello. ", "Tell me: ", "I wonder: ",
    "Help me with this: ", "One more: ", "Hey! ",
)  # fmt: skip
_AFTER = ("", "", "", "", "", "", "", " Thanks!", " Thank you.", " Please answer briefly.")
_ORDERS = ("Tell", "Give", "Name", "Add", "Subtract", "Multiply", "Compute", "Calculate", "Find", "Take", "Write",
     "Solve",
           "Work", "Set", "Start", "Play", "Put", "Send", "Translate", "Remind", "Think", "Count",
           "Explain")  # fmt: skip
_HELD_BEFORE = ("", "", "", "Dear model: ", "Could you help? ", "Next question: ")


@dataclass(frozen=True, slots=True)
class Phrasings:
    """Templates for str.format: `taught` ones make the training split, `held` ones everything that is measured."""

    taught: tuple[str, ...]
    held: tuple[str, ...]

    def pick(self, random: Random, held_out: bool, **gaps: object) -> str:
        """One of them with the gaps filled, as somebody may type it."""
        return dressed(random.choice(self.held if held_out else self.taught).format(**gaps), random, held_out)


def dressed(question: str, random: Random, held_out: bool = False) -> str:
    """The question with a greeting or thanks, or typed without care: one in ten each."""
    if held_out:
        before = random.choice(_HELD_BEFORE)
        return before + question
    if question.startswith(_ORDERS) and question.endswith(".") and random.random() < 0.3:
        question = f"{random.choice(('Can you', 'Will you', 'Can you please'))} {lower(question[:-1])}?"
    kind = random.random()
    if kind < 0.06:
        return question.lower()
    if kind < 0.1:
        return question.rstrip("?.")
    return random.choice(_BEFORE) + question + random.choice(_AFTER)
