"""What the published configs make of a ModelSpec: numbers of models.md, and what is refused in one sentence."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.errors import ModelError
from jaxserve.layers.gqa import GqaSpec
from jaxserve.layers.mla import MlaSpec
from jaxserve.layers.rope import RopeSpec, angles
from jaxserve.models.families import model_spec
from pallas_kernels.rotary import rotate
from tests.checkpoints import published


def mla(config: dict) -> MlaSpec:
    attention = model_spec(config).attention
    assert isinstance(attention, MlaSpec)
    return attention


def gqa(config: dict) -> GqaSpec:
    attention = model_spec(config).attention
    assert isinstance(attention, GqaSpec)
    return attention


def cache_bytes(config: dict) -> int:
    """Of one token in bfloat16."""
    spec = model_spec(config)
    return 2 * spec.num_layers * sum(int(np.prod(shape)) for shape in spec.attention.cache_shapes(1, 1))


def test_b073_the_softmax_factor_of_yarn() -> None:
    """m(40, mscale_all_dim)^2 times the head's own; cos and sin stay as they are when both fields are equal."""
    assert mla(published.V3).scale == pytest.approx(0.135234, abs=1e-6)
    assert mla(published.V2_LITE).scale == pytest.approx(0.114721, abs=1e-6)
    assert mla(published.GLM_47_FLASH).scale == 1 / 16
    assert mla(published.V3).rope.attention_factor == mla(published.V2_LITE).rope.attention_factor == 1.0


def test_cached_bytes_a_token() -> None:
    assert cache_bytes(published.V2_LITE) == 31_104
    assert cache_bytes(published.V3) == 70_272
    assert cache_bytes(published.GLM_47_FLASH) == 54_144
    assert cache_bytes(published.GLM_45_AIR) == 188_416
    assert cache_bytes(published.GLM_4_9B_CHAT) == 40_960


@pytest.mark.parametrize("position", [0, 1, 100])
def test_b080_half_of_a_glm_head_rotates(position: int) -> None:
    """In neighbouring pairs in the dense models, by halves in the others; half also where the config does not say."""
    x = np.random.default_rng(0).normal(size=(1, 128)).astype(np.float32)
    for config, interleaved in ((published.GLM_4_9B_CHAT, True), (published.GLM_45_AIR, False)):
        kept = {name: value for name, value in config.items() if name != "partial_rotary_factor"}
        rope = gqa(kept).rope
        assert rope == gqa(config).rope and (rope.rotary_dims, rope.interleaved) == (64, interleaved)
        turned = np.asarray(rotate(rope.rotary, jnp.asarray(x), *angles(rope, jnp.array([position]))))[0]
        pairs = turned[:64].reshape(32, 2).T if interleaved else turned[:64].reshape(2, 32)
        before = x[0, :64].reshape(32, 2).T if interleaved else x[0, :64].reshape(2, 32)
        turn = np.exp(1j * position * rope.theta ** (-np.arange(32) / 32))
        assert np.allclose(pairs[0] + 1j * pairs[1], (before[0] + 1j * before[1]) * turn, atol=1e-4)
        assert np.array_equal(turned[64:], x[0, 64:])
        wrong = RopeSpec(rope.theta, 64, interleaved=not interleaved)
        other = np.asarray(rotate(wrong.rotary, jnp.asarray(x), *angles(wrong, jnp.array([position]))))[0]
        assert np.allclose(other, turned) == (position == 0)


def test_head_dim_of_a_latent_config_is_not_looked_at() -> None:
    assert mla(published.GLM_47_FLASH | {"head_dim": 64}) == mla(published.GLM_47_FLASH)


def test_the_latent_norms_have_an_eps_of_their_own() -> None:
    """transformers fixes it at 1e-6; other engines take rms_norm_eps, which GLM has as 1e-5."""
    assert mla(published.GLM_47_FLASH).norm_eps == 1e-6
    assert mla(published.GLM_47_FLASH | {"latent_norm_eps": 1e-5}).norm_eps == 1e-5


