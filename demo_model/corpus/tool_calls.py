"""Conversations with tools: the right call for a request, what the tool gives back told in words, and when none fits.

Names of tools and of their parameters vary, so that a model learns to read them from the prompt. Two tools and one name
of each other tool are held out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from demo_model.corpus import arithmetic, facts
from demo_model.corpus.document import Chat, Message, assistant, call, result, user
from demo_model.corpus.made_tools import NUMBER, TEXT, Tool, Values, done, made_tool, spelled
from demo_model.corpus.phrasing import dressed
from demo_model.corpus.tables.rows import table
from demo_model.corpus.words import PEOPLE, invented, upper

MADE_SHARE = 0.4  # of the tools in training
CITIES = tuple(row[1] for row in table("countries")) + ("New York", "Hamburg", "Sydney", "Milan", "Boston", "Kyoto")
THINGS = "milk bread eggs apples batteries stamps flowers paper soap candles cheese tea".split()
TASKS = ("call the dentist", "water the plants", "buy milk", "feed the cat", "write to Anna", "pay the rent",
     "clean the kitchen", "pack the bag", "read chapter two", "fix the bike")  # fmt: skip
SONGS = ("Blue Moon", "River Song", "Happy Day", "Morning Light", "Dancing Bear", "Winter Waltz", "Golden Road")
LANGUAGES = ("French", "German", "Spanish", "Italian", "Japanese", "Dutch", "Polish", "Greek")
WORDS = (
    "good morning",
    "thank you",
    "where is the station",
    "a cup of tea",
    "see you soon",
    "the blue house",
    "my dog",
)
SKIES = ("sunny", "cloudy", "rainy", "windy", "snowy", "foggy")
UNITS = (("miles", "kilometers"), ("pounds", "kilograms"), ("inches", "centimeters"), ("feet", "meters"))
STOCKS = ("ACME", "NOVA", "ZENX", "ORBI", "LUMO", "KITE")
PLACES = ("Luigi", "Green Garden", "Blue Door", "Old Mill", "Harbour House", "Lotus")


def city(random: Random) -> Values:
    """One."""
    return {"c": random.choice(CITIES)}


def weather(random: Random, at: Values) -> tuple[Any, str]:
    """Sky and degrees."""
    sky, degrees = random.choice(SKIES), random.randint(-9, 38)
    return {"sky": sky, "degrees": degrees}, f"It is {sky} in {at['c']}, at {degrees} degrees."


def clock(random: Random, at: Values) -> tuple[Any, str]:
    """Hours and minutes."""
    time = f"{random.randint(0, 23):02}:{random.randint(0, 59):02}"
    return {"time": time}, f"It is {time} in {at['c']}."


def computed(random: Random, at: Values) -> tuple[Any, str]:
    """What a calculator gives."""
    x, sign, y = at["e"].split()
    value = int(x) * int(y) if sign == "*" else int(x) + int(y) if sign == "+" else int(x) - int(y)
    return {"result": value}, f"{at['e']} = {value}."


def expression(random: Random) -> Values:
    """Larger than what the model computes by itself."""
    return {"e": f"{random.randint(100, 9999)} {random.choice('+-*')} {random.randint(12, 999)}"}


def rate(random: Random, at: Values) -> tuple[Any, str]:
    """A price."""
    price = random.randint(5, 500)
    return {"price": price}, f"The price of {at['s']} is {price} dollars."


def foreign(random: Random, at: Values) -> tuple[Any, str]:
    """A tool's translation is only repeated: it is made up."""
    text = " ".join("".join(random.choice("aeiourtlnsm") for _ in range(random.randint(2, 6))) for _ in range(2))
    return {"text": text}, f"In {at['l']} it is: {text}."


def converted(random: Random, at: Values) -> tuple[Any, str]:
    """A length or weight."""
    value = random.randint(1, 400)
    return {"value": value}, f"{at['v']} {at['f']} are {value} {at['t']}."


def units(random: Random) -> Values:
    """From one to another."""
    pair = list(random.choice(UNITS))
    random.shuffle(pair)
    return {"v": random.randint(2, 250), "f": pair[0], "t": pair[1]}


