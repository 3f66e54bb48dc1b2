"""The GGUF reader on files written by the gguf package: names, rows, quantised formats, config, tokenizer, damage."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q
from gguf.quants import dequantize, quantize

from checkpoints.export import export
from checkpoints.files import Kind
from checkpoints.readers.gguf import GgufReader, unpermute
from checkpoints.readers.safetensors import SafetensorsReader
from checkpoints.source import open_model
from jaxserve.errors import CheckpointError, ModelError
from jaxserve.models.families import model_spec
from jaxserve.text.tokenizer import load_tokenizer
from tests.checkpoints import tiny

CONFIG = tiny.CONFIG | {"torch_dtype": "float32", "rms_norm_eps": 1e-5}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# A vocabulary of bytes, some merges, and special tokens. Ċ and Ġ are the byte-level spellings of newline and space.
BYTES = [chr(c) for c in range(33, 127)] + ["Ġ", "Ċ"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ hello", "1 2"]
TOKENS = ["<|end|>", "<|im_start|>", "<|im_end|>", *BYTES, *(merge.replace(" ", "") for merge in MERGES), "<tool>"]
TYPES = [3, 3, 3, *[1] * (len(TOKENS) - 4), 4]


def gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in NAMES:
        return f"{NAMES[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.{kind}"


def permute(values: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k: of a head's rows r and r + half become neighbours."""
    dim = len(values) // heads
    order = [h * dim + r + half * dim // 2 for h in range(heads) for r in range(dim // 2) for half in (0, 1)]
    return values[order]


def write_gguf(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    kind: Q = Q.F32,
    fields: Mapping[str, Any] | None = None,
    architecture: str = "llama",
) -> Path:
    """A file as llama.cpp's converter would write it."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    for name, value in (fields or {}).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, bool: writer.add_bool}
        add.get(type(value), writer.add_array)(name, value)
    for name, array in tensors.items():
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        values = permute(array, config[heads]) if heads else array
        stored = Q.F32 if values.ndim == 1 else kind
        writer.add_tensor(
            name if name == "rope_freqs.weight" else gguf_name(name), quantize(values, stored), raw_dtype=stored
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def vocabulary(**more: Any) -> dict[str, Any]:
    fields = {"model": "gpt2", "pre": "smollm", "tokens": TOKENS, "token_type": TYPES, "merges": MERGES}
    fields |= {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, "add_bos_token": False}
    return {f"tokenizer.ggml.{name}": value for name, value in (fields | more).items()}


@pytest.fixture
def tensors() -> dict[str, np.ndarray]:
    return tiny.random_tensors(CONFIG, np.float32)


@pytest.mark.parametrize("bias", [False, True])
def test_b131_names_and_row_order_are_hugging_faces(tmp_path: Path, bias: bool) -> None:
    config = CONFIG | {"attention_bias": bias}
    tensors = tiny.random_tensors(config, np.float32)
    reader = GgufReader(write_gguf(tmp_path / "x.gguf", config, tensors))
    assert reader.tensors.keys() == tensors.keys()
    tiny.assert_equal({name: reader.read(name) for name in tensors}, tensors)
    assert reader.config["attention_bias"] is bias


def test_unpermute_undoes_permute_and_is_not_its_own_inverse() -> None:
    values = np.arange(48.0).reshape(24, 2)
    assert (unpermute(permute(values, 3), 3) == values).all()
    assert not (unpermute(unpermute(permute(values, 3), 3), 3) == values).all()


@pytest.mark.parametrize("kind", [Q.F16, Q.BF16, Q.Q8_0, Q.Q4_1, Q.Q4_0, Q.Q5_1])
def test_quantised_formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Q) -> None:
    monkeypatch.setattr("checkpoints.readers.gguf.DEQUANTISED_BYTES", 1000)  # several pieces a tensor, the last ragged
    config = CONFIG | {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    tensors = tiny.random_tensors(config, np.float32)
    reader = GgufReader(write_gguf(tmp_path / "x.gguf", config, tensors, kind))
    for name, right in tensors.items():
        found = reader.read(name)
        packed = right if right.ndim == 1 else dequantize(quantize(right, kind), kind)
        assert found.dtype == reader.tensors[name].dtype
        np.testing.assert_array_equal(found.astype(np.float32), packed)
    dtypes = {Q.F16: "float16", Q.BF16: "bfloat16"}
    assert reader.config["torch_dtype"] == dtypes.get(kind, "float32")


def test_config(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    fields = {"llama.rope.freq_base": 100000.0} | vocabulary(eot_token_id=4)
    found = GgufReader(write_gguf(tmp_path / "x.gguf", CONFIG, tensors, fields=fields)).config
    same = CONFIG.keys() - {"eos_token_id"}
    assert {name: found[name] for name in same} == {name: CONFIG[name] for name in same}
    assert (found["rope_theta"], found["rope_scaling"]) == (100000.0, None)
    assert (found["bos_token_id"], found["eos_token_id"]) == (1, [2, 4])
    assert model_spec(found).eos_token_ids == (2, 4)


def test_tied_where_there_is_no_output(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    del tensors["lm_head.weight"]
    path = write_gguf(tmp_path / "x.gguf", CONFIG, tensors)
    config = CONFIG | {"tie_word_embeddings": True}
    assert GgufReader(path).config["tie_word_embeddings"] is True
    tiny.assert_equal(open_model(path).load(tiny.wanted(config, "float32")), tiny.expected(config, tensors))


SCALINGS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "none": ({"type": "none"}, None),
    "linear": ({"type": "linear", "factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
    "yarn": (
        {"type": "yarn", "factor": 4.0, "original_context_length": 16},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    ),
}


@pytest.mark.parametrize("kind", SCALINGS)
def test_rope_scaling(tmp_path: Path, tensors: dict[str, np.ndarray], kind: str) -> None:
    given, right = SCALINGS[kind]
    fields = {f"llama.rope.scaling.{name}": value for name, value in given.items()}
    config = GgufReader(write_gguf(tmp_path / "x.gguf", CONFIG, tensors, fields=fields)).config
    assert config["rope_scaling"] == right
    model_spec(config)


def test_llama3_scaling_is_found_from_its_divisors(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    theta, dim = 500000.0, CONFIG["head_dim"]
    divisors = []
    for pair in range(dim // 2):
        wavelength = 2 * np.pi * theta ** (2 * pair / dim)
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192:
            divisors.append(32.0)
        else:
            smooth = (8192 / wavelength - 1) / 3
            divisors.append(1 / ((1 - smooth) / 32 + smooth))
    tensors["rope_freqs.weight"] = np.array(divisors, np.float32)
    fields = {"llama.rope.freq_base": theta}
    reader = GgufReader(write_gguf(tmp_path / "x.gguf", CONFIG, tensors, fields=fields))
    assert reader.config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert "rope_freqs.weight" not in reader.tensors
    tensors["rope_freqs.weight"] = tensors["rope_freqs.weight"][::-1].copy()
    with pytest.raises(ModelError, match="does not follow the llama3 rule"):
        GgufReader(write_gguf(tmp_path / "y.gguf", CONFIG, tensors, fields=fields))


def exported(tmp_path: Path, fields: Mapping[str, Any]) -> Path:
    tensors = tiny.random_tensors(CONFIG, np.float32)
    export(GgufReader(write_gguf(tmp_path / "x.gguf", CONFIG, tensors, fields=fields)), tmp_path / "hf")
    return tmp_path / "hf"


def test_export_is_a_hugging_face_directory(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    reader = SafetensorsReader(exported(tmp_path, vocabulary()))
    tiny.assert_equal({name: reader.read(name) for name in reader.tensors}, tensors)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "x.gguf"]
    with pytest.raises(CheckpointError, match="is there already"):
        export(GgufReader(tmp_path / "x.gguf"), tmp_path / "hf")


def test_tokenizer(tmp_path: Path) -> None:
    fields = vocabulary() | {"tokenizer.chat_template": "{{ messages[0].content }}"}
    tokenizer = load_tokenizer(exported(tmp_path, fields))
    assert tokenizer is not None
    text = "hello hello<|im_end|>\n12<tool>"
    ids = tokenizer.encode(text)
    digits = [TOKENS.index("1"), TOKENS.index("2")]  # each alone, although there is a merge
    words = [TOKENS.index("hello"), TOKENS.index("Ġhello"), 2, TOKENS.index("Ċ")]
    assert ids == [*words, *digits, TOKENS.index("<tool>")]
    assert tokenizer.decode(ids) == text
    assert tokenizer.special_ids == {0, 1, 2}
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (1, 2, len(TOKENS))
    assert tokenizer.chat_template == "{{ messages[0].content }}"


@pytest.mark.parametrize(("pre", "right"), [("gpt-2", ["12"]), ("llama-bpe", ["12"]), ("smollm", ["1", "2"])])
def test_pre_tokenizers(tmp_path: Path, pre: str, right: list[str]) -> None:
    tokenizer = load_tokenizer(exported(tmp_path, vocabulary(pre=pre)))
    assert tokenizer is not None
    assert tokenizer.encode("12") == [TOKENS.index(token) for token in right]


def test_bos_is_added_where_the_file_says_so(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(exported(tmp_path, vocabulary(add_bos_token=True)))
    assert tokenizer is not None
    assert tokenizer.encode("hello") == [1, TOKENS.index("hello")]
    assert tokenizer.encode("hello", add_special_tokens=False) == [TOKENS.index("hello")]


@pytest.mark.parametrize(
    ("more", "words"), [({"pre": "klingon"}, "'klingon', supported"), ({"model": "bert"}, "'bert', supported")]
)
def test_unknown_tokenizers(tmp_path: Path, more: dict[str, str], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        exported(tmp_path, vocabulary(**more))
    assert not (tmp_path / "hf").exists()


PIECES = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)]]
PIECES += ["▁▁", "he", "ll", "hell", "hello", "▁hello", *"▁helo", "▁w"]
SCORES = [0.0] * 259 + [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0, *[-100.0] * 5, -7.0]


@pytest.mark.parametrize("prefix", [True, False])
def test_sentence_piece_tokenizer(tmp_path: Path, prefix: bool) -> None:
    types = [2, 3, 3, *[6] * 256, *[1] * (len(PIECES) - 259)]
    fields = {"model": "llama", "tokens": PIECES, "scores": SCORES, "token_type": types, "add_space_prefix": prefix}
    fields |= {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    tokenizer = load_tokenizer(exported(tmp_path, {f"tokenizer.ggml.{name}": value for name, value in fields.items()}))
    assert tokenizer is not None
    text = "hello hello  h€</s>"
    ids = tokenizer.encode(text)
    first = "▁hello" if prefix else "hello"
    euro = [PIECES.index(f"<0x{byte:02X}>") for byte in "€".encode()]
    assert ids == [1, *map(PIECES.index, (first, "▁hello", "▁▁", "h")), *euro, 2]
    assert tokenizer.decode(ids[1:]) == text
    assert tokenizer.special_ids == {0, 1, 2}


def test_a_file_without_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = write_gguf(tmp_path / "x.gguf", CONFIG, tiny.random_tensors(CONFIG, np.float32))
    assert open_model(path).tokenizer_dir is None


def test_a_model_source_keeps_what_it_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tensors: dict[str, np.ndarray]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = write_gguf(tmp_path / "x.gguf", CONFIG, tensors, fields=vocabulary())
    source = open_model(path)
    assert (source.kind, source.dtype) == (Kind.GGUF, "float32")
    assert source.tokenizer_dir is not None and (source.tokenizer_dir / "tokenizer.json").is_file()
    monkeypatch.setattr("checkpoints.files.GgufReader", None)  # the second time nothing is parsed
    assert open_model(path) == source or open_model(path).tokenizer_dir == source.tokenizer_dir
    tiny.assert_equal(source.load(tiny.wanted(CONFIG, "float32")), tiny.expected(CONFIG, tensors))


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.3, 0.9, 0.999])
def test_b117_truncated_file(tmp_path: Path, tensors: dict[str, np.ndarray], share: float) -> None:
    data = write_gguf(tmp_path / "x.gguf", CONFIG, tensors, fields=vocabulary()).read_bytes()
    (tmp_path / "cut.gguf").write_bytes(data[: max(4, int(len(data) * share))])
    with pytest.raises(CheckpointError, match="cut.gguf: "):
        GgufReader(tmp_path / "cut.gguf")


def test_b117_counts_that_lie(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    data = bytearray(write_gguf(tmp_path / "x.gguf", CONFIG, tensors).read_bytes())
    data[8:16] = (1 << 40).to_bytes(8, "little")  # tensors
    (tmp_path / "lie.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match="lie.gguf: damaged"):
        GgufReader(tmp_path / "lie.gguf")


def test_unknown_architecture(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    path = write_gguf(tmp_path / "x.gguf", CONFIG, tensors, architecture="mamba")
    with pytest.raises(ModelError, match="'mamba', supported: 'llama'"):
        GgufReader(path)


def test_missing_metadata_is_named(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_head_count(4)
    writer.add_tensor("token_embd.weight", tensors["model.embed_tokens.weight"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="llama.embedding_length is missing"):
        GgufReader(tmp_path / "x.gguf")
