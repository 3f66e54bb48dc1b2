"""The feed-forward blocks' parameters <- a layer's source tensors: gated, gated with a fused first matrix, experts."""

from __future__ import annotations

from checkpoints.names.table import Cut, Part, Piece, Target, plain
from jaxserve.layers.moe import MoeSpec

# The experts' parameters -> those of shared experts, whose second axis holds the width of all of them: where they are
# not parameters of their own they are the first of the experts (see `MoeSpec.fitted`).
SHARED = {"experts_gate_up": "shared.gate_up", "experts_down": "shared.down"}


def gated(width: int, hidden: int, source: str) -> dict[str, Target]:
    """From `source`.{gate,up,down}_proj."""
    return {
        "gate_up": Target((gate_up(width, hidden, source),)),
        "down": plain(f"{source}.down_proj.weight", (hidden, width)),
    }


def gate_up(width: int, hidden: int, source: str) -> Piece:
    """[2, width, hidden] from `source`.{gate,up}_proj."""
    names = (f"{source}.{name}_proj.weight" for name in ("gate", "up"))
    return Piece(tuple(Part(name, (width, hidden), (1, width, hidden)) for name in names))


def fused_gated(width: int, hidden: int, first: str, second: str) -> dict[str, Target]:
    """From `first`, whose rows are the gate's and then the other's, and `second`."""
    return {
        "gate_up": plain(f"{first}.weight", (2 * width, hidden), (2, width, hidden)),
        "down": plain(f"{second}.weight", (hidden, width)),
    }


def experts(spec: MoeSpec, hidden: int, source: str) -> dict[str, Target]:
    """From `source`.gate (the router), `source`.experts.E and `source`.shared_experts."""
    width, numbered = spec.width, [f"{source}.experts.{i}" for i in range(spec.num_experts)]
    gates = [gate_up(width, hidden, expert) for expert in numbered]
    downs = [Piece((Part(f"{expert}.down_proj.weight", (hidden, width), (hidden, width)),)) for expert in numbered]
    if spec.grouped_shared:
        first_gates, first_downs = shared_pieces(spec, hidden, f"{source}.shared_experts")
        gates, downs = first_gates + gates, first_downs + downs
    targets = {
        "router": plain(f"{source}.gate.weight", (spec.num_experts, hidden)),
        "experts_gate_up": Target(tuple(gates), stacked=True),
        "experts_down": Target(tuple(downs), stacked=True),
    }
    if spec.bias:
        targets["router_bias"] = plain(f"{source}.gate.e_score_correction_bias", (spec.num_experts,))
    if spec.shared_width and not spec.grouped_shared:
        shared = gated(spec.shared_width, hidden, f"{source}.shared_experts")
        targets |= {f"shared.{name}": target for name, target in shared.items()}
    return targets


def shared_pieces(spec: MoeSpec, hidden: int, source: str) -> tuple[list[Piece], list[Piece]]:
    """gate_up and down of each shared expert, from `source`.{gate,up,down}_proj, which have all widths side by side."""
    whole, width = spec.shared_width, spec.width
    gates, downs = [], []
    for start in range(0, whole, width):
        rows = Cut((whole, hidden), 0, start, start + width)
        names = (f"{source}.{name}_proj.weight" for name in ("gate", "up"))
        gates.append(Piece(tuple(Part(name, (whole, hidden), (1, width, hidden), rows) for name in names)))
        columns = Cut((hidden, whole), 1, start, start + width)
        downs.append(Piece((Part(f"{source}.down_proj.weight", (hidden, whole), (hidden, width), columns),)))
    return gates, downs
