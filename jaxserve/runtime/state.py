"""What lives on the device between steps: the paged caches, block tables, and one row a request slot of all else.

Every table has S + 1 rows: row S is scratch, so that rows of padding have somewhere harmless to write. The state is
donated to each step and comes back from it; nothing here may be read after the next dispatch.

Under data parallelism each lane has slots, pages and tables of its own: the first dimension of every array is cut over
the mesh's data axis, and a step sees its lane's part, with ids that count from 0.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxserve.batch import Install, Shape
from jaxserve.layers.paged import Cache
from jaxserve.mesh import Placement, sharding
from jaxserve.models.spec import ModelSpec
from jaxserve.request import MAX_BAD_SEQUENCES, MAX_BAD_WORD_TOKENS, MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS

RECENT = MAX_BAD_WORD_TOKENS - 1  # tokens of history that a bad sequence can need
NO_TOKEN = np.int32(2**31 - 1)  # past any vocabulary: scatters with it are dropped, comparisons never match

# SlotTables.integer_SI columns
TOP_K, MIN_POSITION, ROW_FLAGS = range(3)
# SlotTables.real_SI columns
TEMPERATURE, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY = range(6)
# ROW_FLAGS bits: which of the wide tables' rows mean something
ROW_ALLOWED, ROW_BIAS, ROW_BAD, ROW_PENALTY = 1, 2, 4, 8

SEED_WORDS = 2
PLAIN_WORDS = 1 + 3 + 6 + SEED_WORDS + MAX_STOP_TOKEN_IDS  # a row of the vector that `install_plain` takes
INSTALL_ROWS = 16  # slots that one call of it fills


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class SlotTables:
    """Sampling parameters and history by slot. Wide rows mean nothing unless the slot's ROW_FLAGS say so."""

    last_token_S: jax.Array  # int32
    integer_SI: jax.Array  # int32 [S+1, 3]
    real_SI: jax.Array  # float32 [S+1, 6]
    seed_SI: jax.Array  # uint32 [S+1, 2]: high and low word
    masked_SI: jax.Array  # int32 [S+1, 64]: not to be sampled below MIN_POSITION
    recent_SI: jax.Array  # int32 [S+1, 7]: the last tokens, newest last
    bias_id_SI: jax.Array  # int32 [S+1, 1024]
    bias_SI: jax.Array  # float32 [S+1, 1024]
    bad_prefix_SI: jax.Array  # int32 [S+1, 128, 7], right-aligned, -1: any token
    bad_last_SI: jax.Array  # int32 [S+1, 128]
    allowed_SW: jax.Array  # uint32: bit v of the row: token v may be sampled
    prompt_SW: jax.Array  # uint32: token v stands in the prompt
    count_SV: jax.Array  # int32: how often token v was generated


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class State:
    """The whole of it; a pytree, donated."""

    caches: list[Cache]  # one tuple a layer, in layer order
    table_SM: jax.Array  # int32 [S+1, M] block tables
    slots: SlotTables


