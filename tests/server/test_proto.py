"""The wire contract: committed stubs are those of the proto files, and the files keep their own rules."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.descriptor import FieldDescriptor

from jaxserve.request import SamplingParams
from jaxserve.server.hub import Phase
from jaxserve.v1 import control_pb2, inference_pb2

ROOT = Path(__file__).resolve().parents[2]
PROTOS = sorted((ROOT / "proto/jaxserve/v1").glob("*.proto"))


def test_the_committed_stubs_are_those_of_the_proto_files() -> None:
    command = [sys.executable, str(ROOT / "scripts/generate_proto.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("module", [inference_pb2, control_pb2])
def test_zero_is_unspecified_in_every_enum(module: object) -> None:
    for enum in module.DESCRIPTOR.enum_types_by_name.values():
        assert enum.values_by_number[0].name.endswith("_UNSPECIFIED")


@pytest.mark.parametrize("module", [inference_pb2, control_pb2])
def test_each_method_has_a_request_and_a_response_of_its_own(module: object) -> None:
    for service in module.DESCRIPTOR.services_by_name.values():
        for method in service.methods:
            assert method.input_type.name == f"{method.name}Request"
            assert method.output_type.name == f"{method.name}Response"


def test_every_parameter_is_on_the_wire_and_unset_differs_from_zero() -> None:
    fields = inference_pb2.SamplingParams.DESCRIPTOR.fields_by_name
    assert set(fields) == set(SamplingParams.__dataclass_fields__)
    for field in fields.values():
        assert field.is_repeated or field.has_presence, field.name
        assert field.type != FieldDescriptor.TYPE_FLOAT, f"{field.name}: 0.01 must arrive as 0.01"


def test_server_states_are_the_phases() -> None:
    names = {f"SERVER_STATE_{phase.name}": int(phase) for phase in Phase}
    assert names == {name: number for name, number in control_pb2.ServerState.items() if number}


@pytest.mark.parametrize("path", PROTOS, ids=lambda path: path.name)
def test_fields_of_requests_say_whether_they_are_required(path: Path) -> None:
    """Their comments open with Required or Optional."""
    inputs = re.findall(
        r"^message (\w*Request|SamplingParams|ChatMessage|TokenIds) \{\n(.*?)^\}", path.read_text(), re.S | re.M
    )
    assert inputs
    for message, body in inputs:
        for comment, name in re.findall(
            r"// ([^\n]*(?:\n *//[^\n]*)*)\n *(?:optional |repeated )?[\w.<>, ]+ (\w+) = \d+;", body
        ):
            allowed = r"Required\.|Required:|Optional\.|A text|Ids, each"  # the last two are members of a oneof
            assert re.match(allowed, comment), f"{message}.{name}: {comment}"
