"""How a product is shared out: each step of each tile once, shares that differ by a step, few parts a tile."""

from __future__ import annotations

import pytest

from pallas_kernels.dense_gemm.shares import Shares


@pytest.mark.parametrize("tiles", [1, 16, 54, 107, 108, 800])
@pytest.mark.parametrize("steps", [1, 2, 16, 107])
@pytest.mark.parametrize("ctas", [1, 5, 132, 264])
def test_each_step_has_one_owner(tiles: int, steps: int, ctas: int) -> None:
    shares = Shares(tiles, steps, min(ctas, tiles * steps))
    begins = [shares.begin(cta) for cta in range(shares.ctas + 1)]
    sizes = {end - begin for begin, end in zip(begins, begins[1:], strict=False)}
    assert begins[0] == 0 and begins[-1] == tiles * steps
    assert max(sizes) - min(sizes) <= 1 and min(sizes) > 0
    owners = [shares.owner(step) for step in range(shares.total)]
    assert owners == sorted(owners) and all(begins[c] <= step < begins[c + 1] for step, c in enumerate(owners))
    parts = [len(set(owners[tile * steps : (tile + 1) * steps])) for tile in range(tiles)]
    assert parts == [shares.parts(tile) for tile in range(tiles)]
    assert shares.most_parts == max(parts) <= -(-shares.ctas // tiles) + 1
