"""Takes a converted checkpoint and its source; says which stored parameters are not what the source gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from checkpoints.convert import Conversion
from checkpoints.provenance import checksum, read_provenance
from checkpoints.restore import WEIGHTS_NAME, open_array
from jaxserve.errors import CheckpointError

Step = Callable[[str, int], None]  # a parameter's name and bytes, when it is compared


def verify_checksums(conversion: Conversion, step: Step = lambda name, num_bytes: None) -> int:
    """Compare each stored piece with the record and with a fresh assembly from the source; returns how many.

    Raises CheckpointError naming the parameters that differ.
    """
    weights: Path = conversion.target / WEIGHTS_NAME
    recorded = read_provenance(conversion.target).checksums
    damaged, compared = [], 0
    for name, target in conversion.table.targets.items():
        store = open_array(weights, name)
        for index in range(len(target.pieces)):
            found = checksum((store[index] if target.stacked else store).read().result())
            fresh = checksum(conversion.piece(name, index))
            if not found == fresh == recorded[name][index]:
                damaged.append(f"{name} (piece {index})" if target.stacked else name)
            compared += 1
        step(name, conversion.tensors()[name].num_bytes)
    if damaged:
        raise CheckpointError(f"{conversion.target}: {len(damaged)} parameters are damaged: {', '.join(damaged[:8])}")
    return compared
