"""Messages in our notation: each value survives, and damaged bytes are refused without any harm."""

import contextlib
import tracemalloc
import uuid
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioshard.kafka.wire.notation import (
    Api,
    Field,
    MalformedMessageError,
    parse,
    read_varint,
    write_varint,
)
from aioshard.kafka.wire.requests import ALL, API_VERSIONS, FETCH, OFFSET_COMMIT
from tests.unit.kafka.wire.messages import Half, as_dictionaries, decoded, halves

NEWEST = 4
"""The newest version of the messages that these tests make up."""
CLOSING = {"[": "]", "(": ")", "{": "}"}
SCALARS = ["i1", "i2", "i4", "i8", "bool", "s", "b", "u"]

# Schemas that are made up ---------------------------------------------------------------------


@st.composite
def _suffixes(draw: st.DrawFn) -> tuple[str, int, int]:
    """The suffix for a range of versions, and the range."""
    lowest = draw(st.integers(0, NEWEST))
    highest = draw(st.integers(lowest, NEWEST))
    ranges = [
        ("", 0, 999),
        (f"@{lowest}", lowest, lowest),
        (f"@{lowest}+", lowest, 999),
        (f"@-{highest}", 0, highest),
        (f"@{lowest}-{highest}", lowest, highest),
    ]
    return draw(st.sampled_from(ranges))


@st.composite
def _schemas(draw: st.DrawFn, depth: int = 0) -> tuple[str, tuple[Field, ...]]:
    """A structure in the notation, and its fields."""
    texts = []
    fields: list[Field] = []
    for number in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from([*SCALARS, *(f"{kind}*" for kind in SCALARS), *("[({" if depth < 2 else "")]))
        text, nested = draw(_schemas(depth + 1)) if kind in CLOSING else ("", ())
        tag = draw(st.none() | st.just(number))
        suffix, lowest, highest = draw(_suffixes())
        if depth and not number:  # an item of an array has a field in each version
            tag = None
            suffix, lowest, highest = "", 0, 999
        texts.append(f"f{number}:{kind}{text}{CLOSING.get(kind, '')}{'' if tag is None else f'#{tag}'}{suffix}")
        fields.append(Field(f"f{number}", kind, nested, lowest, highest, tag))
    return draw(st.sampled_from([" ", "\n    "])).join(texts), tuple(fields)


@st.composite
def _apis(draw: st.DrawFn) -> Api:
    request, response = draw(_schemas())[0], draw(_schemas())[0]
    return Api("Made", 0, (0, NEWEST), flexible=draw(st.integers(0, NEWEST + 1)), request=request, response=response)


MADE_UP = _apis().flatmap(lambda api: st.sampled_from(halves(api)))
OURS = st.sampled_from([half for api in ALL for half in halves(api)])


@st.composite
def _messages(draw: st.DrawFn, kinds: st.SearchStrategy[Half] = MADE_UP | OURS) -> tuple[Half, dict[str, Any]]:
    """A message of any kind and version, and its values."""
    half = draw(kinds)
    return half, draw(half.values())


def _response(text: str, *, flexible: bool) -> Half:
    """The response of an API with these fields."""
    return Half(Api("Made", 0, (0, 0), flexible=0 if flexible else 1, request="", response=text), 0, is_response=True)


# Values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("half", [half for api in ALL for half in halves(api)], ids=str)
@settings(max_examples=10)
@given(data=st.data())
def test_each_value_of_our_messages_survives(half: Half, data: st.DataObject) -> None:
    values = data.draw(half.values())

    assert as_dictionaries(half.decode(half.encode(values))) == decoded(half, values)


@given(_messages(MADE_UP))
def test_each_value_that_a_schema_can_express_survives(message: tuple[Half, dict[str, Any]]) -> None:
    half, values = message

    assert as_dictionaries(half.decode(half.encode(values))) == decoded(half, values)


@given(_messages(), st.binary(max_size=9))
def test_a_message_may_begin_behind_a_header(message: tuple[Half, dict[str, Any]], header: bytes) -> None:
    half, values = message
    body = half.encode(values)
    decode = half.api.decode if half.is_response else half.api.decode_request

    assert decode(half.version, header + body, len(header)) == half.decode(body)


