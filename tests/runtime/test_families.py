"""Models with latent attention and experts through the real engine: transformers' greedy ids on any mesh.

The cache starts full of NaN; the step updates it in place and copies no weight.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.fakes.tiny import TinyServer

GOLDENS = Path(__file__).parents[1] / "goldens"
SERVERS = {
    "MLA and experts": ("deepseek_v2_tiny/lite", (1, 1, 1)),
    "MLA over 2 x 2 x 2": ("deepseek_v3_tiny/groups-yarn-mtp", (2, 2, 2)),
    "GQA over 2 lanes of 4": ("glm4_moe_tiny/qk-norm-mtp", (1, 4, 2)),
    "dense, kv heads repeated": ("glm4_tiny/bias", (4, 1, 2)),
}


@pytest.fixture(scope="module", params=SERVERS)
def served(request: pytest.FixtureRequest) -> Iterator[tuple[TinyServer, dict[str, np.ndarray]]]:
    name, mesh = SERVERS[request.param]
    server = TinyServer(checkpoint=GOLDENS / name, mesh=mesh)
    yield server, dict(np.load(GOLDENS / name / "reference.npz"))
    server.runner.close()


def test_greedy_ids_are_those_of_transformers_in_any_company(served: tuple[TinyServer, dict]) -> None:
    server, wanted = served
    prompt, ids = wanted["greedy_prompt"].tolist(), wanted["greedy_ids"].tolist()
    others = [wanted[f"ids_{n}"].tolist() for n in range(3)]
    mine = [server.request(prompt + ids[:n], 64 - n) for n in (0, 3, 9, 20, 32)]
    requests = [mine[0], *[server.request(other, 20, temperature=0.9) for other in others], *mine[1:]]
    results = server.run(requests)
    assert [result.token_ids for result in (results[0], *results[4:])] == [ids[n:] for n in (0, 3, 9, 20, 32)]
    assert server.runner.compilations_after_warmup == 0


def test_alone_and_with_others_are_the_same(served: tuple[TinyServer, dict]) -> None:
    server, wanted = served
    sampled = dict(max_tokens=12, temperature=0.8, top_p=0.9, seed=5)
    alone = server.run([server.request(wanted["ids_1"], **sampled)])[0].token_ids
    crowd = [server.request(wanted["ids_0"][n:], 9, temperature=1.0) for n in range(5)]
    assert server.run([*crowd, server.request(wanted["ids_1"], **sampled)])[-1].token_ids == alone


def test_no_step_copies_a_cache_or_a_weight(served: tuple[TinyServer, dict]) -> None:
    """The cache is updated in place, and weights are read where they lie."""
    server, _ = served
    runner = server.runner
    weights = {shard_of(leaf) for leaf in runner.leaves if leaf.ndim > 1}
    caches = {shard_of(leaf) for leaf in jax.tree.leaves(runner.state.caches)}
    for bucket, step in runner.programs.steps.items():
        text = step.as_text()
        entry = text[text.index("\nENTRY ") :]
        parameters = set(re.findall(r"(\S+) = \S+ parameter\(", entry))
        moved = re.findall(r"= (f32\[[\d,]+\])\S* (?:copy|transpose|all-gather)\(\S* ?(%[\w.]+)\)", entry)
        assert not {shape for shape, operand in moved if operand in parameters} & weights, f"{bucket}: copies a weight"
        assert not caches & set(re.findall(r"(f32\[[\d,]+\])\S* copy\(", text)), f"{bucket}: copies a cache"
        aliases = re.search(r"input_output_alias=\{(.*?)\}, entry", text.splitlines()[0])
        assert aliases is not None
        assert aliases.group(1).count("alias)") == len(jax.tree.leaves(runner.state))


def shard_of(leaf: jax.Array) -> str:
    """HLO's name of one device's part."""
    return f"f32[{','.join(map(str, leaf.sharding.shard_shape(leaf.shape)))}]"


def test_pages_of_every_lane_are_used(served: tuple[TinyServer, dict]) -> None:
    server, wanted = served
    server.run([server.request(wanted["ids_0"], 4) for _ in range(2 * server.shape.lanes)])
    tables = np.asarray(server.runner.state.table_SM).reshape(server.shape.lanes, server.shape.num_slots + 1, -1)
    assert (tables[:, :-1].max(axis=(1, 2)) > 0).all()
