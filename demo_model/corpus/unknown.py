"""Questions that nobody could answer from these facts, or at all, and the plain answer that they get."""

from __future__ import annotations

from random import Random

from demo_model.corpus.document import Chat, ask
from demo_model.corpus.phrasing import dressed
from demo_model.corpus.words import PEOPLE, invented

PLACES = ("Paris", "London", "Berlin", "Tokyo", "Oslo", "Rome", "Madrid", "my town", "our village", "New York", "Cairo")
SPORTS = ("football match", "chess game", "tennis final", "hockey game", "race", "swimming contest")
KIN = ("brother", "sister", "mother", "father", "aunt", "uncle", "cousin", "neighbour", "teacher", "boss", "friend")
MADE_UP = "I don't know. I have never heard of {x}."
PRIVATE = "I don't know. I cannot know that about you."
LATER = "I don't know. I cannot see the future."
NOW = "I don't know. I have no news and cannot look things up."
NUMBERS = "I don't know. I have not learned such numbers."
PEOPLE_ANSWER = "I don't know. I have not learned about that person."

Entry = tuple[tuple[str, ...], str]  # ways to ask with gaps, the answer

TAUGHT: tuple[Entry, ...] = (
    (("What is the capital of {x}?", "Tell me the capital of {x}.", "Which city is the capital of {x}?", "What's the "
      "capital of {x}?", "Name the capital of {x}.", "The capital of {x} is which city?"), MADE_UP),
    (("On which continent is {x}?", "Where is {x}?", "Which continent is {x} in?", "Which river flows through {x}?",
      "How many people live in {x}?", "What language do people speak in {x}?"), MADE_UP),
    (("What is a {l}?", "What is the opposite of {l}?", "What does {l} mean?", "Is a {l} a bird?", "What is the plural "
      "of {l}?", "What sound does a {l} make?", "What colour is a {l}?", "What is a young {l} called?"),
     "I don't know. I have never heard the word {l}."),
    (("Who is {p} {x}?", "What did {p} {x} discover?", "When was {p} {x} born?", "What is {p} {x} famous for?",
      "Tell me about {p} {x}."), PEOPLE_ANSWER),
    (("Who wrote the book {x}?", "Who sang the song {x}?", "Who directed the film {x}?", "What is the book {x} about?"),
     MADE_UP),
    (("What is my name?", "How old am I?", "Where do I live?", "What is my favourite colour?", "What did I eat today?",
      "Where did I leave my keys?", "When is my birthday?", "What am I thinking of?", "What is in my pocket?",
      "What am I wearing?", "How tall am I?", "What did I dream last night?"), PRIVATE),
    (("What is the name of my {k}?", "How old is my {k}?", "Where is my {k} now?", "What does my {k} like to eat?",
      "When will my {k} come home?", "What is the phone number of my {k}?", "Does my {k} like me?"), PRIVATE),
    (("What will the weather be tomorrow?", "Will it rain in {c} tomorrow?", "Who will win the {s}?",
    "What will happen next year?", "Will I be rich?", "When will I find my keys?", "Which number will win the lottery?",
      "Will it snow next winter?"), LATER),
    (("What is the weather in {c}?", "What time is it?", "What day is it today?", "Who won the {s} yesterday?", "What "
      "is in the news?", "How much does bread cost today?", "Is the shop in {c} open?", "What is the date?", "Is it "
      "raining in {c}?", "How warm is it in {c} now?", "When does the next train leave?"), NOW),
    (("How many people live in {c}?", "How far is it from {c} to {x}?", "How high is the tower of {c}?", "How many "
      "streets are in {c}?", "How many trees are in {c}?", "How many grains of sand are on a beach?", "How many birds "
      "are in the sky?"), NUMBERS),
    (("Who is the president of {x}?", "Who is the mayor of {c}?", "Who is the king of {x}?", "Who lives next door?",
      "Who built the house at the corner?", "Who is the best player in {c}?"), PEOPLE_ANSWER),
)  # fmt: skip
HELD: tuple[Entry, ...] = (
    (("Do you know the capital of {x}?", "What city is the capital of {x}?", "Which mountains are in {x}?", "What do "
      "people eat in {x}?", "Can you tell me where {x} lies?"), MADE_UP),
    (("Can you explain the word {l}?", "Do you know what a {l} is?", "What is a {l} used for?"), MADE_UP),
    (("Where does {p} {x} work?", "Which prize did {p} {x} win?", "What does {p} {x} look like?"), PEOPLE_ANSWER),
    (("Which song do I like best?", "What did I do last summer?", "What is written in my letter?",
    "How many cousins do I have?", "What did my {k} say to me?", "Where did my {k} go to school?"), PRIVATE),
    (("Who will be the next mayor of {c}?", "Will my {k} visit me on Sunday?", "How will the {s} end?"), LATER),
    (("Is the road to {c} free?", "What did the paper say this morning?", "How long is the queue at the shop?"), NOW),
    (("How many windows does the town hall of {c} have?", "How many dogs live in {c}?", "How much does a horse in {x} "
      "cost?"), NUMBERS),
)  # fmt: skip


def pair(random: Random, held_out: bool = False) -> tuple[str, str]:
    """Question and answer."""
    ways, answer = random.choice(HELD if held_out else TAUGHT)
    name = invented(random, random.choice((2, 2, 3)))
    gaps = {
        "x": name,
        "l": name.lower(),
        "p": random.choice(PEOPLE),
        "k": random.choice(KIN),
        "c": random.choice(PLACES),
        "s": random.choice(SPORTS),
    }
    question = random.choice(ways).format(**gaps)
    return dressed(question, random, held_out), answer.format(x=name, l=name.lower())


def document(random: Random, held_out: bool = False) -> Chat:
    """One question."""
    return ask(*pair(random, held_out))
