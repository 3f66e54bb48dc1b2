"""Who goes first: takes a request and its rank of arrival, gives the key by which the engine orders sequences.

A smaller key goes first: into a slot, to a page, to the older half of a step's tokens; a larger one is preempted first.
Keys never change, so that a queue stays sorted.
"""

from __future__ import annotations

from jaxserve.config import POLICIES
from jaxserve.request import TokenRequest

FCFS, PRIORITY, SHORTEST, LONGEST_PREFIX = POLICIES

# By shortest-first a request that has waited a second longer than another may have so many more tokens: what an engine
# with many slots gets through in that time. All age alike, so who is first of two never changes.
TOKENS_A_SECOND = 5_000

Rank = tuple[float, int]


def rank(policy: str, request: TokenRequest, arrival: int) -> Rank:
    """The key of a sequence. Longest prefixes differ from step to step, so the schedule looks at them; see there."""
    if policy == PRIORITY:
        return request.priority, arrival
    if policy == SHORTEST:
        tokens = len(request.prompt_token_ids) + request.max_tokens
        return tokens + TOKENS_A_SECOND * request.arrival_s, arrival
    return 0, arrival
