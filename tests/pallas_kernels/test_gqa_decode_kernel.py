"""gqa_decode's Hopper kernels without a GPU: the work list, the numbers in the interpreter, and lowering for CUDA."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.compare import check
from pallas_kernels.device import Device
from pallas_kernels.gqa_decode import mosaic_gpu
from pallas_kernels.gqa_decode.cases import DecodeCase, make_inputs
from pallas_kernels.gqa_decode.contract import GqaDecodeShapes
from pallas_kernels.gqa_decode.kernel import Tuning
from pallas_kernels.gqa_decode.reference import dense
from pallas_kernels.split import Field, num_items, records, split_pages

H200 = Device("gpu", "9.0")
SPLIT = jax.jit(split_pages, static_argnames=("kv_heads", "page_tokens", "parts", "align"))
FITS = {"rows": 8, "kv_heads": 2, "group": 16, "head_dim": 128, "page_tokens": 64, "max_pages": 8, "dtype": "bfloat16"}


@given(
    tokens=st.lists(st.integers(0, 700), min_size=6, max_size=6),
    kv_heads=st.sampled_from([1, 3]),
    parts=st.sampled_from([1, 4, 11]),
    min_pages=st.integers(1, 4),
)
def test_the_split_covers_every_page_once(tokens: list[int], kv_heads: int, parts: int, min_pages: int) -> None:
    """Every page of every unit is in one part; every unit of several items is closed once, by its items in a row."""
    made = SPLIT(np.array(tokens, np.int32), kv_heads=kv_heads, page_tokens=64, parts=parts, min_pages=min_pages)
    split = type(made)(*map(np.asarray, made))
    pages_U = np.repeat([max(1, -(-n // 64)) for n in tokens], kv_heads)
    seen = [np.zeros(pages, int) for pages in pages_U]
    numbers: dict[int, list[int]] = {}
    counts = []
    for part in range(parts):
        first, last = split.first_unit_A[part], split.last_unit_A[part]
        taken = 0
        for unit in range(first, last + 1):
            start = split.first_page_A[part] if unit == first else 0
            end = split.end_page_A[part] if unit == last else pages_U[unit]
            assert 0 <= start < end <= pages_U[unit]
            seen[unit][start:end] += 1
            numbers.setdefault(unit, []).append(part + unit)
            taken += end - start
        counts.append(taken)
    assert all((pages == 1).all() for pages in seen)
    assert len({number for items in numbers.values() for number in items}) == sum(map(len, numbers.values()))
    assert max(map(max, numbers.values())) < num_items(parts, len(pages_U))
    closed = {
        int(split.first_unit_A[part]): list(range(split.first_item_A[part], split.first_item_A[part] + items))
        for part, items in enumerate(split.items_A)
        if items
    }
    assert closed == {unit: items for unit, items in numbers.items() if len(items) > 1}
    assert [len(numbers[unit]) for unit in range(len(pages_U))] == split.items_U.tolist()
    assert [numbers[unit][0] for unit in range(len(pages_U))] == split.first_item_U.tolist()
    assert max(counts) - min(counts[: len([c for c in counts if c]) - 1], default=max(counts)) == 0


@pytest.mark.parametrize(
    ("rows", "pages", "items"),
    [(128, 64, 1), (64, 64, 2), (16, 64, 8), (1, 64, 16), (1, 1024, 128), (384, 64, 1), (2048, 16, 1), (45, 64, None)],
)
def test_units_of_one_size_are_cut_evenly(rows: int, pages: int, items: int | None) -> None:
    """Where that costs a part at most 1/16 more than an equal share (with 45 rows it would)."""
    lengths = np.full(rows, pages * 64, np.int32)
    even, plain = (
        SPLIT(lengths, kv_heads=2, page_tokens=64, parts=264, min_pages=4, align=align) for align in (True, False)
    )
    largest, equal = (_largest_part(np.asarray(split), pages) for split in (even[:4], plain[:4]))
    assert equal <= largest <= equal * 17 / 16
    counts = set(np.asarray(even.items_U).tolist())
    assert counts == {items} if items else len(counts) > 1


def test_rows_that_differ_are_cut_as_they_come() -> None:
    lengths = np.array([4096] * 127 + [4000], np.int32)
    even, plain = (
        SPLIT(lengths, kv_heads=2, page_tokens=64, parts=264, min_pages=4, align=align) for align in (True, False)
    )
    assert all(np.array_equal(one, other) for one, other in zip(even, plain, strict=True))


def _largest_part(split: np.ndarray, pages: int) -> int:
    first_unit, first_page, last_unit, end_page = split
    return int(((last_unit - first_unit) * pages + end_page - first_page).max())


def test_records_hold_what_the_split_says() -> None:
    """Every field of a part, and the ids of its first pages, within the pool whatever the table holds."""
    lengths = np.array([0, 700, 64, 1, 300], np.int32)
    table = np.random.default_rng(0).integers(-5, 99, (5, 12)).astype(np.int32)
    split = SPLIT(lengths, kv_heads=2, page_tokens=64, parts=6, min_pages=1)
    found = np.asarray(records(split, table, lengths, kv_heads=2, pool_pages=50, ids=3))
    assert found.shape == (6, 16)
    for part, record in enumerate(found):
        first, page, last, end = (int(field[part]) for field in split[:4])
        assert record[: Field.FIRST_TOKENS].tolist() == [first, page, last, end]
        assert record[Field.FIRST_TOKENS] == lengths[first // 2]
        for unit, field in ((first, Field.FIRST_ITEMS), (last, Field.LAST_ITEMS)):
            assert record[field : field + 2].tolist() == [split.items_U[unit], split.first_item_U[unit]]
        if first <= last:
            ends_in_it = [one for one in range(6) if split.last_unit_A[one] == last]
            assert record[Field.LAST_MERGERS] == len(ends_in_it) or split.items_U[last] == 1
            assert part == ends_in_it[part + last - split.first_item_U[last]] or split.items_U[last] == 1
        assert record[Field.IDS : Field.IDS + 3].tolist() == np.clip(table[first // 2, page : page + 3], 0, 49).tolist()


INTERPRETED = (
    DecodeCase("group 3, head 64", (0, 1, 130, 64, 300), 2, 3, 64, 64, "bfloat16"),
    DecodeCase("group 16, head 128", (65, 0, 200), 1, 16, 128, 64, "bfloat16"),
    DecodeCase("3 tokens", (0, 1, 3, 65, 130), 1, 3, 64, 64, "bfloat16", tokens=3),
    DecodeCase("fewer queries than columns", (70,), 1, 3, 64, 64, "bfloat16"),
)


@pytest.mark.parametrize("case", INTERPRETED, ids=lambda case: case.name)
def test_b145_numbers_in_the_interpreter(case: DecodeCase) -> None:
    """Whole units, split units, empty rows, NaN in stale rows; four parts, so that some end inside a row."""
    inputs = make_inputs(case, seed=0)
    out = mosaic_gpu.run(
        *map(jnp.asarray, inputs),
        scale=case.scale,
        device=H200,
        tuning=Tuning(parts=4, stages=2, min_pages=1),
        interpret=plgpu.InterpretGPUParams(),
    )
    check(np.asarray(out), dense(*inputs, scale=case.scale), label=case.name)
    assert not np.asarray(out)[np.asarray(case.lengths) == 0].any()


@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "head_dim"),
    [(1, 32, 2, 128), (1, 32, 8, 128), (1, 40, 40, 128), (1, 9, 3, 64), (1, 8, 1, 256), (4, 32, 2, 128), (3, 6, 2, 64)],
)
def test_it_lowers_for_the_gpu(tokens: int, heads: int, kv_heads: int, head_dim: int) -> None:
    """Shapes, layouts and shared memory are checked by the lowering, which needs no GPU. One kernel, merge and all."""
    axis = () if tokens == 1 else (tokens,)
    q = jax.ShapeDtypeStruct((16, *axis, kv_heads, heads // kv_heads, head_dim), jnp.bfloat16)
    pool = jax.ShapeDtypeStruct((32, kv_heads, 64, head_dim), jnp.bfloat16)
    table, lengths = jax.ShapeDtypeStruct((16, 64), jnp.int32), jax.ShapeDtypeStruct((16,), jnp.int32)
    call = jax.jit(lambda *arrays: mosaic_gpu.run(*arrays, scale=0.1, device=H200))
    text = call.trace(q, pool, pool, table, lengths).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 1


@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "head_dim"), [(1, 32, 2, 128), (1, 9, 3, 128), (1, 8, 1, 256), (4, 32, 2, 128)]
)
def test_slices_lower_for_the_gpu(tokens: int, heads: int, kv_heads: int, head_dim: int) -> None:
    """The form in which all parts of a unit merge it."""
    group = heads // kv_heads
    tuning = mosaic_gpu.tuning_in_slices(head_dim, tokens * group)
    axis = () if tokens == 1 else (tokens,)
    q = jax.ShapeDtypeStruct((2, *axis, kv_heads, group, head_dim), jnp.bfloat16)
    pool = jax.ShapeDtypeStruct((32, kv_heads, 64, head_dim), jnp.bfloat16)
    table, lengths = jax.ShapeDtypeStruct((2, 64), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.int32)
    call = jax.jit(lambda *arrays: mosaic_gpu.run(*arrays, scale=0.1, device=H200, tuning=tuning))
    text = call.trace(q, pool, pool, table, lengths).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 1


def test_more_parts_than_run_at_once_must_not_wait() -> None:
    inputs = make_inputs(INTERPRETED[1], seed=0)
    smaller = Device("gpu", "9.0", sms=114)
    with pytest.raises(ValueError, match="128 parts that wait for each other, must be 114 at most"):
        mosaic_gpu.run(*inputs, scale=1.0, device=smaller, tuning=mosaic_gpu.tuning_in_slices(128, 16))


@pytest.mark.parametrize(
    ("units", "head_dim", "sms", "merge"),
    [
        (2, 128, 132, "slices"),
        (32, 256, 132, "slices"),
        (33, 128, 132, "last"),
        (2, 64, 132, "last"),
        (2, 128, 114, "last"),
    ],
)
def test_few_units_merge_in_slices_where_all_parts_run_at_once(units: int, head_dim: int, sms: int, merge: str) -> None:
    """Many units keep two CTAs an SM; a smaller GPU could not run all parts that wait."""
    assert mosaic_gpu.choose(units, head_dim, 16, Device("gpu", "9.0", sms)).merge == merge


def test_queries_are_not_padded() -> None:
    """Where a row has one query token, the kernel reads queries as they are: no launch of XLA's before it."""
    q, pool = jax.ShapeDtypeStruct((16, 8, 4, 128), jnp.bfloat16), jax.ShapeDtypeStruct((32, 8, 64, 128), jnp.bfloat16)
    table, lengths = jax.ShapeDtypeStruct((16, 64), jnp.int32), jax.ShapeDtypeStruct((16,), jnp.int32)
    call = jax.jit(lambda *arrays: mosaic_gpu.run(*arrays, scale=0.1, device=H200))
    text = call.trace(q, pool, pool, table, lengths).lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.pad" not in "".join(line for line in text.splitlines() if "bf16" in line)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "float32"}, "dtype is float32, must be bfloat16"),
        ({"page_tokens": 16}, "page size is 16 tokens, must be 64"),
        ({"head_dim": 96}, "head dimension is 96, must be 64, 128 or 256"),
        ({"group": 65}, "65 queries (1 tokens x 65 heads), must be 64 at most"),
        ({"tokens": 5}, "80 queries (5 tokens x 16 heads), must be 64 at most"),
        ({"head_dim": 256, "tokens": 3}, "48 queries (3 tokens x 16 heads), must be 32 at most"),
    ],
)
def test_what_it_does_not_fit(change: dict, reason: str) -> None:
    assert reason in (mosaic_gpu.why_not(GqaDecodeShapes(**FITS | change), H200) or "")


def test_where_it_fits() -> None:
    assert mosaic_gpu.why_not(GqaDecodeShapes(**FITS), H200) is None
    assert mosaic_gpu.why_not(GqaDecodeShapes(**FITS | {"tokens": 4}), H200) is None
    assert "this is cpu" in (mosaic_gpu.why_not(GqaDecodeShapes(**FITS), Device("cpu")) or "")
