"""Weights straight into the shardings of a mesh (data, expert, tensor): restored, or read from Hugging Face files.

Where each device has all experts, shared experts are wanted as the first of them; stored are they always apart.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
import pytest
import tensorstore
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp

from checkpoints.assemble import assemble
from checkpoints.convert import convert, orbax_context, plan
from checkpoints.names.families import name_table
from checkpoints.readers.safetensors import SafetensorsReader
from checkpoints.restore import open_array, restore
from checkpoints.source import open_model
from jaxserve.mesh import make_mesh
from jaxserve.models.decoder import parameter_shapes, split_decoder
from jaxserve.models.families import model_spec
from tests.checkpoints import tiny

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "goldens" / "deepseek_v3_tiny" / "groups-yarn-mtp"
MESHES = [
    (1, 1, 1),
    (1, 1, 2),
    (1, 2, 1),
    (2, 1, 2),
    (1, 4, 2),
    (2, 2, 2),
    (1, 1, 4),
    (8, 1, 1),
]  # data, expert, tensor
Wanted = dict[str, jax.ShapeDtypeStruct]


def wanted(data: int = 1, expert: int = 1, tensor: int = 1, with_mtp: bool = False, golden: Path = GOLDEN) -> Wanted:
    """What the runtime asks for on such a mesh."""
    mesh = make_mesh(jax.devices(), tensor, expert, data)
    spec = model_spec(open_model(golden).config)
    split = split_decoder(spec, jax.numpy.dtype("bfloat16"), mesh, with_mtp)
    return dict(zip(split.names, split.stored, strict=True))


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("mesh") / "target"
    convert(plan(GOLDEN, target, "auto"))
    return target


@pytest.fixture(scope="module")
def right() -> dict[str, np.ndarray]:
    return assembled(GOLDEN)


def assembled(golden: Path) -> dict[str, np.ndarray]:
    """As a converted checkpoint holds them."""
    reader = SafetensorsReader(golden)
    spec = model_spec(reader.config)
    table, leaves = name_table(reader.config["model_type"], spec), parameter_shapes(spec, with_mtp=True)
    return {name: assemble(reader, table.targets[name], np.dtype(leaf.dtype)) for name, leaf in leaves.items()}


def with_shared_first(right: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The shared experts, whose widths lie side by side, in front of the others."""
    found = dict(right)
    for block in [name.removesuffix(".shared.down") for name in right if name.endswith(".shared.down")]:
        gate_up, down = (found.pop(f"{block}.shared.{name}") for name in ("gate_up", "down"))
        experts_gate_up, experts_down = found[f"{block}.experts_gate_up"], found[f"{block}.experts_down"]
        starts = range(0, down.shape[1], experts_down.shape[2])
        cuts = [slice(start, start + experts_down.shape[2]) for start in starts]
        found[f"{block}.experts_gate_up"] = np.stack([*(gate_up[:, cut] for cut in cuts), *experts_gate_up])
        found[f"{block}.experts_down"] = np.stack([*(down[:, cut] for cut in cuts), *experts_down])
    return found


def assert_right(found: Mapping[str, jax.Array], asked: Wanted, right: Mapping[str, np.ndarray]) -> None:
    """Bit for bit, each in the sharding that was asked for."""
    form = right if "layers.2.mlp.shared.down" in asked else with_shared_first(right)
    tiny.assert_equal(found, {name: form[name] for name in asked})
    for name, array in found.items():
        assert (array.dtype, array.sharding) == (asked[name].dtype, asked[name].sharding), name


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_b129_restored_and_read_directly(
    converted: Path, right: dict[str, np.ndarray], mesh: tuple[int, int, int]
) -> None:
    asked = wanted(*mesh)
    assert_right(open_model(converted).load(asked), asked, right)
    assert_right(open_model(GOLDEN).load(asked), asked, right)


