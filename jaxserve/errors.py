"""The words for what can go wrong; every room raises these, `server` maps them to gRPC status codes.

JaxserveError                     (INTERNAL)
├── InvalidRequest                (INVALID_ARGUMENT)     a field of a request is not allowed
├── DuplicateRequest              (ALREADY_EXISTS)       a request id that is still alive
├── MessageTooLarge               (RESOURCE_EXHAUSTED)   a message over the documented limit
├── QueueFull                     (RESOURCE_EXHAUSTED)   the waiting queue is at its limit
├── RequestCancelled              (CANCELLED)            by the client, by Abort or by its deadline's owner
├── DeadlineExceeded              (DEADLINE_EXCEEDED)
├── RequestFailed                 (INTERNAL)             one request failed, the engine goes on
├── EngineUnavailable             (UNAVAILABLE)          starting, draining or gone
├── ConfigError                   (FAILED_PRECONDITION)  a flag or a combination of flags
├── ModelError                    (FAILED_PRECONDITION)  an architecture or configuration we cannot serve
├── CheckpointError               (FAILED_PRECONDITION)  a file is missing, damaged or does not fit the model
└── DeviceError                   (FAILED_PRECONDITION)  no such device, or too little of its memory
"""

from __future__ import annotations


class JaxserveError(Exception):
    """Root of all errors that users may see. `grpc_status` is a status code's name; no grpc is imported here."""

    grpc_status = "INTERNAL"
    exit_code = 1


class InvalidRequest(JaxserveError):
    """A request field holds what is not allowed: says the field, the value given and what is allowed."""

    grpc_status = "INVALID_ARGUMENT"

    def __init__(self, field: str, given: object, allowed: str) -> None:
        self.field, self.given, self.allowed = field, given, allowed
        super().__init__(f"{field}: got {shorten(given)}, allowed: {allowed}")

    def __reduce__(self) -> tuple[type, tuple[str, object, str]]:
        return type(self), (self.field, self.given, self.allowed)


class DuplicateRequest(JaxserveError):
    """A request id is used while an earlier request with it is alive."""

    grpc_status = "ALREADY_EXISTS"


class MessageTooLarge(JaxserveError):
    """A message is over the documented size limit; the text gives both sizes in bytes."""

    grpc_status = "RESOURCE_EXHAUSTED"


class QueueFull(JaxserveError):
    """The waiting queue is at its limit; try again later."""

    grpc_status = "RESOURCE_EXHAUSTED"


class RequestCancelled(JaxserveError):
    """The request was cancelled before it finished."""

    grpc_status = "CANCELLED"


class DeadlineExceeded(JaxserveError):
    """The request's deadline passed before it finished."""

    grpc_status = "DEADLINE_EXCEEDED"


class RequestFailed(JaxserveError):
    """One request failed inside the engine; others are not disturbed."""


class EngineUnavailable(JaxserveError):
    """The engine is starting, draining, or has died."""

    grpc_status = "UNAVAILABLE"


class ConfigError(JaxserveError):
    """A flag, or a combination of flags, that cannot work."""

    grpc_status = "FAILED_PRECONDITION"
    exit_code = 2


class ModelError(JaxserveError):
    """An architecture or a model configuration that this version cannot serve."""

    grpc_status = "FAILED_PRECONDITION"
    exit_code = 3


class CheckpointError(JaxserveError):
    """A checkpoint file is missing, damaged, or does not fit the model."""

    grpc_status = "FAILED_PRECONDITION"
    exit_code = 4


class DeviceError(JaxserveError):
    """The device asked for does not exist or has too little memory."""

    grpc_status = "FAILED_PRECONDITION"
    exit_code = 5


def shorten(value: object, limit_characters: int = 80) -> str:
    """`repr(value)`, cut in the middle so that a hostile value cannot fill the log."""
    text = repr(value)
    if len(text) <= limit_characters:
        return text
    half = limit_characters // 2
    return f"{text[:half]} ... {text[-half:]} ({len(text)} characters)"
