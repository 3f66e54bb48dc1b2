"""Small helpers of English, and names that exist nowhere."""

from __future__ import annotations

from random import Random

PEOPLE = (
    "Ada Amir Anna Ben Bruno Carla Chen Clara Daniel Dora Elena Emil Emma Eva Felix Finn Grace Hana Hugo Ida Ines Ivan "
    "Jack Jonas Julia Karl Kofi Lara Leo Lina Lucas Maja Malik Mara Maria Max Mila Mona Nadia Nina Noah Nora Olga "
    "Omar Oscar Paul Petra Priya Rosa Ruth Sam Sara Sofia Tara Theo Tim Tom Vera Wanda Yara Yusuf Zoe"
).split()
_STARTS = "b br bl c cl d dr f fl g gl gr h j k kr l m n p pl pr qu r s sk st t tr v w x z zh sn th".split()
_MIDDLES = "a e i o u ae oo ia ou ei".split()
_ENDS = "l n r s x m th nd rk sh v z g bb lp rt sk mm".split()
_TAILS = ("ia", "land", "stan", "ora", "ium", "or", "ax", "ett", "une", "ovia", "ish", "o", "")


def invented(random: Random, syllables: int = 2) -> str:
    """A capitalised word that is the name of nothing."""
    parts = [random.choice(_STARTS) + random.choice(_MIDDLES) + random.choice(_ENDS) for _ in range(syllables - 1)]
    parts.append(random.choice(_STARTS) + random.choice(_MIDDLES) + random.choice(_TAILS))
    return "".join(parts).capitalize()


def a(words: str) -> str:
    """The words behind their indefinite article."""
    first = words.split()[0].lower()
    silent = first.startswith(("hour", "honest"))
    as_you = first.startswith(("uni", "use", "euro", "one", "ukulele"))
    return f"an {words}" if silent or (first[0] in "aeiou" and not as_you) else f"a {words}"


def upper(text: str) -> str:
    """With a capital letter in front."""
    return text[:1].upper() + text[1:]


def lower(text: str) -> str:
    """With a small letter in front, unless it begins with a name or "I"."""
    return text if text[:2] in ("I ", "I'") else text[:1].lower() + text[1:]


def joined(words: list[str]) -> str:
    """A list as it is spoken."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
