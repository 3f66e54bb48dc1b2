"""What every op refuses before it looks at sizes: takes an argument from a contract, raises one sentence about it.

Without this a wrong rank or dtype, or an axis without elements, would end as an error somewhere inside an
implementation, which names no argument, and another one in each.
"""

from __future__ import annotations

import jax

FLOATS = ("bfloat16", "float32")
INTEGERS = ("int32",)


def require(op: str, name: str, array: jax.Array, *forms: str, dtypes: tuple[str, ...] = FLOATS) -> None:
    """ValueError where `array` has the rank of none of `forms`, none of the dtypes, or an axis of size 0.

    forms: the names of its axes as the contract writes them, e.g. "P N K E". Sizes are left to the contract.
    """
    given = f"{op}: {name} is {array.dtype} {tuple(array.shape)}, must"
    axes = [form.split() for form in forms]
    if array.ndim not in map(len, axes):
        raise ValueError(f"{given} be {' or '.join(f'[{", ".join(one)}]' for one in axes)}.")
    if str(array.dtype) not in dtypes:
        raise ValueError(f"{given} be {' or '.join(dtypes)}.")
    if 0 in array.shape:
        raise ValueError(f"{given} have no axis of size 0.")
