"""The split under which a row does not depend on the others: its work list, and its bits in the interpreter."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.compare import check
from pallas_kernels.device import Device
from pallas_kernels.gqa_decode import cases as gqa_cases
from pallas_kernels.gqa_decode import mosaic_gpu as gqa
from pallas_kernels.gqa_decode import reference as gqa_reference
from pallas_kernels.gqa_decode.kernel import Tuning as GqaTuning
from pallas_kernels.mla_decode import cases as mla_cases
from pallas_kernels.mla_decode import mosaic_gpu as mla
from pallas_kernels.mla_decode import reference as mla_reference
from pallas_kernels.mla_decode.work_list import records as mla_records
from pallas_kernels.split import Field, Split, num_items, records, split_rows

H200 = Device("gpu", "9.0")
SPLIT = jax.jit(split_rows, static_argnames=("kv_heads", "page_tokens", "parts", "min_pages"))
MLA_RECORDS = jax.jit(lambda length, split: mla_records(length, split, page_tokens=64))
ROWS = 6


def made(tokens: list[int], **sizes: int) -> Split:
    """The split as numpy arrays, over pages of 64."""
    return Split(*map(np.asarray, SPLIT(np.array(tokens, np.int32), page_tokens=64, **sizes)))


def items_of(split: Split, pages_U: list[int]) -> dict[int, list[tuple[int, int, int]]]:
    """Of each unit: part, first page and end of its items, as a kernel walks them."""
    found: dict[int, list[tuple[int, int, int]]] = {}
    for part, (first, last) in enumerate(zip(split.first_unit_A, split.last_unit_A, strict=True)):
        for unit in range(first, last + 1):
            start = split.first_page_A[part] if unit == first else 0
            end = split.end_page_A[part] if unit == last else pages_U[unit]
            found.setdefault(unit, []).append((part, int(start), int(end)))
    return found


@given(
    tokens=st.lists(st.integers(0, 900), min_size=ROWS, max_size=ROWS),
    kv_heads=st.sampled_from([1, 2]),
    parts=st.sampled_from([1, 4, 6, 13, 40]),
    min_pages=st.integers(1, 3),
)
def test_every_page_is_in_one_part_and_items_are_numbered(
    tokens: list[int], kv_heads: int, parts: int, min_pages: int
) -> None:
    split = made(tokens, kv_heads=kv_heads, parts=parts, min_pages=min_pages)
    pages_U = [max(1, -(-n // 64)) for n in tokens for _ in range(kv_heads)]
    found = items_of(split, pages_U)
    assert sorted(found) == [*range(len(pages_U))]
    for unit, items in found.items():
        assert [start for _, start, _ in items] == [0, *(end for _, _, end in items[:-1])]
        assert items[-1][2] == pages_U[unit] and all(start < end for _, start, end in items)
        numbers = [part + unit for part, _, _ in items]
        assert numbers == [*range(int(split.first_item_U[unit]), numbers[0] + int(split.items_U[unit]))]
        assert numbers[-1] < num_items(parts, len(pages_U))
    closed = {
        int(split.first_unit_A[part]): [*range(split.first_item_A[part], split.first_item_A[part] + items)]
        for part, items in enumerate(split.items_A)
        if items
    }
    wanted = {unit: [part + unit for part, _, _ in items] for unit, items in found.items() if len(items) > 1}
    assert closed == wanted
    if len(pages_U) <= parts:  # what the lists of both kernels count on: used parts come first
        used = split.last_unit_A >= split.first_unit_A
        assert used[: used.sum()].all()


@given(tokens=st.lists(st.integers(0, 900), min_size=ROWS, max_size=ROWS), parts=st.sampled_from([4, 6, 13, 40]))
def test_the_parts_of_a_row_know_each_other(tokens: list[int], parts: int) -> None:
    """In the lists of both kernels, of units that are cut: who they are, and that all of them merge."""
    length = np.array(tokens, np.int32)
    split = made(tokens, kv_heads=1, parts=parts, min_pages=1)
    mine = np.asarray(MLA_RECORDS(length, Split(*map(jnp.asarray, split))))
    other = np.asarray(records(split, np.zeros((ROWS, 16), np.int32), length, kv_heads=1, pool_pages=9, ids=2))
    for row, items in items_of(split, [max(1, -(-n // 64)) for n in tokens]).items():
        for part, start, end in items:
            where = slice(6, 9) if row == split.first_unit_A[part] else slice(9, 12)
            assert mine[part, where][0] == len(items)
            if len(items) > 1:
                assert mine[part, :6].tolist() == [row, row, start, end, end, tokens[row]]
                assert mine[part, where].tolist() == [len(items), items[0][0], len(items)]
                slots = [len(items), items[0][0] + row]
                assert other[part, Field.FIRST_ITEMS : Field.LAST_MERGERS + 1].tolist() == [*slots, *slots, len(items)]


@given(
    tokens=st.integers(0, 900),
    others=st.lists(st.lists(st.integers(0, 900), min_size=ROWS - 1, max_size=ROWS - 1), min_size=2, max_size=4),
    place=st.integers(0, ROWS - 1),
    parts=st.sampled_from([1, 4, 6, 13, 40]),
)
def test_a_row_is_cut_alike_in_any_company(tokens: int, others: list[list[int]], place: int, parts: int) -> None:
    cuts = set()
    for company in others:
        lengths = [*company[:place], tokens, *company[place:]]
        split = made(lengths, kv_heads=1, parts=parts, min_pages=1)
        items = items_of(split, [max(1, -(-n // 64)) for n in lengths])[place]
        cuts.add(tuple((start, end) for _, start, end in items))
    assert len(cuts) == 1


def decode_mla(inputs: tuple, heads: int, scale: float, invariant: bool) -> np.ndarray:
    """A few parts, so that rows are cut."""
    tuning = dataclasses.replace(mla.tuning_for(heads), parts=6, min_pages=1, merge_items=(1, 2))
    arrays = [*map(jnp.asarray, inputs)]
    options = {"device": H200, "tuning": tuning, "interpret": plgpu.InterpretGPUParams(), "invariant": invariant}
    return np.asarray(mla.run(*arrays, rank=512, scale=scale, **options))


def decode_gqa(inputs: tuple, scale: float, invariant: bool) -> np.ndarray:
    """A few parts, so that units are cut."""
    arrays = [*map(jnp.asarray, inputs)]
    options = {"device": H200, "interpret": plgpu.InterpretGPUParams(), "invariant": invariant}
    return np.asarray(gqa.run(*arrays, scale=scale, tuning=GqaTuning(parts=6, stages=2, min_pages=1), **options))


def alone(inputs: tuple, row: int) -> tuple:
    """The others are empty."""
    *arrays, length_B = inputs
    return *arrays, np.where(np.arange(len(length_B)) == row, length_B, 0).astype(np.int32)


LENGTHS = (450, 130, 200)


@pytest.mark.parametrize("heads", [16, 40])
def test_b064_latent_rows_have_the_same_bits_alone_and_in_company(heads: int) -> None:
    """Both kernels; without the fixed split the same comparison fails."""
    case = mla_cases.DecodeCase(f"{heads} heads", LENGTHS, heads, page_tokens=64, dtype="bfloat16")
    inputs = mla_cases.make_inputs(case, seed=0)
    together = decode_mla(inputs, heads, case.scale, invariant=True)
    check(together, mla_reference.dense(*inputs, rank=case.rank, scale=case.scale), label=case.name)
    for row in range(len(LENGTHS)):
        assert np.array_equal(decode_mla(alone(inputs, row), heads, case.scale, invariant=True)[row], together[row])
    one, many = (decode_mla(arrays, heads, case.scale, invariant=False) for arrays in (alone(inputs, 0), inputs))
    assert not np.array_equal(one[0], many[0])


def test_b064_grouped_rows_have_the_same_bits_alone_and_in_company() -> None:
    case = gqa_cases.DecodeCase("group 3", LENGTHS, 2, 3, 64, 64, "bfloat16")
    inputs = gqa_cases.make_inputs(case, seed=0)
    together = decode_gqa(inputs, case.scale, invariant=True)
    check(together, gqa_reference.dense(*inputs, scale=case.scale), label=case.name)
    for row in range(len(LENGTHS)):
        assert np.array_equal(decode_gqa(alone(inputs, row), case.scale, invariant=True)[row], together[row])
    one, many = (decode_gqa(arrays, case.scale, invariant=False) for arrays in (alone(inputs, 0), inputs))
    assert not np.array_equal(one[0], many[0])


def test_the_fixed_split_lowers_for_the_gpu() -> None:
    """More parts than run at once, and none of them waits; 64 rows of a decode step with their full sizes."""
    assert gqa.choose(128, 128, 16, H200, invariant=True).merge == "last"
    shapes = [(64, 2, 16, 128), (32, 2, 64, 128), (32, 2, 64, 128)]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    table, lengths = jax.ShapeDtypeStruct((64, 64), jnp.int32), jax.ShapeDtypeStruct((64,), jnp.int32)
    call = jax.jit(lambda *arrays: gqa.run(*arrays, scale=0.1, device=H200, invariant=True))
    assert "mosaic_gpu_v2" in call.trace(*arrays, table, lengths).lower(lowering_platforms=("cuda",)).as_text()
    q, pool = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((64, 20, 576), (32, 64, 576)))
    call = jax.jit(lambda *arrays: mla.run(*arrays, rank=512, scale=0.1, device=H200, invariant=True))
    assert "mosaic_gpu_v2" in call.trace(q, pool, table, lengths).lower(lowering_platforms=("cuda",)).as_text()
