"""The corpus: which document comes n-th in a split, from one seed. Shares are of documents, chosen by their tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random

from demo_model.corpus import arithmetic, facts, smalltalk, tool_calls, unknown, wordnet
from demo_model.corpus.document import Chat, Document, Prose, ask
from demo_model.corpus.phrasing import Phrasings
from demo_model.corpus.stories.tell import TOPICS, story
from demo_model.corpus.words import a

TRAIN, VALIDATION = "train", "validation"
ASKED = Phrasings(
    ("Tell me a story about {x}.", "Write a story about {x}.", "Please tell me a story about {x}.", "I want to hear a "
     "story about {x}.", "Can you tell me a story about {x}?", "A story about {x}, please.", "Make up a story about "
     "{x}.", "Tell me a short story about {x}.", "Tell a little story about {x}."),
    ("Could you tell me a tale about {x}?", "I would love a story about {x}."),
)  # fmt: skip
PLAIN = Phrasings(
    ("Tell me a story.", "Please tell me a story.", "Tell me a short story.", "I want to hear a story.", "Write a "
     "story.", "Can you tell me a story?", "A story, please."),
    ("Could you tell me a bedtime story?", "Do you know a nice story?"),
)  # fmt: skip


def prose(random: Random, held_out: bool) -> Prose:
    """A story as it is; no two are alike, so that those of the other split are held out by themselves."""
    del held_out
    return Prose(story(random))


def told_story(random: Random, held_out: bool) -> Chat:
    """A story that somebody asks for."""
    if random.random() < 0.25:
        return ask(PLAIN.pick(random, held_out), story(random))
    topic = random.choice(TOPICS)
    return ask(ASKED.pick(random, held_out, x=a(topic)), story(random, topic))


Maker = Callable[[Random, bool], Document]
SHARES: dict[str, tuple[Maker, float]] = {
    "stories": (prose, 0.06),
    "told stories": (told_story, 0.07),
    "facts": (facts.document, 0.29),
    "arithmetic": (arithmetic.document, 0.20),
    "unknown": (unknown.document, 0.09),
    "small talk": (smalltalk.document, 0.09),
    "tool calls": (tool_calls.document, 0.20),
}


WORDNET_SHARE = 0.2


def documents(split: str, seed: int, start: int, count: int, wordnet_folder: Path | None = None) -> Iterator[Document]:
    """Documents start .. start + count - 1 of a split; each is a function of split, seed and its number.

    With the folder of WordNet's files some are about what words mean.
    """
    if split not in (TRAIN, VALIDATION):
        raise ValueError(f"split: got {split!r}, allowed: {TRAIN!r}, {VALIDATION!r}")
    chosen = list(SHARES.values())
    if wordnet_folder is not None:
        chosen.append((partial(wordnet.document, folder=wordnet_folder), WORDNET_SHARE))
    makers, shares = zip(*chosen, strict=True)
    for number in range(start, start + count):
        random = Random(f"{split} {seed} {number}")
        yield random.choices(makers, shares)[0](random, split == VALIDATION)