def test_first_dense_layers() -> None:
    for config, dense in ((published.V3, 3), (published.V2_LITE, 1), (published.GLM_45_AIR, 1)):
        spec = model_spec(config)
        assert [spec.is_moe(i) for i in range(4)] == [i >= dense for i in range(4)]
        assert spec.is_moe(spec.num_layers)  # the MTP layer


def test_all_three_stop_ids_of_glm() -> None:
    ids = [154820, 154827, 154829]
    assert model_spec(published.GLM_47_FLASH | {"eos_token_id": ids}).eos_token_ids == tuple(ids)


@pytest.mark.parametrize(
    ("config", "change", "sentence"),
    [
        (published.V3, {"n_group": 7}, "config.json: n_group is 7, allowed: what divides n_routed_experts 256"),
        (published.V3, {"num_experts_per_tok": 300}, "config.json: num_experts_per_tok is 300, allowed: at most 128"),
        (published.V3, {"topk_group": 9}, "config.json: topk_group is 9, allowed: at most 8, n_group"),
        (published.V3, {"scoring_func": "softmax"}, "config.json: scoring_func is 'softmax', supported: 'sigmoid'"),
        (published.V3, {"moe_layer_freq": 2}, "config.json: moe_layer_freq is 2, supported: 1"),
        (published.V3, {"attention_bias": True}, "config.json: attention_bias is True, supported: False"),
        (published.V2_LITE, {"topk_method": "noaux_tc"}, "config.json: topk_method is 'noaux_tc', supported: greedy"),
        (published.V2_LITE, {"norm_topk_prob": True}, "config.json: norm_topk_prob is True, supported: False"),
        (published.GLM_4_9B_CHAT, {"add_bias_linear": True}, "config.json: add_bias_linear is True, supported: False"),
        (
            published.GLM_47_FLASH,
            {"mlp_layer_types": ["sparse", "dense"]},
            "config.json: mlp_layer_types is ['sparse', 'dense'], supported: 'dense' layers",
        ),
        (published.V3, {"topk_group": 0}, "config.json: topk_group is 0, allowed: at least 1"),
        (published.V3, {"topk_group": None}, "config.json: topk_group is None, expected: int"),
        (published.V3, {"num_experts_per_tok": None}, "config.json: num_experts_per_tok is None, expected: int"),
        (published.V3, {"routed_scaling_factor": None}, "config.json: routed_scaling_factor is None, expected: a pos"),
        (published.V3, {"norm_topk_prob": "false"}, "config.json: norm_topk_prob is 'false', expected: bool"),
        (published.V3, {"rms_norm_eps": -1}, "config.json: rms_norm_eps is -1, expected: a positive number"),
        (published.V3, {"q_lora_rank": "512"}, "config.json: q_lora_rank is '512', expected: int"),
        (published.V3, {"qk_rope_head_dim": 15}, "config.json: partial_rotary_factor is 1.0, allowed: above 0 and"),
        (published.V3, {"first_k_dense_replace": 99}, "config.json: first_k_dense_replace is 99, allowed: at most 61"),
        (published.V3, {"max_position_embeddings": 0}, "config.json: max_position_embeddings is 0, allowed: at least"),
        (published.V3, {"rope_scaling": "yarn"}, "config.json: rope_scaling is 'yarn', expected: an object"),
        (published.V3, {"rope_scaling": {"factor": 40}}, "config.json: rope_scaling names no type, allowed: default"),
        (published.V3, {"rope_scaling": {"type": "yarn", "factor": 0}}, "config.json: factor is 0, expected: a posit"),
        (published.GLM_45_AIR, {"use_qk_norm": "no"}, "config.json: use_qk_norm is 'no', expected: bool"),
        (published.GLM_45_AIR, {"head_dim": 8.0}, "config.json: head_dim is 8.0, expected: int"),
        (published.GLM_45_AIR, {"partial_rotary_factor": 1.5}, "config.json: partial_rotary_factor is 1.5, allowed"),
        (published.GLM_4_9B_CHAT, {"rope_ratio": "500"}, "config.json: rope_ratio is '500', expected: a positive num"),
    ],
)
def test_what_is_not_supported_is_one_sentence(config: dict, change: dict, sentence: str) -> None:
    with pytest.raises(ModelError) as error:
        model_spec(config | change)
    assert str(error.value).startswith(sentence)