@given(st.integers(0, 2**32 - 1))
def test_a_variable_length_integer_survives(value: int) -> None:
    out = bytearray()

    write_varint(out, value)

    assert read_varint(bytes(out), 0) == (value, len(out))


ID = uuid.UUID(int=(1 << 64) + 2)
FETCHED = {"partition": 3, "high_watermark": 900, "stable_end": 800, "log_start": -1, "preferred": -1}
COMMITTED = {"partition": 1, "offset": 5, "epoch": -1, "metadata": None}
COMMIT = {
    "group": "gé",
    "generation": 3,
    "member": "m",
    "instance": None,
    "topics": [{"topic": "orders", "id": ID, "partitions": [COMMITTED]}],
}
HEARTBEAT = Half(
    Api(
        "ConsumerGroupHeartbeat",
        68,
        (1, 1),
        flexible=0,
        request="",
        response="""
            throttle_ms:i4 error:i2 message:s member:s epoch:i4 interval_ms:i4
            assignment:{topics:[id:u partitions:i4*]}
        """,
    ),
    1,
    is_response=True,
)
BEAT = {"throttle_ms": 0, "error": 0, "message": None, "member": "m", "epoch": 1, "interval_ms": 5000}
KAFKAS_BYTES = [
    (
        Half(FETCH, 16, is_response=True),
        {
            "throttle_ms": 5,
            "error": 0,
            "session": 7,
            "topics": [
                {
                    "id": ID,
                    "partitions": [
                        FETCHED
                        | {
                            "error": 6,
                            "diverging": {"epoch": 4, "end": 300},
                            "leader": {"node": 2, "epoch": 9},
                            "aborted": [{"producer": 11, "first": 12}],
                            "records": bytes(200),
                        }
                    ],
                }
            ],
            "endpoints": [{"node": 2, "host": "b2", "port": 9092, "rack": None}],
        },
        "00000005 0000 00000007 02 0000000000000001 0000000000000002 02 00000003 0006 0000000000000384 0000000000000320"
        "ffffffffffffffff 02 000000000000000b 000000000000000c 00 ffffffff c901" + 200 * "00" + "02 00 0d 00000004"
        "000000000000012c 00 01 09 00000002 00000009 00 00 01 00 0e 02 00000002 03 6232 00002384 00 00",
    ),
    (
        Half(FETCH, 11, is_response=True),
        {
            "throttle_ms": 5,
            "error": 0,
            "session": 7,
            "topics": [{"topic": "orders", "partitions": [FETCHED | {"error": 0, "aborted": None, "records": None}]}],
        },
        (
            "00000005 0000 00000007 00000001 0006 6f7264657273 00000001 00000003 0000 0000000000000384 0000000000000320"
            "ffffffffffffffff ffffffff ffffffff ffffffff"
        ),
    ),
    (
        Half(API_VERSIONS, 3, is_response=True),
        {
            "error": 0,
            "apis": [{"key": 1, "lowest": 4, "highest": 17}],
            "throttle_ms": 1,
            "finalized_epoch": 77,
            "finalized": [{"name": "transaction.version", "highest": 2, "lowest": 1}],
        },
        (
            "0000 02 0001 0004 0011 00 00000001 02 01 08 000000000000004d 02 1a 02"
            "14 7472616e73616374696f6e2e76657273696f6e 0002 0001 00"
        ),
    ),
    (
        Half(OFFSET_COMMIT, 7, is_response=False),
        COMMIT,
        "0003 67c3a9 00000003 0001 6d ffff 00000001 0006 6f7264657273 00000001 00000001 0000000000000005 ffffffff ffff",
    ),
    (
        Half(OFFSET_COMMIT, 9, is_response=False),
        COMMIT,
        "04 67c3a9 00000003 02 6d 00 02 07 6f7264657273 02 00000001 0000000000000005 ffffffff 00 00 00 00",
    ),
    (
        Half(OFFSET_COMMIT, 10, is_response=False),
        COMMIT,
        (
            "04 67c3a9 00000003 02 6d 00 02 0000000000000001 0000000000000002"
            "02 00000001 0000000000000005 ffffffff 00 00 00 00"
        ),
    ),
    (HEARTBEAT, BEAT | {"assignment": None}, "00000000 0000 00 02 6d 00000001 00001388 ff 00"),
    (
        HEARTBEAT,
        BEAT | {"assignment": {"topics": [{"id": ID, "partitions": [0, 300]}]}},
        "00000000 0000 00 02 6d 00000001 00001388 01 02 0000000000000001 000000000000000203 00000000 0000012c 00 00 00",
    ),
]
"""Messages, their values, and the bytes that the classes in Kafka 4.4's own jar write for them."""


