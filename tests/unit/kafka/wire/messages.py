"""Values of messages in the notation of `aioshard.kafka.wire.notation`: to encode, and as they are decoded."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hypothesis import strategies as st

from aioshard.kafka.wire.notation import Api, Field

_BITS = {"i1": 8, "i2": 16, "i4": 32, "i8": 64}
_TEXTS = st.text(st.characters(codec="utf-8"), max_size=5)


class Half(NamedTuple):
    """The request or the response of an API, in one version."""

    api: Api
    version: int
    is_response: bool

    def __str__(self) -> str:
        return f"{self.api.name} {'response' if self.is_response else 'request'} {self.version}"

    @property
    def fields(self) -> tuple[Field, ...]:
        return self.api.response if self.is_response else self.api.request

    def values(self) -> st.SearchStrategy[dict[str, Any]]:
        """Values of every field of this version; a tagged field may be left out."""
        return _structures(self.fields, self.version, flexible=self.api.is_flexible(self.version))

    def encode(self, values: Mapping[str, Any]) -> bytes:
        encode = self.api.encode_response if self.is_response else self.api.encode
        return encode(self.version, values)

    def decode(self, data: bytes) -> Any:
        decode = self.api.decode if self.is_response else self.api.decode_request
        return decode(self.version, data)


def halves(api: Api) -> list[Half]:
    """Both halves of an API in each of its versions."""
    return [
        Half(api, version, is_response)
        for version in range(api.lowest, api.highest + 1)
        for is_response in (False, True)
    ]


def _structures(fields: Sequence[Field], version: int, *, flexible: bool) -> st.SearchStrategy[dict[str, Any]]:
    present = [field for field in fields if field.is_in(version) and (field.tag is None or flexible)]
    values = {field.name: _values(field, version, flexible=flexible) for field in present}
    plain = {field.name: values[field.name] for field in present if field.tag is None}
    tagged = {field.name: values[field.name] for field in present if field.tag is not None}
    return st.fixed_dictionaries(plain, optional=tagged)


def _values(field: Field, version: int, *, flexible: bool) -> st.SearchStrategy[Any]:
    """Values of one field; null where the notation has it, but never for a tagged field, which is then left out."""
    kind = field.kind.removesuffix("*")
    item = _structures(field.fields, version, flexible=flexible) if field.fields else _scalars(kind)
    if field.kind == "[" or kind != field.kind:
        item = st.lists(item, max_size=3)
    elif kind in (*_BITS, "bool", "u", "("):
        return item
    return item if field.tag is not None else st.none() | item


def _scalars(kind: str) -> st.SearchStrategy[Any]:
    if kind in _BITS:
        limit = 2 ** (_BITS[kind] - 1)
        return st.integers(-limit, limit - 1)
    return {"bool": st.booleans(), "s": _TEXTS, "b": st.binary(max_size=5), "u": st.uuids()}[kind]


def decoded(half: Half, values: Mapping[str, Any]) -> dict[str, Any]:
    """The message that a decoder makes of these values, as dictionaries: an absent field is None."""
    return _decoded(half.fields, half.version, values)


def _decoded(fields: Sequence[Field], version: int, values: Mapping[str, Any]) -> dict[str, Any]:
    expected: dict[str, Any] = {field.name: None for field in fields}
    for field in fields:
        value = values.get(field.name)
        if value is None or not field.is_in(version):
            continue
        if field.kind == "[":
            value = [_decoded(field.fields, version, item) for item in value]
        elif field.fields:
            value = _decoded(field.fields, version, value)
        expected[field.name] = value
    return expected


def as_dictionaries(value: Any) -> Any:
    """A decoded message with dictionaries in place of its named tuples."""
    if isinstance(value, list):
        return [as_dictionaries(item) for item in value]
    if hasattr(value, "_asdict"):
        return {name: as_dictionaries(item) for name, item in value._asdict().items()}
    return value
