"""mla_decode's Hopper kernels without a GPU: the work list, the numbers in the interpreter, and lowering for CUDA."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.compare import check
from pallas_kernels.device import Device, device_of
from pallas_kernels.mla_decode import mosaic_gpu
from pallas_kernels.mla_decode.cases import DecodeCase, make_inputs
from pallas_kernels.mla_decode.contract import MlaDecodeShapes
from pallas_kernels.mla_decode.reference import dense
from pallas_kernels.mla_decode.work_list import records
from pallas_kernels.split import num_items, split_pages

RECORDS = jax.jit(lambda length, split: records(length, split, page_tokens=64))
H200 = Device("gpu", "9.0")
SPLIT = jax.jit(split_pages, static_argnames=("kv_heads", "page_tokens", "parts"))
FITS = MlaDecodeShapes(8, heads=16, latent_dim=576, rank=512, page_tokens=64, max_pages=8, dtype="bfloat16")


@given(
    tokens=st.lists(st.integers(0, 700), min_size=6, max_size=6),
    parts=st.sampled_from([1, 4, 11]),
    min_pages=st.integers(1, 4),
)
def test_the_split_covers_every_page_once(tokens: list[int], parts: int, min_pages: int) -> None:
    """Every page of every row is in one part; every row of several items is closed once, by its items in a row."""
    made = SPLIT(np.array(tokens, np.int32), kv_heads=1, page_tokens=64, parts=parts, min_pages=min_pages)
    split = type(made)(*map(np.asarray, made))
    pages_B = [max(1, -(-n // 64)) for n in tokens]
    seen = [np.zeros(pages, int) for pages in pages_B]
    numbers: dict[int, list[int]] = {}
    counts = []
    for part in range(parts):
        first, last = split.first_unit_A[part], split.last_unit_A[part]
        taken = 0
        for row in range(first, last + 1):
            start = split.first_page_A[part] if row == first else 0
            end = split.end_page_A[part] if row == last else pages_B[row]
            assert 0 <= start < end <= pages_B[row]
            seen[row][start:end] += 1
            numbers.setdefault(row, []).append(part + row)
            taken += end - start
        counts.append(taken)
    assert all((pages == 1).all() for pages in seen)
    assert len({number for items in numbers.values() for number in items}) == sum(map(len, numbers.values()))
    assert max(map(max, numbers.values())) < num_items(parts, len(tokens))
    closed = {
        int(split.first_unit_A[part]): list(range(split.first_item_A[part], split.first_item_A[part] + items))
        for part, items in enumerate(split.items_A)
        if items
    }
    assert closed == {row: items for row, items in numbers.items() if len(items) > 1}
    used = [count for count in counts if count]
    assert set(used[:-1]) <= {max(counts)}  # all parts but the last are equally long


@given(tokens=st.lists(st.integers(0, 700), min_size=5, max_size=5), parts=st.sampled_from([1, 4, 11]))
def test_the_parts_of_a_row_know_each_other(tokens: list[int], parts: int) -> None:
    """All parts of a row agree on where it begins, how many they are, and who merges: those that end in it."""
    length = np.array(tokens, np.int32)
    split = SPLIT(length, kv_heads=1, page_tokens=64, parts=parts, min_pages=1)
    made = RECORDS(length, split)
    parts_of: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
    for part, words in enumerate(np.asarray(made)):
        first, last, first_page, first_end, last_end, first_length = map(int, words[:6])
        for row in range(first, last + 1):
            meeting = tuple(map(int, words[6:9] if row == first else words[9:12] if row == last else (1, part, 1)))
            parts_of.setdefault(row, []).append((part, meeting))
        if first <= last:
            assert first_length == tokens[first]
            assert (first_page, last_end) == (split.first_page_A[part], split.end_page_A[part])
            assert first_end == (last_end if first == last else max(1, -(-first_length // 64)))
    lasts = np.asarray(made)[:, 1]
    for row, found in parts_of.items():
        numbers = [part for part, _ in found]
        mergers = sum(int(lasts[part]) == row for part in numbers)
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        if len(numbers) == 1:
            assert {meeting[0] for _, meeting in found} == {1}
        else:
            assert {meeting for _, meeting in found} == {(len(numbers), numbers[0], mergers)}


@pytest.mark.parametrize(
    ("heads", "tokens", "parts", "lengths"),
    [
        (16, None, 4, (0, 1, 130, 64, 300)),
        (20, None, 3, (65, 130)),
        (4, 4, 3, (0, 1, 3, 66, 130)),
        (3, 8, 2, (7, 8, 71, 200)),
        (40, None, 2, (0, 1, 130, 64, 65)),
    ],
)
def test_b145_numbers_in_the_interpreter(heads: int, tokens: int | None, parts: int, lengths: tuple[int, ...]) -> None:
    """Whole rows, split rows, empty rows, several rows of one page a part, NaN in stale rows, several query tokens."""
    case = DecodeCase(f"{heads} heads", lengths, heads, page_tokens=64, dtype="bfloat16", tokens=tokens)
    inputs = make_inputs(case, seed=0)
    tuning = mosaic_gpu.tuning_for(heads * (tokens or 1))
    out = mosaic_gpu.run(
        *map(jnp.asarray, inputs),
        rank=case.rank,
        scale=case.scale,
        device=H200,
        tuning=replace(tuning, parts=parts, min_pages=1, merge_items=(1, 2)),
        interpret=plgpu.InterpretGPUParams(),
    )
    check(np.asarray(out), dense(*inputs, rank=case.rank, scale=case.scale), label=case.name)
    assert not np.asarray(out)[np.asarray(case.lengths) == 0].any()


def test_parts_of_one_page_where_few_pages_are_left() -> None:
    """The choice for few queries gives each page a part of its own, not two to a part, and merges them rightly."""
    tuning = mosaic_gpu.tuning_for(16)
    case = DecodeCase("few pages", (130, 65), 16, page_tokens=64, dtype="bfloat16")
    inputs = make_inputs(case, seed=0)
    cut = {"parts": tuning.parts, "min_pages": tuning.min_pages}
    split = SPLIT(inputs.length_B, kv_heads=1, page_tokens=64, **cut)
    assert split.items_U.tolist() == [3, 2]
    options = {"rank": case.rank, "scale": case.scale, "device": H200}
    out = mosaic_gpu.run(*map(jnp.asarray, inputs), **options, interpret=plgpu.InterpretGPUParams())
    check(np.asarray(out), dense(*inputs, rank=case.rank, scale=case.scale))


def lowered(queries: tuple[int, ...], **changes: bool) -> str:
    """The module of one call, which checks shapes, layouts and shared memory, and needs no GPU."""
    q = jax.ShapeDtypeStruct((16, *queries, 576), jnp.bfloat16)
    pool = jax.ShapeDtypeStruct((32, 64, 576), jnp.bfloat16)
    table, tokens = jax.ShapeDtypeStruct((16, 64), jnp.int32), jax.ShapeDtypeStruct((16,), jnp.int32)
    tuning = replace(mosaic_gpu.tuning_for(math.prod(queries)), **changes)
    call = jax.jit(lambda *arrays: mosaic_gpu.run(*arrays, rank=512, scale=0.1, device=H200, tuning=tuning))
    return call.trace(q, pool, table, tokens).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("queries", [(1,), (16,), (2, 10), (4, 8)])
def test_few_queries_lower_for_the_gpu(queries: tuple[int, ...], fused: bool) -> None:
    """The merge is a kernel of its own, or none."""
    assert lowered(queries, fused=fused).count("mosaic_gpu_v2") == 2 - fused


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "float32"}, "dtype is float32, must be bfloat16"),
        ({"page_tokens": 16}, "page size is 16 tokens, must be 64"),
        ({"rank": 256}, "has 256 of 576 dimensions, must be 512 of 576"),
        ({"heads": 129}, "there are 129 heads, must be 128 at most"),
    ],
)
def test_what_it_does_not_fit(change: dict, reason: str) -> None:
    assert reason in (mosaic_gpu.why_not(replace(FITS, **change), H200) or "")


def test_where_it_fits() -> None:
    assert mosaic_gpu.why_not(FITS, H200) is None
    assert "this is cpu" in (mosaic_gpu.why_not(FITS, Device("cpu")) or "")


def test_a_smaller_hopper_is_refused() -> None:
    """On a chip where not all CTAs run at once, those that wait would wait for ever (H100 PCIe: 114 SMs)."""
    reason = mosaic_gpu.why_not(FITS, Device("gpu", "9.0", 114)) or ""
    assert "needs a GPU of 128 multiprocessors at least, this one has 114" in reason
    chip = SimpleNamespace(platform="gpu", compute_capability="9.0", core_count=114)
    assert device_of(cast(jax.Device, chip)).sms == 114