def state_shapes(spec: ModelSpec, shape: Shape, dtype: jnp.dtype, mesh: Mesh) -> State:
    """The State as ShapeDtypeStructs with shardings: all lanes' rows one after the other."""
    rows, words = shape.lanes * (shape.num_slots + 1), -(-spec.vocab_size // 32)
    by_lane, placement = sharding(mesh, "data"), Placement.of(mesh)

    def array(kind: jnp.dtype, *dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, kind, sharding=by_lane)

    def cache(dims: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        place = NamedSharding(mesh, placement.spec(spec.attention.cache_axes(), dims))
        return jax.ShapeDtypeStruct(dims, dtype, sharding=place)

    pages = shape.lanes * shape.num_pages
    layer = tuple(cache(dims) for dims in spec.attention.cache_shapes(pages, shape.page_size_tokens))
    slots = SlotTables(
        last_token_S=array(jnp.int32, rows),
        integer_SI=array(jnp.int32, rows, 3),
        real_SI=array(jnp.float32, rows, 6),
        seed_SI=array(jnp.uint32, rows, SEED_WORDS),
        masked_SI=array(jnp.int32, rows, MAX_STOP_TOKEN_IDS),
        recent_SI=array(jnp.int32, rows, RECENT),
        bias_id_SI=array(jnp.int32, rows, MAX_LOGIT_BIAS),
        bias_SI=array(jnp.float32, rows, MAX_LOGIT_BIAS),
        bad_prefix_SI=array(jnp.int32, rows, MAX_BAD_SEQUENCES, RECENT),
        bad_last_SI=array(jnp.int32, rows, MAX_BAD_SEQUENCES),
        allowed_SW=array(jnp.uint32, rows, words),
        prompt_SW=array(jnp.uint32, rows, words),
        count_SV=array(jnp.int32, rows, spec.vocab_size),
    )
    return State([layer] * spec.num_layers, array(jnp.int32, rows, shape.max_pages_per_seq), slots)


def make_state(shapes: State, cache_fill: float = 0.0) -> State:
    """Allocate it, straight in its shardings. Tests fill the caches with NaN to prove that stale rows never matter."""
    cache_ids = {id(leaf) for pair in shapes.caches for leaf in pair}
    leaves, tree = jax.tree.flatten(shapes)
    fills = [cache_fill if id(leaf) in cache_ids else 0 for leaf in leaves]

    def fill() -> list[jax.Array]:
        return [jnp.full(leaf.shape, value, leaf.dtype) for leaf, value in zip(leaves, fills, strict=True)]

    places = [leaf.sharding for leaf in leaves]
    return jax.tree.unflatten(tree, jax.jit(fill, out_shardings=places)())


def state_bytes(shapes: State) -> int:
    """Memory of the state without its caches, on each device."""
    leaves = jax.tree.leaves(dataclasses.replace(shapes, caches=[]))
    return sum(int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize for leaf in leaves)


def row_flags(install: Install) -> int:
    """Which wide rows of the slot are in use."""
    penalised = install.repetition_penalty != 1.0 or install.presence_penalty != 0.0 or install.frequency_penalty != 0.0
    return (
        ROW_ALLOWED * bool(install.allowed_token_ids is not None or install.banned_token_ids)
        + ROW_BIAS * bool(install.logit_bias)
        + ROW_BAD * bool(install.bad_sequences)
        + ROW_PENALTY * penalised
    )


def plain_rows(installs: list[Install], shape: Shape) -> np.ndarray:
    """Up to INSTALL_ROWS slots as one int32 array [lanes, INSTALL_ROWS, PLAIN_WORDS], each in its lane's part.

    Unused rows go to the scratch slot.
    """
    rows_ZIW = np.zeros((shape.lanes, INSTALL_ROWS, PLAIN_WORDS), np.int32)
    rows_ZIW[:, :, 0] = shape.num_slots
    rows_ZIW[:, :, -MAX_STOP_TOKEN_IDS:] = NO_TOKEN
    for index, install in enumerate(installs):
        row = rows_ZIW[install.lane, index]
        row[:4] = install.slot, install.top_k, install.min_position, row_flags(install)
        row[4:10].view(np.float32)[:] = (
            install.temperature,
            install.top_p,
            install.min_p,
            install.repetition_penalty,
            install.presence_penalty,
            install.frequency_penalty,
        )
        row[10:12].view(np.uint32)[:] = install.seed >> 32, install.seed & 0xFFFFFFFF
        row[12 : 12 + len(install.masked_until_min)] = install.masked_until_min
    return rows_ZIW


def table_rows(installs: list[Install], shape: Shape) -> np.ndarray:
    """The first pages of up to INSTALL_ROWS slots, int32 [lanes, INSTALL_ROWS, 1 + M]: the slot, then its table's row.

    Entries behind those pages are 0: the steps that write there set them first. Unused rows go to the scratch slot.
    """
    rows_ZIW = np.zeros((shape.lanes, INSTALL_ROWS, 1 + shape.max_pages_per_seq), np.int32)
    rows_ZIW[:, :, 0] = shape.num_slots
    for index, install in enumerate(installs):
        rows_ZIW[install.lane, index, 0] = install.slot
        rows_ZIW[install.lane, index, 1 : 1 + len(install.page_ids)] = install.page_ids
    return rows_ZIW


def install_table(table_SM: jax.Array, rows_ZIW: jax.Array) -> jax.Array:
    """Write the block tables of up to INSTALL_ROWS slots of this lane (see `table_rows`; Z is 1)."""
    return table_SM.at[rows_ZIW[0, :, 0]].set(rows_ZIW[0, :, 1:])


def install_plain(slots: SlotTables, rows_ZIW: jax.Array) -> SlotTables:
    """Write the narrow columns of up to INSTALL_ROWS slots of this lane (see `plain_rows`; Z is 1)."""
    row_IW = rows_ZIW[0]
    slot_I = row_IW[:, 0]
    bits = jax.lax.bitcast_convert_type
    return dataclasses.replace(
        slots,
        integer_SI=slots.integer_SI.at[slot_I].set(row_IW[:, 1:4]),
        real_SI=slots.real_SI.at[slot_I].set(bits(row_IW[:, 4:10], jnp.float32)),
        seed_SI=slots.seed_SI.at[slot_I].set(bits(row_IW[:, 10:12], jnp.uint32)),
        masked_SI=slots.masked_SI.at[slot_I].set(row_IW[:, 12:]),
    )


@dataclass(frozen=True, slots=True, eq=False)
class WideRow:
    """One slot's wide rows on the host."""

    slot_Z: np.ndarray  # int32 [lanes]: the slot in its own lane, the scratch slot in the others
    recent: np.ndarray
    bias_id: np.ndarray
    bias: np.ndarray
    bad_prefix: np.ndarray
    bad_last: np.ndarray
    allowed: np.ndarray
    prompt: np.ndarray
    count: np.ndarray


jax.tree_util.register_dataclass(WideRow)


def wide_row(install: Install, shape: Shape, vocab_rows: int) -> WideRow:
    """What `install_wide` takes for a slot with any ROW_FLAGS; `vocab_rows` is the logits' width."""
    slot_Z = np.full(shape.lanes, shape.num_slots, np.int32)
    slot_Z[install.lane] = install.slot
    recent = np.full(RECENT, -1, np.int32)
    tail = install.token_ids[-RECENT:]
    recent[RECENT - len(tail) :] = tail
    bias_id, bias = np.full(MAX_LOGIT_BIAS, NO_TOKEN, np.int32), np.zeros(MAX_LOGIT_BIAS, np.float32)
    if install.logit_bias:
        ids, values = zip(*install.logit_bias, strict=True)
        bias_id[: len(ids)], bias[: len(ids)] = ids, values
    prefix = np.full((MAX_BAD_SEQUENCES, RECENT), -1, np.int32)
    last = np.full(MAX_BAD_SEQUENCES, NO_TOKEN, np.int32)
    for i, sequence in enumerate(install.bad_sequences):
        prefix[i, RECENT - len(sequence) + 1 :] = sequence[:-1]
        last[i] = sequence[-1]
    allowed = np.full(vocab_rows, install.allowed_token_ids is None)
    if install.allowed_token_ids is not None:
        allowed[list(install.allowed_token_ids)] = True
    allowed[list(install.banned_token_ids)] = False
    prompt = np.zeros(vocab_rows, bool)
    prompt[install.token_ids[: install.num_prompt_tokens]] = True
    count = np.bincount(install.token_ids[install.num_prompt_tokens :], minlength=vocab_rows).astype(np.int32)
    return WideRow(slot_Z, recent, bias_id, bias, prefix, last, pack_bits(allowed), pack_bits(prompt), count)


def pack_bits(flags: np.ndarray) -> np.ndarray:
    """bool [V] -> uint32 [ceil(V / 32)], bit v % 32 of word v // 32."""
    words = np.zeros(-(-len(flags) // 32) * 32, bool)
    words[: len(flags)] = flags
    return np.packbits(words, bitorder="little").view(np.uint32)


def unpack_bits(word_QW: jax.Array, vocab_rows: int) -> jax.Array:
    """uint32 [Q, W] -> bool [Q, V]."""
    bit = jnp.arange(32, dtype=jnp.uint32)
    return ((word_QW[:, :, None] >> bit) & 1).astype(bool).reshape(word_QW.shape[0], -1)[:, :vocab_rows]


def install_wide(slots: SlotTables, row: WideRow) -> SlotTables:
    """Write one slot's wide rows, in its lane."""
    slot = row.slot_Z[0]
    return dataclasses.replace(
        slots,
        recent_SI=slots.recent_SI.at[slot].set(row.recent),
        bias_id_SI=slots.bias_id_SI.at[slot].set(row.bias_id),
        bias_SI=slots.bias_SI.at[slot].set(row.bias),
        bad_prefix_SI=slots.bad_prefix_SI.at[slot].set(row.bad_prefix),
        bad_last_SI=slots.bad_last_SI.at[slot].set(row.bad_last),
        allowed_SW=slots.allowed_SW.at[slot].set(row.allowed),
        prompt_SW=slots.prompt_SW.at[slot].set(row.prompt),
        count_SV=slots.count_SV.at[slot].set(row.count),
    )


def wide_row_shapes(lanes: int, vocab_rows: int) -> WideRow:
    """WideRow as ShapeDtypeStructs."""
    words = -(-vocab_rows // 32)
    dims = {
        "slot_Z": ((lanes,), jnp.int32),
        "recent": ((RECENT,), jnp.int32),
        "bias_id": ((MAX_LOGIT_BIAS,), jnp.int32),
        "bias": ((MAX_LOGIT_BIAS,), jnp.float32),
        "bad_prefix": ((MAX_BAD_SEQUENCES, RECENT), jnp.int32),
        "bad_last": ((MAX_BAD_SEQUENCES,), jnp.int32),
        "allowed": ((words,), jnp.uint32),
        "prompt": ((words,), jnp.uint32),
        "count": ((vocab_rows,), jnp.int32),
    }
    return WideRow(**{name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype) in dims.items()})


def scratch_row(shape: Shape, vocab_rows: int) -> WideRow:
    """A WideRow of zeros for the scratch slot: what the warm-up installs."""
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), wide_row_shapes(shape.lanes, vocab_rows))
    return dataclasses.replace(zeros, slot_Z=np.full(shape.lanes, shape.num_slots, np.int32))
