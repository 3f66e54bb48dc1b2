"""config.json to ModelSpec: what is read, what is refused, and the rope types' numbers."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.errors import ModelError
from jaxserve.layers.rope import RopeSpec, inverse_frequencies
from jaxserve.models.families import model_spec
from jaxserve.models.rope import rope_spec
from tests.fakes.tiny import CONFIG


def test_fields_and_their_defaults() -> None:
    spec = model_spec({k: v for k, v in CONFIG.items() if k not in ("head_dim", "num_key_value_heads")})
    assert (spec.attention.head_dim, spec.attention.num_kv_heads, spec.attention.group) == (16, 4, 1)
    assert spec.eos_token_ids == (2,) and model_spec(CONFIG | {"eos_token_id": [2, 7]}).eos_token_ids == (2, 7)
    assert model_spec(CONFIG | {"attention_bias": True}).attention.out_bias


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model_type": "mamba"}, "config.json: model_type is 'mamba', supported: chatglm, deepseek"),
        ({"hidden_size": "64"}, "config.json: hidden_size is '64', expected: int"),
        ({"hidden_act": "gelu"}, "config.json: hidden_act is 'gelu', supported: 'silu'"),
        ({"num_key_value_heads": 3}, "config.json: num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"rope_scaling": {"type": "longrope"}}, "config.json: rope type is 'longrope', supported: default, linear"),
        ({"rope_scaling": {"type": "linear"}}, "config.json: rope type linear needs factor"),
        ({"torch_dtype": "float8"}, "config.json: torch_dtype is 'float8', supported: bfloat16, float16, float32"),
    ],
)
def test_what_is_not_supported_is_one_sentence(change: dict, sentence: str) -> None:
    with pytest.raises(ModelError) as error:
        model_spec(CONFIG | change)
    assert str(error.value).startswith(sentence)


def test_old_and_new_rope_fields_mean_the_same() -> None:
    old = rope_spec({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}}, 64)
    new = rope_spec({"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}}, 64)
    assert old == new
    assert np.allclose(inverse_frequencies(old) * 4, inverse_frequencies(RopeSpec(5e5, 64)))


def test_llama3_keeps_short_wavelengths_and_divides_long_ones() -> None:
    fields = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = {"rope_theta": 5e5, "rope_scaling": fields | {"original_max_position_embeddings": 8192}}
    ratio = inverse_frequencies(RopeSpec(5e5, 128)) / inverse_frequencies(rope_spec(config, 128))
    assert ratio[0] == pytest.approx(1) and ratio[-1] == pytest.approx(8)
    assert (np.diff(ratio) > -1e-5).all()


def test_yarn_of_deepseek_corrects_dimensions_10_to_23() -> None:
    fields = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}
    config = {"rope_theta": 1e4, "rope_scaling": fields | {"original_max_position_embeddings": 4096}}
    spec = rope_spec(config, 64)
    ratio = inverse_frequencies(RopeSpec(1e4, 64)) / inverse_frequencies(spec)
    assert np.allclose(ratio[:11], 1) and np.allclose(ratio[23:], 40) and 1 < ratio[15] < 40
    assert spec.attention_factor == 1.0
