"""Takes a sequence's text from `detokenize`; gives the text that may be sent, and which stop string ended it.

All stop strings of a request are one Aho-Corasick automaton: its state is the longest end of the text so far that may
still become a stop string, which is just what has to be held back. So the result does not depend on how the text was
cut into tokens. The match that is complete first wins; of those complete at the same character, the longest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from jaxserve.errors import InvalidRequest

MAX_STOP_CHARACTERS = 256  # of one stop string: 64 of them make an automaton of some 4 MB


class StopAutomaton:
    """The stop strings of a request, shared by its choices. Raises InvalidRequest for one that is too long."""

    __slots__ = ("depths", "fails", "first", "goto", "matches")

    def __init__(self, stops: Sequence[str]) -> None:
        self.goto: list[dict[str, int]] = [{}]
        self.depths = [0]  # by state: characters of the beginning it stands for
        self.fails = [0]  # by state: the state of its longest proper end that is a beginning too
        self.matches: list[str | None] = [None]  # by state: the longest stop string that ends here
        for stop in stops:
            if len(stop) > MAX_STOP_CHARACTERS:
                raise InvalidRequest("stop", stop, f"strings of at most {MAX_STOP_CHARACTERS} characters")
            self._add(stop)
        self._link()
        self.first = frozenset(self.goto[0])

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            following = self.goto[state].get(character)
            if following is None:
                following = len(self.goto)
                self.goto[state][character] = following
                self.goto.append({})
                self.depths.append(self.depths[state] + 1)
                self.fails.append(0)
                self.matches.append(None)
            state = following
        self.matches[state] = stop

    def _link(self) -> None:
        waiting = deque(self.goto[0].values())
        while waiting:
            state = waiting.popleft()
            for character, following in self.goto[state].items():
                waiting.append(following)
                self.fails[following] = self.step(self.fails[state], character)
                if self.matches[following] is None:
                    self.matches[following] = self.matches[self.fails[following]]

    def step(self, state: int, character: str) -> int:
        """The state after one more character."""
        while character not in self.goto[state]:
            if state == 0:
                return 0
            state = self.fails[state]
        return self.goto[state][character]


class StopMatcher:
    """One sequence's place in the automaton and the text it holds back."""

    __slots__ = ("_automaton", "_held", "_include", "_state")

    def __init__(self, automaton: StopAutomaton, include_stop_str_in_output: bool = False) -> None:
        self._automaton = automaton
        self._include = include_stop_str_in_output
        self._state = 0
        self._held = ""

    def push(self, text: str, may_end: bool = True) -> tuple[str, str | None]:
        """The text that may be sent now, and the stop string that ended the sequence, if one did.

        With `may_end` false (before min_tokens) a match that is complete within `text` ends nothing.
        """
        automaton, state = self._automaton, self._state
        if state == 0 and automaton.first.isdisjoint(text):
            return text, None
        for at, character in enumerate(text):
            state = automaton.step(state, character)
            match = automaton.matches[state]
            if match is not None and may_end:
                whole = self._held + text[: at + 1]
                self._state, self._held = 0, ""
                return whole if self._include else whole[: -len(match)], match
        while state and not automaton.goto[state]:  # a match that may not end: nothing longer can come of it
            state = automaton.fails[state]
        whole = self._held + text
        sent_characters = len(whole) - automaton.depths[state]
        self._state, self._held = state, whole[sent_characters:]
        return whole[:sent_characters], None

    def flush(self) -> str:
        """The end without a match: what was held back is harmless."""
        text, self._held, self._state = self._held, "", 0
        return text
