"""Requests and answers that pass a proxy: what they say, and answers with other error codes."""

import struct
from collections.abc import Collection, Mapping
from typing import Any

from tests.support.model_broker import APIS, encode_response
from tests.support.proxies import Change, Request


def body(request: Request) -> Any:
    """The fields of a request."""
    api = APIS[request.api_key]
    (length,) = struct.unpack_from(">h", request.frame, 8)
    at = 10 + max(length, 0)
    return api.decode_request(request.api_version, request.frame, at + api.is_flexible(request.api_version))


def response(request: Request, answer: bytes) -> Any:
    """The fields of the answer to a request."""
    api = APIS[request.api_key]
    return api.decode(request.api_version, answer, 4 + api.is_flexible(request.api_version))


def codes(request: Request, answer: bytes) -> set[int]:
    """The error codes in the answer to a request: its own, or those of its partitions."""
    found = response(request, answer)
    topics = getattr(found, "topics", None)
    if topics is None:
        return {found.error}
    return {partition.error for topic in topics for partition in topic.partitions}


def answer_with(code: int, partitions: Collection[int] | None = None) -> Change:
    """Answer with an error code, whatever a broker has answered: for these partitions, or for all."""

    def change(request: Request, answer: bytes) -> bytes:
        known = fields(response(request, answer)) if answer else _success(request)
        for part in _parts(known):
            if partitions is None or part.get("partition") in partitions:
                part["error"] = code
        return _framed(request, known)

    return change


def answer_without(partition: int) -> Change:
    """Leave a partition out of an answer."""

    def change(request: Request, answer: bytes) -> bytes:
        known = fields(response(request, answer)) if answer else _success(request)
        for topic in known["topics"]:
            topic["partitions"] = [part for part in topic["partitions"] if part["partition"] != partition]
        return _framed(request, known)

    return change


def lose_answer(_: Request, __: bytes) -> None:
    """Cut the connection instead of an answer."""


def fields(structure: Any) -> Any:
    """Return a decoded structure as mappings, to be changed."""
    if isinstance(structure, list):
        return [fields(item) for item in structure]
    if hasattr(structure, "_asdict"):
        return {name: fields(value) for name, value in structure._asdict().items()}
    return structure


def _success(request: Request) -> dict[str, Any]:
    """Return an answer without an error that no broker has given."""
    asked = fields(body(request))
    if "topics" not in asked:
        return {}

    def numbers(topic: Mapping[str, Any]) -> list[int]:
        return [part["partition"] if isinstance(part, dict) else part for part in topic["partitions"]]

    return {
        "topics": [
            {"topic": topic["topic"], "partitions": [{"partition": number} for number in numbers(topic)]}
            for topic in asked["topics"]
        ]
    }


def _parts(known: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the parts of an answer that have an error code."""
    if "topics" not in known:
        return [known]
    return [part for topic in known["topics"] for part in topic["partitions"]]


def _framed(request: Request, values: Mapping[str, Any]) -> bytes:
    api = APIS[request.api_key]
    header = struct.pack(">i", request.correlation_id) + b"\0" * api.is_flexible(request.api_version)
    return header + encode_response(api, request.api_version, **values)
