"""The one place where errors become gRPC statuses: takes any exception, gives code, sentence and rich details."""

from __future__ import annotations

import logging
from typing import Never

import grpc
from google.protobuf.any_pb2 import Any
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from jaxserve.errors import InvalidRequest, JaxserveError

logger = logging.getLogger(__name__)

MAX_SENTENCE_BYTES = 1500  # of UTF-8: it travels three times, once with three characters a byte, in 8 KiB of metadata


def status_of(error: BaseException, request_id: str = "") -> grpc.Status:
    """Code, text and trailing metadata for `error`. Foreign exceptions are INTERNAL, and their text stays here."""
    if not isinstance(error, JaxserveError):
        logger.error("request %s: unexpected error", request_id or "without id", exc_info=error)
        name = f" of request {request_id}" if request_id else ""
        return to_grpc(grpc.StatusCode.INTERNAL, f"an internal error{name}; the server's log has it")
    details = []
    if isinstance(error, InvalidRequest):
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=cut(str(error)))
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    return to_grpc(grpc.StatusCode[error.grpc_status], str(error), *details)


def to_grpc(code: grpc.StatusCode, text: str, *details: error_details_pb2.BadRequest) -> grpc.Status:
    """A status with google.rpc details packed into its trailing metadata."""
    rich = status_pb2.Status(code=code.value[0], message=cut(text))
    for detail in details:
        packed = Any()
        packed.Pack(detail)
        rich.details.append(packed)
    return rpc_status.to_status(rich)


def cut(text: str) -> str:
    """`text` as a status may carry it: valid UTF-8 of bounded length, on one line."""
    raw = " ".join(text.split()).encode("utf-8", "replace")
    if len(raw) > MAX_SENTENCE_BYTES:
        raw = raw[: MAX_SENTENCE_BYTES - 4] + b" ..."
    return raw.decode("utf-8", "ignore")


async def abort(context: grpc.aio.ServicerContext, error: BaseException, request_id: str = "") -> Never:
    """End the call with the status of `error`; raises, as gRPC's abort does."""
    status = status_of(error, request_id)
    await context.abort(status.code, status.details, status.trailing_metadata)
    raise AssertionError("abort returns by raising")
