"""Little stories, told by a program: a plot of `plots`, with characters, places and things of `lexicon.txt`."""

from demo_model.corpus.stories.tell import TOPICS, story

__all__ = ["TOPICS", "story"]