def test_shared_experts_stand_apart_where_each_device_has_some_experts() -> None:
    """Else the meshes above would show nothing."""
    apart = {mesh: "layers.2.mlp.shared.down" in wanted(*mesh) for mesh in MESHES}
    assert apart == {mesh: mesh[1] > 1 for mesh in MESHES}


@pytest.mark.parametrize("mesh", [(1, 1, 1), (1, 1, 4), (1, 2, 2)], ids=str)
def test_b129_two_shared_experts(tmp_path: Path, mesh: tuple[int, int, int]) -> None:
    golden = GOLDEN.parents[1] / "deepseek_v2_tiny" / "lite"
    asked, right = wanted(*mesh, golden=golden), assembled(golden)
    assert right["layers.2.mlp.shared.down"].shape[1] == 2 * right["layers.2.mlp.experts_down"].shape[2]
    convert(plan(golden, tmp_path / "target", "auto"))
    assert_right(open_model(tmp_path / "target").load(asked), asked, right)
    assert_right(open_model(golden).load(asked), asked, right)


def test_b129_shared_experts_of_multi_token_prediction_layers(converted: Path, right: dict[str, np.ndarray]) -> None:
    asked = wanted(with_mtp=True)
    assert "mtp.0.layer.mlp.experts_down" in asked
    assert_right(open_model(converted).load(asked), asked, right)
    assert_right(open_model(GOLDEN).load(asked), asked, right)


def test_the_mesh_cuts_over_one_axis_and_over_two() -> None:
    """Else the meshes above would show nothing."""
    specs = {name: leaf.sharding.spec for name, leaf in wanted(2, 2, 2).items()}
    assert specs["layers.2.mlp.experts_gate_up"] == PartitionSpec("expert", None, "tensor", None)
    assert specs["layers.1.attention.key_up"] == PartitionSpec(("expert", "tensor"), None, None)
    assert specs["layers.1.attention.down"] == PartitionSpec(None, None)


def bytes_read() -> int:
    """By this process from files, through TensorStore."""
    (metric,) = tensorstore.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return metric["values"][0]["value"]


def test_each_device_reads_its_part(tmp_path: Path) -> None:
    """Where cuts lie between the chunks that a conversion makes (of 4 MB), eight devices together read all once."""
    array = np.random.default_rng(0).integers(0, 1 << 15, (16, 1 << 20), np.int16)
    with orbax_context():
        ocp.save(tmp_path / "weights", {"x": array})
    assert open_array(tmp_path / "weights", "x").chunk_layout.read_chunk.shape == (16, 1 << 17)
    sharding = NamedSharding(make_mesh(jax.devices(), 4, 2), PartitionSpec(None, ("expert", "tensor")))
    before = bytes_read()
    found = restore(tmp_path / "weights", {"x": jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)})
    assert array.nbytes <= bytes_read() - before < 1.05 * array.nbytes
    np.testing.assert_array_equal(np.asarray(found["x"]), array)


ONE_DEVICE = """
import sys, numpy as np
from tests.checkpoints import test_mesh as t
assert len(t.jax.devices()) == 1
found = t.open_model(sys.argv[1]).load(t.wanted())
with np.load(sys.argv[2]) as stored:
    right = t.with_shared_first(stored)
    assert found.keys() == set(right)
    for name, array in found.items():
        assert array.astype(np.float32).tobytes() == right[name].tobytes(), name
"""


def test_b129_saved_from_eight_devices_restored_where_there_is_one(tmp_path: Path, converted: Path) -> None:
    """Orbax stores the shardings of what it saves; nothing of them is needed to restore, in a process of its own."""
    arrays = open_model(converted).load(wanted(2, 2, 2))
    ocp.save(tmp_path / "weights", arrays)
    for file in converted.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    np.savez(tmp_path / "right.npz", **{name: np.asarray(array, np.float32) for name, array in arrays.items()})
    environment = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "PATH": ""}
    command = [sys.executable, "-c", ONE_DEVICE, str(tmp_path), str(tmp_path / "right.npz")]
    subprocess.run(command, check=True, env=environment, cwd=ROOT)