@pytest.mark.parametrize(
    ("half", "values", "encoded"), KAFKAS_BYTES, ids=[f"{row}, {half}" for row, (half, *_) in enumerate(KAFKAS_BYTES)]
)
def test_the_bytes_are_those_of_kafka(half: Half, values: dict[str, Any], encoded: str) -> None:
    assert half.encode(values) == bytes.fromhex(encoded)
    assert as_dictionaries(half.decode(bytes.fromhex(encoded))) == decoded(half, values)


# Values that a caller has forgotten, or that do not exist -------------------------------------


def test_a_request_without_the_value_of_a_field_is_refused() -> None:
    api = Api("Made", 0, (0, 1), flexible=9, request="a:i4 b:[c:i4 d:i4@1+]", response="")

    assert api.encode(0, api(a=1, b=[{"c": 2}]).values)
    with pytest.raises(KeyError, match="d"):
        api.encode(1, api(a=1, b=[{"c": 2}]).values)
    with pytest.raises(KeyError, match="a"):
        api.encode(1, api(b=[]).values)


def test_a_request_with_an_unknown_field_is_refused() -> None:
    api = Api("Made", 0, (0, 1), flexible=9, request="a:i4 b:s", response="")

    with pytest.raises(TypeError, match=r"Made has no field.*bb"):
        api(a=1, bb="")


def test_a_request_is_sent_in_a_version_at_most() -> None:
    api = Api("Made", 0, (0, 3), flexible=9, request="a:i4", response="")

    assert api(a=1).most >= api.highest
    assert api(a=1).up_to(2) == api(a=1)._replace(most=2)


# Damaged bytes --------------------------------------------------------------------------------


@given(_messages())
def test_a_message_cut_at_any_byte_is_refused(message: tuple[Half, dict[str, Any]]) -> None:
    half, values = message
    body = half.encode(values)

    for end in range(len(body)):
        with pytest.raises(MalformedMessageError, match=f"{half.api.name} version {half.version} is damaged"):
            half.decode(body[:end])


@given(_messages(), st.binary(min_size=1, max_size=5).filter(any))
def test_bytes_behind_a_message_are_refused(message: tuple[Half, dict[str, Any]], rest: bytes) -> None:
    half, values = message

    with pytest.raises(MalformedMessageError, match="too early"):
        half.decode(half.encode(values) + rest)


@given(_messages(), st.data())
def test_changed_bytes_raise_no_other_error(message: tuple[Half, dict[str, Any]], data: st.DataObject) -> None:
    half, values = message
    body = bytearray(half.encode(values))
    for _ in range(data.draw(st.integers(1, 3)) if body else 0):
        at = data.draw(st.integers(0, len(body) - 1))
        body[at : at + 1] = data.draw(st.sampled_from([b"\0", b"\x7f", b"\x80", b"\xff", b"\xff" * 6]))

    with contextlib.suppress(MalformedMessageError):
        half.decode(bytes(body))


@given(MADE_UP | OURS, st.binary(max_size=60))
def test_random_bytes_raise_no_other_error(half: Half, body: bytes) -> None:
    with contextlib.suppress(MalformedMessageError):
        half.decode(body)


HUGE = b"\xff\xff\xff\xff\x07"
"""The largest length in a compact form."""
REPEATED = ["s", "b", *(f"{kind}*" for kind in SCALARS), "[a:i4]", "[a:s b:[c:i8]]"]


