"""Chunks of few tokens in the absorbed form: groups of neighbours for a decode kernel, and the same attention."""

from __future__ import annotations

from dataclasses import fields, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.layers.mla import MlaAttention, MlaSpec
from jaxserve.layers.paged import Chunks, Paged, group_chunks
from jaxserve.layers.rope import RopeSpec
from jaxserve.mesh import Placement
from pallas_kernels.device import device_of

SIZE, PAGE, PACKED = 8, 16, 64


def chunks_of(tokens: list[int], positions: list[int], first: int, pages: int) -> Chunks:
    """Packed one behind the other from row `first`, each with pages of its own."""
    table = np.arange(len(tokens) * pages, dtype=np.int32).reshape(len(tokens), pages)[::-1].copy()
    start = first + np.concatenate(([0], np.cumsum(tokens)[:-1]))
    arrays = (table, start, np.asarray(tokens), np.asarray(positions))
    return Chunks(*(jnp.asarray(array, jnp.int32) for array in arrays))


layouts = st.lists(st.integers(0, 30), min_size=1, max_size=6).filter(lambda tokens: sum(tokens) <= PACKED - 3)


@given(layouts, st.integers(0, 3), st.integers(0, 500))
def test_each_token_of_a_chunk_has_one_place_of_its_own(tokens: list[int], first: int, position: int) -> None:
    chunks = chunks_of(tokens, [position + n for n in range(len(tokens))], first, pages=4)
    made = group_chunks(chunks, PACKED, SIZE)
    groups = {field.name: np.asarray(getattr(made, field.name)) for field in fields(made)}
    seen = set()
    row = first
    for chunk, count in enumerate(tokens):
        for offset in range(count):
            group, place = groups["group_T"][row], groups["place_T"][row]
            assert groups["is_chunk_T"][row]
            assert groups["token_GS"][group, place] == row
            assert groups["length_G"][group] - SIZE + place == position + chunk + offset
            np.testing.assert_array_equal(groups["table_GM"][group], chunks.table_RM[chunk])
            seen.add((int(group), int(place)))
            row += 1
    assert len(seen) == sum(tokens) == groups["is_chunk_T"].sum()
    used = {group for group, _ in seen}
    assert all((length > 0) == (group in used) for group, length in enumerate(groups["length_G"]))


@pytest.mark.parametrize(
    ("tokens", "positions"), [([37], [130]), ([1, 8, 9, 0, 20], [0, 64, 7, 0, 31]), ([3, 3], [0, 1])], ids=str
)
def test_absorbed_chunks_are_expanded_ones(tokens: list[int], positions: list[int]) -> None:
    """Two decode rows in front; the cache's other rows are NaN."""
    rng, rope = np.random.default_rng(0), RopeSpec(theta=1e4, rotary_dims=4)
    spec = MlaSpec(3, None, 32, 16, 24, rope, 0.2, 1e-6)
    with nnx.use_eager_sharding(False):
        graph, state = nnx.split(MlaAttention(48, spec, jnp.dtype(jnp.float32), Placement()))
    attention = nnx.merge(graph, jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) / 6, x.dtype), state))
    chunks = chunks_of(tokens, positions, first=2, pages=12)
    pages = chunks.table_RM.size + 2
    cache = np.full((pages, PAGE, spec.cached_dim), np.nan, np.float32)
    table_BM, length_B = np.full((4, 12), pages - 1, np.int32), np.asarray([5, 16, 0, 0], np.int32)
    table_BM[1] = pages - 2
    rows = [(table_BM[n], length_B[n]) for n in range(2)]
    rows += [(chunks.table_RM[n], positions[n] + tokens[n]) for n in range(len(tokens))]
    for table, length in rows:
        for position in range(length):
            cache[int(table[position // PAGE]), position % PAGE] = rng.normal(size=spec.cached_dim)
    nothing = jnp.zeros(PACKED, jnp.int32)
    device = device_of(jax.devices()[0])
    places = (nothing > 0, nothing, nothing, jnp.asarray(table_BM), jnp.asarray(length_B), chunks)
    paged = Paged(device, "auto", *places)
    plain, turned = (jnp.asarray(rng.normal(size=(PACKED, 3, dims)), jnp.float32) for dims in (16, 4))
    wanted = attention.attend(plain, turned, (jnp.asarray(cache),), paged)
    grouped = replace(paged, groups=group_chunks(chunks, PACKED, SIZE))
    found = attention.attend(plain, turned, (jnp.asarray(cache),), grouped)
    live = 2 + sum(tokens)
    np.testing.assert_allclose(found[:live], wanted[:live], rtol=2e-5, atol=2e-5)
    assert np.isfinite(found).all()
