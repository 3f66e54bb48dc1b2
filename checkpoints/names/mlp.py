"""The feed-forward blocks' parameters <- a layer's source tensors: gated, gated with a fused first matrix, experts."""

from __future__ import annotations

from checkpoints.names.table import Part, Piece, Target, plain
from jaxserve.layers.moe import MoeSpec


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
    down = tuple(Part(f"{expert}.down_proj.weight", (hidden, width), (hidden, width)) for expert in numbered)
    targets = {
        "router": plain(f"{source}.gate.weight", (spec.num_experts, hidden)),
        "experts_gate_up": Target(tuple(gate_up(width, hidden, expert) for expert in numbered), stacked=True),
        "experts_down": Target(tuple(Piece((part,)) for part in down), stacked=True),
    }
    if spec.bias:
        targets["router_bias"] = plain(f"{source}.gate.e_score_correction_bias", (spec.num_experts,))
    if spec.shared_width:
        shared = gated(spec.shared_width, hidden, f"{source}.shared_experts")
        targets |= {f"shared.{name}": target for name, target in shared.items()}
    return targets