def _announcing() -> list[Any]:
    """Messages that announce far more bytes or items than follow."""
    compact = [pytest.param(f"x:{kind}", True, HUGE + bytes(100), id=f"{kind}, compact") for kind in REPEATED]
    plain = [
        pytest.param(f"x:{kind}", False, (b"\x7f\xff" if kind == "s" else b"\x7f\xff\xff\xff") + bytes(100), id=kind)
        for kind in REPEATED
    ]
    return [
        *compact,
        *plain,
        pytest.param("x:i1", True, b"\0" + HUGE + bytes(100), id="the number of tagged fields"),
        pytest.param("x:i1", True, b"\0\x01\x05" + HUGE + bytes(100), id="the size of a tagged field"),
        pytest.param("x:b#0", True, b"\x01\0\x05" + HUGE + bytes(100), id="a length in a tagged field"),
    ]


@pytest.mark.parametrize(("text", "flexible", "body"), _announcing())
def test_a_damaged_length_allocates_nothing(text: str, flexible: bool, body: bytes) -> None:
    half = _response(text, flexible=flexible)
    with pytest.raises(MalformedMessageError):
        half.decode(body)  # compiles the codec

    tracemalloc.start()
    try:
        with pytest.raises(MalformedMessageError):
            half.decode(body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 100_000


@pytest.mark.parametrize("text", ["x:s", "x:b", "x:i4*", "x:[a:i4]"])
def test_a_length_that_does_not_end_is_refused(text: str) -> None:
    with pytest.raises(MalformedMessageError, match="does not end"):
        _response(text, flexible=True).decode(b"\xff" * 1000)


@pytest.mark.parametrize("body", [b"\0" + b"\xff" * 1000, b"\0\x01" + b"\xff" * 1000, b"\0\x01\x09" + b"\xff" * 1000])
def test_a_number_in_tagged_fields_that_does_not_end_is_refused(body: bytes) -> None:
    with pytest.raises(MalformedMessageError, match="does not end"):
        _response("x:i1", flexible=True).decode(body)


@pytest.mark.parametrize("flexible", [True, False])
@pytest.mark.parametrize("content", [b"\xff", b"\xc3", b"\xed\xa0\x80"], ids=["never", "cut", "surrogate"])
def test_text_that_is_not_utf_8_is_refused(content: bytes, flexible: bool) -> None:
    length = bytes([len(content) + 1]) if flexible else len(content).to_bytes(2)

    with pytest.raises(MalformedMessageError, match="utf-8"):
        _response("x:s", flexible=flexible).decode(length + content + b"\0")


# Tagged fields --------------------------------------------------------------------------------

TAGGED = "a:i4 b:i8#1 c:{d:i4 e:s}#3 f:s*#4"


@given(
    st.fixed_dictionaries({"a": st.just(1)}, optional={"b": st.just(5), "c": st.just({"d": 1, "e": "x"})}),
    st.dictionaries(st.sampled_from([0, 2, 5, 6, 1000]), st.binary(max_size=300)),
)
def test_unknown_tagged_fields_are_skipped(values: dict[str, Any], unknown: dict[int, bytes]) -> None:
    """A newer broker sends fields that we do not know, in any place among those that we do."""
    ours = _response(TAGGED, flexible=True)
    newer = _response(TAGGED + "".join(f" u{tag}:b#{tag}" for tag in (0, 2, 5, 6, 1000)), flexible=True)

    body = newer.encode(values | {f"u{tag}": content for tag, content in unknown.items()})

    assert as_dictionaries(ours.decode(body)) == decoded(ours, values)


def test_absent_tagged_fields_are_none_and_known_ones_are_decoded() -> None:
    half = _response(TAGGED, flexible=True)

    message = half.decode(half.encode({"a": 7, "c": {"d": 1, "e": None}, "f": ["x"]}))

    assert (message.a, message.b, message.c.d, message.c.e, message.f) == (7, None, 1, None, ["x"])


def test_tagged_fields_are_sent_in_the_order_of_their_tags() -> None:
    assert _response("a:i1#5 b:i1#0", flexible=True).encode({"a": 7, "b": 8}) == b"\x02\0\x01\x08\x05\x01\x07"


def test_a_tagged_field_that_is_cut_off_is_refused() -> None:
    with pytest.raises(MalformedMessageError, match="tagged field 9 announces 8 bytes, but only 7 follow"):
        _response(TAGGED, flexible=True).decode(bytes(4) + b"\x01\x09\x08" + bytes(7))


@pytest.mark.parametrize("size", [b"\x07", b"\x09"])
def test_a_tagged_field_of_another_size_than_announced_is_refused(size: bytes) -> None:
    with pytest.raises(MalformedMessageError, match=r"tagged field 1 announces . bytes, but has 8"):
        _response(TAGGED, flexible=True).decode(bytes(4) + b"\x01\x01" + size + bytes(20))


def test_tagged_fields_are_not_in_versions_that_are_not_flexible() -> None:
    assert _response(TAGGED, flexible=False).encode({"a": 1, "b": 5}) == b"\0\0\0\x01"


# The notation ---------------------------------------------------------------------------------


@given(_schemas())
def test_the_notation_is_parsed_into_its_fields(schema: tuple[str, tuple[Field, ...]]) -> None:
    text, fields = schema

    assert parse(text) == fields
    assert parse(f"\n  {text}\n") == fields


def test_a_field_may_change_its_kind_and_its_place_with_the_version() -> None:
    api = Api("Made", 0, (0, 1), flexible=9, request="", response="a:i4@0 b:s c:i8 a:s@1 d:i2@0")

    for version, values in enumerate([{"a": 1, "b": "x", "c": 2, "d": 3}, {"a": "text", "b": "x", "c": 2}]):
        message = api.decode(version, api.encode_response(version, values))
        assert message._asdict() == {"d": None} | values
    assert api.encode_response(1, {"a": "", "b": "", "c": 0}) == bytes(2 + 8 + 2)


def test_an_array_of_items_without_any_byte_is_refused() -> None:
    """Its length would say nothing about the size of the message."""
    api = Api("Made", 0, (0, 2), flexible=2, request="", response="a:[b:i4@1+ c:i4#0]")

    with pytest.raises(ValueError, match="a has no fields in version 0"):
        api.encode_response(0, {"a": []})
    nested = Api("Made", 0, (0, 2), flexible=2, request="", response="a:[b:(c:i4@1+)]")
    with pytest.raises(ValueError, match="a has no fields in version 0"):
        nested.encode_response(0, {"a": []})
    assert api.encode_response(1, {"a": [{"b": 7}]}) == b"\0\0\0\x01\0\0\0\x07"
    assert api.encode_response(2, {"a": [{"b": 7}]}) == b"\x02\0\0\0\x07\0\0"


@pytest.mark.parametrize(
    "text",
    [
        *("a", "a:", ":i4", "a i4", "a: i4", "A:i4", "1:i4", "a:i3", "a:i44", "a:string", "a:i4**", "*a:i4"),
        *(
            "a:[]",
            "a:[b:i4",
            "a:b:i4]",
            "a:i4]",
            "a:[b:i4}",
            "a:{b:i4]",
            "a:(b:i4]",
            "a:()",
            "a:(b:i4)*",
            "a:[b:i4]*",
            "a:[b]",
            "a:[b:i4 c]",
        ),
        *("a:i4@", "a:i4@+", "a:i4@-", "a:i4@3-", "a:i4@3++", "a:i4@x", "a:i4 @3", "a:i4@5-3", "a:i4@2@3", "a:i4@-2+"),
        *("a:i4#", "a:i4#x", "a:i4@3#0", "a:i4#0#1", "a:i4#-1"),
        *("a:i4,b:i4", "a:i4*b:i4", "a:[b:i4]c:i4", "a:i4 // text"),
        *("a:i4 a:s", "a:i4@-3 a:s@3+", "a:i4 b:[c:i4 c:i4]", "a:i4#0 b:i4#0", "a:i4#0@-5 b:i4#0@5"),
    ],
)
def test_text_that_is_not_in_the_notation_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse(text)


def test_ids_are_uuids() -> None:
    half = _response("x:u y:u*", flexible=True)
    first, second = uuid.uuid4(), uuid.uuid4()

    message = half.decode(half.encode({"x": first, "y": [first, second]}))

    assert message == (first, [first, second])