TOOLS: tuple[Tool, ...] = (
    Tool(("get_weather", "weather", "current_weather", "lookup_weather", "fetch_weather"),
         ("Get the current weather of a city.", "Tells the weather in a city.", "The weather at a place."),
         {"c": (TEXT, ("city", "location", "place", "town"))},
         ("What is the weather in {c}?", "How is the weather in {c}?", "Is it raining in {c}?",
         "What's the weather like "
          "in {c} now?", "Weather in {c}?", "Tell me the weather in {c}.", "Do I need a coat in {c}?"),
         ("How warm is it in {c}?", "Could you check the weather in {c}?"), city, weather),
    Tool(("get_time", "clock", "current_time", "world_clock", "fetch_time"),
         ("Get the local time of a city.", "Tells what time it is in a city.", "The time at a place."),
         {"c": (TEXT, ("city", "location", "place", "town"))},
         ("What time is it in {c}?", "How late is it in {c}?", "Tell me the time in {c}.", "Time in {c}?",
         "What is the local time in {c}?"),
         ("Could you check what time it is in {c}?", "I need the time in {c}."), city, clock),
    Tool(("calculator", "calculate", "compute", "math", "evaluate"),
         ("Compute an arithmetic expression.", "Calculates with numbers.", "Works out a formula."),
         {"e": (TEXT, ("expression", "formula", "input", "term"))},
         ("What is {e}?", "Compute {e}.", "Calculate {e}.", "How much is {e}?", "Work out {e}."),
         ("Could you compute {e}?", "I need the result of {e}."), expression, computed),
    Tool(("set_timer", "start_timer", "timer", "countdown", "begin_timer"),
         ("Start a timer.", "Sets a timer for some minutes.", "A kitchen timer."),
         {"m": (NUMBER, ("minutes", "duration", "length", "time"))},
         ("Set a timer for {m} minutes.", "Start a timer of {m} minutes.", "Timer for {m} minutes, please.",
         "Wake me in {m} minutes."),
         ("Could you set a timer for {m} minutes?", "I need a timer: {m} minutes."),
         lambda random: {"m": random.randint(2, 90)}, done("The timer is set for {m} minutes.")),
    Tool(("play_music", "play_song", "music_player", "start_music", "play"),
         ("Play a song.", "Plays music.", "The music player."),
         {"s": (TEXT, ("song", "title", "track", "name"))},
         ("Play {s}.", "Please play the song {s}.", "I want to hear {s}.", "Put on {s}."),
         ("Could you play {s}?", "Start the song {s}."), lambda random: {"s": random.choice(SONGS)},
         done("I am playing {s}.")),
    Tool(("send_message", "message", "text_person", "send_text", "write_message"),
         ("Send a text message to a person.", "Sends somebody a message.", "Writes to a contact."),
         {"p": (TEXT, ("to", "recipient", "person", "contact")), "t": (TEXT, ("text", "message", "body", "content"))},
         ("Tell {p} to {t}.", "Send {p} a message: {t}.", "Write to {p}: {t}.", "Message {p}: {t}."),
         ("Could you text {p}: {t}?", "Let {p} know: {t}."),
         lambda random: {"p": random.choice(PEOPLE), "t": random.choice(TASKS)}, done("I sent the message to {p}.")),
    Tool(("add_to_list", "shopping_list", "add_item", "buy_list", "list_add"),
         ("Add a thing to the shopping list.", "Puts something on the shopping list.", "The shopping list."),
         {"i": (TEXT, ("item", "thing", "product", "name")), "n": (NUMBER, ("count", "amount", "quantity", "number"))},
         ("Put {n} {i} on the shopping list.", "Add {n} {i} to my list.", "We need {n} {i} from the shop."),
         ("Could you add {n} {i} to the shopping list?", "Note that I must buy {n} {i}."),
         lambda random: {"i": random.choice(THINGS), "n": random.randint(2, 30)},
         done("I put {n} {i} on the shopping list.")),
    Tool(("set_reminder", "reminder", "remind", "add_reminder", "create_reminder"),
         ("Remind of a task at an hour.", "Sets a reminder.", "Reminds the user of something."),
         {"t": (TEXT, ("task", "text", "what", "note")), "h": (TEXT, ("time", "hour", "at", "when"))},
         ("Remind me to {t} at {h}.", "Set a reminder at {h}: {t}.", "At {h} I must {t}. Remind me."),
         ("Could you remind me at {h} to {t}?", "I should {t} at {h}, please remind me."),
         lambda random: {"t": random.choice(TASKS),
         "h": f"{random.randint(6, 22)}:{random.choice(('00', '15', '30', '45'))}"},
         done("I will remind you at {h}.")),
    Tool(("translate", "translator", "translate_text", "to_language", "interpret"),
         ("Translate a text into a language.", "Translates words.", "Says a text in another language."),
         {"t": (TEXT, ("text", "phrase", "words", "sentence")), "l": (TEXT, ("language", "target", "to", "lang"))},
         ("Translate {t} into {l}.", "How do you say {t} in {l}?", "What is {t} in {l}?"),
         ("Could you translate {t} into {l}?", "I need {t} in {l}."),
         lambda random: {"t": random.choice(WORDS), "l": random.choice(LANGUAGES)}, foreign),
    Tool(("stock_price", "get_price", "stock", "quote", "fetch_quote"),
         ("Get the price of a stock.", "Tells a stock's price.", "Prices at the stock exchange."),
         {"s": (TEXT, ("symbol", "stock", "ticker", "code"))},
         ("What is the price of {s}?", "How much is {s} stock?", "Tell me the stock price of {s}.", "Price of {s}?"),
         ("Could you check the price of {s}?", "I need the price of {s} stock."),
         lambda random: {"s": random.choice(STOCKS)}, rate),
)  # fmt: skip
HELD: tuple[Tool, ...] = (
    Tool(("convert_units",), ("Convert a value from one unit to another.",),
         {"v": (NUMBER, ("value",)), "f": (TEXT, ("from_unit",)), "t": (TEXT, ("to_unit",))},
         (), ("Convert {v} {f} to {t}.", "How many {t} are {v} {f}?"), units, converted),
    Tool(("book_table",), ("Book a table at a restaurant.",),
         {"r": (TEXT, ("restaurant",)), "n": (NUMBER, ("people",))},
         (), ("Book a table for {n} at {r}.", "Reserve a table at {r} for {n} people."),
         lambda random: {"r": random.choice(PLACES), "n": random.randint(2, 9)},
         done("I booked a table for {n} at {r}.")),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shown:
    """A tool with its names for one conversation."""

    tool: Tool
    name: str
    names: Mapping[str, str]  # gap -> the parameter's name
    schema: Mapping[str, Any]

    def arguments(self, values: Values) -> str:
        """JSON, in the schema's order."""
        return json.dumps({self.names[gap]: values[gap] for gap in self.tool.parameters}, ensure_ascii=False)


def varied(random: Random, name: str) -> str:
    """A name as another programmer may have chosen it: that makes reading it from the prompt worth learning."""
    draw = random.random()
    if draw < 0.25:
        return name
    if draw < 0.35:
        first, *rest = name.split("_")
        return first + "".join(map(str.capitalize, rest)) if rest else f"{name}{random.randint(1, 9)}"
    if draw < 0.5:
        return random.choice(("my_{}", "do_{}", "{}_v2", "{}_tool", "{}_api", "the_{}", "{}_now", "run_{}")).format(
            name
        )
    if draw < 0.6:
        return f"{invented(random).lower()}_{name.split('_')[-1]}"
    return invented(random, random.choice((1, 2))).lower() if draw < 0.68 else spelled(random)


def show(random: Random, tool: Tool, held_out: bool) -> Shown:
    """Choose names and words."""

    def pick(names: tuple[str, ...]) -> str:
        return names[-1] if held_out else varied(random, random.choice(names[:-1] or names))

    names = {gap: pick(names) for gap, (_, names) in tool.parameters.items()}
    while len(set(names.values())) < len(names):  # invented ones may meet
        names = {gap: pick(names) for gap, (_, names) in tool.parameters.items()}
    kinds = {gap: kind for gap, (kind, _) in tool.parameters.items()}
    properties = {names[gap]: {"type": kinds[gap]} for gap in names}
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    name = pick(tool.names)
    function = {"name": name, "description": random.choice(tool.descriptions), "parameters": parameters}
    return Shown(tool, name, names, {"type": "function", "function": function})


def toolbox(random: Random, tool: Tool | None, held_out: bool) -> tuple[list[Shown], Shown | None]:
    """One to four tools with different names, among them the one that is needed."""
    pool = [other for other in (TOOLS + HELD if held_out else TOOLS) if other is not tool]
    chosen = random.sample(pool, random.choice((0, 1, 2, 3) if tool else (1, 2, 3)))
    if not held_out:
        chosen = [made_tool(random) if random.random() < MADE_SHARE else other for other in chosen]
    needed = None if tool is None else show(random, tool, held_out)
    named = {one.name: one for one in (show(random, other, held_out) for other in chosen)}
    if needed is None:
        return list(named.values()), None
    shown = [one for one in named.values() if one.name != needed.name]
    shown.insert(random.randint(0, len(shown)), needed)
    return shown, needed


@dataclass(frozen=True, slots=True)
class Request:
    """What a user wants of a tool, and the call that does it."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]
    name: str
    arguments: str
    given: Any
    told: str


def request(random: Random, held_out: bool = False) -> Request:
    """For any tool."""
    tool = random.choice(TOOLS + HELD if held_out else TOOLS)
    if not held_out and random.random() < MADE_SHARE:
        tool = made_tool(random)
    shown, needed = toolbox(random, tool, held_out)
    assert needed is not None
    values = tool.draw(random)
    asked = random.choice(tool.held_asks if held_out else tool.asks).format(**values)
    given, told = tool.give(random, values)
    question = user(asked if tool.names[0] == "send_message" else dressed(upper(asked), random, held_out))
    schemas = tuple(one.schema for one in shown)
    return Request((question,), schemas, needed.name, needed.arguments(values), given, told)


def document(random: Random, held_out: bool = False) -> Chat:
    """A call; a call with what came back; or tools that do not fit the question."""
    if random.random() < 0.2:
        shown, _ = toolbox(random, None, held_out)
        maker = random.choice((facts.document, facts.document, arithmetic.document))
        return Chat(maker(random, held_out).messages, tuple(one.schema for one in shown))
    made = request(random, held_out)
    called = call(made.name, made.arguments)
    if random.random() < 0.5:
        return Chat((*made.messages, called), made.tools)
    given = result(json.dumps(made.given, ensure_ascii=False))
    return Chat((*made.messages, called, given, assistant(made.told)), made.tools)
