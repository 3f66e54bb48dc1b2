"""The pure step programs: (weights, state, batch vectors) -> (state, out), with the state donated.

decode[B]: one token a row. mixed[T]: decode rows first, then chunks of prompts. scored[T]: mixed, and the logprobs of
every packed token. Block table changes are applied first, so that the step itself sees them.

On several devices a step is one `shard_map` over the whole mesh: each device runs this code on its own part of weights,
caches and slots (those of its lane), and the modules add up what they must.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxserve.batch import Bucket, Layout, Program, Shape
from jaxserve.layers.paged import Chunks, Paged, group_chunks
from jaxserve.models.decoder import Decoder, SplitDecoder
from jaxserve.runtime.sample import Sampled, Scores, sample, sample_plain, score
from jaxserve.runtime.state import SlotTables, State
from jaxserve.runtime.vocab import Vocab
from pallas_kernels.device import Device
from pallas_kernels.mla_decode.contract import MOST_TOKENS

GROUPED_TOKENS = 64  # in steps of so many packed tokens at most, latent attention takes the absorbed form for all rows

Step = Callable[[list[jax.Array], State, jax.Array], tuple[State, "Out"]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Out:
    """A step's outputs, a lane a leading row; own arrays, since the donated state cannot be read after the next one."""

    sampled: Sampled
    prompt_scores: Scores | None  # scored programs only, one row a packed token


@dataclass(frozen=True, slots=True)
class StepOptions:
    """What is fixed for all programs of an engine."""

    shape: Shape
    device: Device
    attention: str  # a registry name, or "auto"
    deterministic: bool = False  # a row's numbers are the same to the bit whatever else the step holds


def make_step(split: SplitDecoder, bucket: Bucket, options: StepOptions, plain: bool = False) -> Step:
    """The function to jit for this bucket, named after it so that profiles and cache entries can be told apart.

    The batch is one vector a lane, int32 [lanes, words]; inside the step there is one lane.
    `plain`: for steps whose flags are none but FLAG_RANDOM (see `sample_plain`).
    """
    layout = Layout(bucket, options.shape)
    body = decode if bucket.program is Program.DECODE else mixed

    def step(leaves: list[jax.Array], state: State, vector_ZW: jax.Array) -> tuple[State, Out]:
        batch = layout.views(vector_ZW[0])
        state, out = body(split.merge(leaves), state, batch, options, bucket, plain)
        return state, jax.tree.map(lambda array: array[None], out)

    step.__name__ = f"{bucket.program.value}_{bucket.rows}{'_plain' if plain else ''}"
    return step


def on_mesh[F: Callable](function: F, mesh: Mesh, in_specs: tuple, out_specs: object) -> F:
    """The function as every device of the mesh runs it on its own part; itself where there is one device."""
    if mesh.size == 1:
        return function
    # check_vma would ask every kernel to say along which axes its outputs vary.
    mapped = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    mapped.__name__ = function.__name__
    return mapped


def specs_of(shapes: object) -> object:
    """The PartitionSpecs of a tree of ShapeDtypeStructs with shardings."""
    return jax.tree.map(lambda leaf: leaf.sharding.spec, shapes)


BY_LANE = PartitionSpec("data")  # of everything that a step gets and gives besides the weights


def decode(
    model: Decoder, state: State, batch: dict[str, jax.Array], options: StepOptions, bucket: Bucket, plain: bool
) -> tuple[State, Out]:
    """Each row feeds its slot's last token at `position` and samples the next."""
    shape = options.shape
    table_SM = updated_table(state.table_SM, batch)
    slot_B, position_B = batch["slot"], batch["position"]
    live_B = slot_B < shape.num_slots
    table_BM = table_SM[slot_B]
    page_B, offset_B = places(table_SM, slot_B, position_B, shape)
    paged = Paged(
        options.device,
        options.attention,
        live_B,
        page_B,
        offset_B,
        table_BM,
        length_B=jnp.where(live_B, position_B + 1, 0),
        invariant=options.deterministic,
    )
    hidden_BD, caches = model(state.slots.last_token_S[slot_B], position_B, state.caches, paged)
    slots, sampled = draw_tokens(model, hidden_BD, slot_B, position_B + 1, state, batch, options, plain)
    return State(caches, table_SM, slots), Out(sampled, None)


