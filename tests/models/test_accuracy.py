"""Where a bfloat16 model rounds: inputs of products, and what travels between devices; nothing that layers add up."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from checkpoints.source import open_model
from jaxserve.layers.norm import RmsNorm
from jaxserve.mesh import make_mesh
from jaxserve.models.decoder import split_decoder
from jaxserve.models.families import model_spec
from jaxserve.runtime.weights import load_weights
from tests.fakes.forward import PagedForward

GOLDENS = Path(__file__).parents[1] / "goldens"
WIDTH = 24


# Latent attention and experts with a shared one; post-norms and biases; several devices.
@pytest.mark.parametrize(
    ("name", "tensor"), [("deepseek_v2_tiny/lite", 1), ("glm4_tiny/bias", 1), ("glm4_moe_tiny/qk-norm-mtp", 2)]
)
def test_a_layer_computes_in_float32(name: str, tensor: int) -> None:
    source, mesh = open_model(GOLDENS / name), make_mesh(jax.devices(), tensor)
    spec = model_spec(source.config)
    split = split_decoder(spec, jnp.dtype("bfloat16"), mesh)
    forward = PagedForward(split, load_weights(split, source.load), WIDTH, mesh)
    token_T, rows = np.zeros(WIDTH, np.int32), np.zeros(4, np.int32)
    where = (token_T, token_T, (forward.table_RM, rows), (forward.table_RM, rows, rows, rows))
    text = str(forward.forward.trace(forward.leaves, forward.caches, token_T, *where).jaxpr)

    def results(kind: str, operation: str) -> int:
        return len(re.findall(rf":{kind}\[{WIDTH},{spec.hidden_size}\] = {operation}\b", text))

    assert results("f32", "add") >= 2 * spec.num_layers and not results("bf16", "add")
    assert re.search(r":f32\[[\d,]*\] = (exp|logistic)\b", text)
    assert not re.search(r":bf16\[[\d,]*\] = (exp|logistic|div)\b", text)
    # Each layer's two sums and the embedding, whose rows are zero but on one device.
    assert results("bf16", "psum") == (2 * spec.num_layers + 1) * (tensor > 1) and not results("f32", "psum")


def test_a_norm_rounds_once() -> None:
    """transformers rounds before the scale too; a post-norm's result is not rounded at all."""
    with nnx.use_eager_sharding(False):
        norm = RmsNorm(64, 1e-6, jnp.dtype("bfloat16"))
    norm.scale[...] = (1 + 0.3 * jax.random.normal(jax.random.key(0), (64,))).astype(jnp.bfloat16)
    x = jax.random.normal(jax.random.key(1), (50, 64))
    exact = np.asarray(x) / np.sqrt(np.mean(np.square(x), -1, keepdims=True) + 1e-6) * np.asarray(norm.scale[...])
    np.testing.assert_allclose(norm(x, jnp.dtype("float32")), exact, rtol=1e-6)
    assert norm(x).dtype == jnp.bfloat16
    half_ulp = 2.0**-8  # of bfloat16, at a power of two
    np.testing.assert_array_less(np.abs(np.asarray(norm(x), np.float32) / exact - 1), half_ulp * 1.001)