def mixed(
    model: Decoder, state: State, batch: dict[str, jax.Array], options: StepOptions, bucket: Bucket, plain: bool
) -> tuple[State, Out]:
    """T packed tokens; rows named by sample_row are sampled. Scored programs also score `target` at every token."""
    shape = options.shape
    table_SM = updated_table(state.table_SM, batch)
    slot_T, position_T = batch["slot"], batch["position"]
    token_T = jnp.where(batch["token"] < 0, state.slots.last_token_S[slot_T], batch["token"])
    rows = min(bucket.rows, shape.num_slots)
    is_decode_B = jnp.arange(rows, dtype=jnp.int32) < batch["num_decode"][0]
    chunks = Chunks(table_SM[batch["chunk_slot"]], batch["chunk_start"], batch["chunk_tokens"], batch["chunk_position"])
    page_T, offset_T = places(table_SM, slot_T, position_T, shape)
    paged = Paged(
        options.device,
        options.attention,
        slot_T < shape.num_slots,
        page_T,
        offset_T,
        table_BM=table_SM[slot_T[:rows]],
        length_B=jnp.where(is_decode_B, position_T[:rows] + 1, 0),
        chunks=chunks,
        groups=group_chunks(chunks, bucket.rows, MOST_TOKENS) if bucket.rows <= GROUPED_TOKENS else None,
        invariant=options.deterministic,
    )
    hidden_TD, caches = model(token_T, position_T, state.caches, paged)
    row_Q = batch["sample_row"]
    slots, sampled = draw_tokens(
        model, hidden_TD[row_Q], batch["sample_slot"], position_T[row_Q] + 1, state, batch, options, plain
    )
    scores = score_prompt(model, hidden_TD, batch["target"], shape) if bucket.program is Program.SCORED else None
    return State(caches, table_SM, slots), Out(sampled, scores)


def draw_tokens(
    model: Decoder,
    hidden_QD: jax.Array,
    slot_Q: jax.Array,
    position_Q: jax.Array,
    state: State,
    batch: dict[str, jax.Array],
    options: StepOptions,
    plain: bool,
) -> tuple[SlotTables, Sampled]:
    """Head and sampler over the rows that need a token."""
    shape, logits_QV = options.shape, model.logits(hidden_QD)
    about = {"vocab": vocab_of(model), "vocab_size": shape.vocab_size, "device": options.device}
    if plain:
        return sample_plain(logits_QV, slot_Q, position_Q, state.slots, **about)
    flags = batch["flags"][0]
    return sample(logits_QV, slot_Q, position_Q, state.slots, flags, num_top=shape.max_logprobs, **about)


def vocab_of(model: Decoder) -> Vocab:
    """How the model's logits are cut over the devices."""
    return Vocab(model.spec.vocab_size, model.embed.axes, model.placement.size(model.embed.axes))


def updated_table(table_SM: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
    """Write the changed block table entries; padding goes to the scratch row."""
    return table_SM.at[batch["update_slot"], batch["update_index"]].set(batch["update_page"])


def places(table_SM: jax.Array, slot_T: jax.Array, position_T: jax.Array, shape: Shape) -> tuple[jax.Array, jax.Array]:
    """Page and row in it of each packed token; padding gets page P, whose writes are dropped."""
    page_T = table_SM[slot_T, position_T // shape.page_size_tokens]
    return jnp.where(slot_T < shape.num_slots, page_T, shape.num_pages), position_T % shape.page_size_tokens


def score_prompt(model: Decoder, hidden_TD: jax.Array, target_T: jax.Array, shape: Shape) -> Scores:
    """Logprobs of each packed token's successor; rows without one (target -1) hold numbers that nobody reads."""
    raw_TV = model.logits(hidden_TD)
    vocab = vocab_of(model)
    raw_TV = jnp.where(vocab.ids() < shape.vocab_size, raw_TV, -jnp.inf)
    return score(raw_TV, jnp.maximum(target_T, 0), vocab, shape.max_logprobs)
