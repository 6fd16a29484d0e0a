"""The recipes of the page "Integrations" do what the page says; each test runs the code of the page."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from aioshard import Record
from aioshard.errors import DecodeError
from aioshard.telemetry.metrics import METRICS
from aioshard.testing import TestClient, run
from tests.project.docs.pages import blocks
from tests.project.docs.recipes import PAGE, load, recipes
from tests.support.kafka import KafkaBroker
from tests.support.subprocesses import run_module

CLAIM_CHECK = "Large messages: claim check"
ENCRYPTION = "Encrypted payloads"
SENTRY = "Sentry"
WORKFLOWS = "Durable workflows: DBOS"
CONTAINERS = "Testcontainers"

LARGE = b"\x89PNG" * 50_000
SECRET = b"alice-1f0c"
OLD_KEY = "2026-05"
DEADLINE = 60.0


def test_every_recipe_is_tested_here() -> None:
    assert recipes().keys() == {CLAIM_CHECK, ENCRYPTION, SENTRY, WORKFLOWS, CONTAINERS}


def header(record: Record, name: str) -> str:
    return (dict(record.headers)[name] or b"").decode()


# Claim check ---------------------------------------------------------------------------------


@pytest.fixture
def claims() -> dict[str, Any]:
    """The recipe with an empty store; all stores in memory share their files."""
    recipe = load(CLAIM_CHECK)
    recipe["store"].store.clear()
    return recipe


def objects(claims: dict[str, Any]) -> list[str]:
    return sorted(claims["store"].store)


class Failing:
    """A store whose next calls fail."""

    def __init__(self, store: Any, *errors: Exception) -> None:
        self._store = store
        self._errors = list(errors)

    def cat_file(self, path: str) -> bytes:
        self._fail()
        content: bytes = self._store.cat_file(path)
        return content

    def pipe_file(self, path: str, content: bytes) -> None:
        self._fail()
        self._store.pipe_file(path, content)

    def _fail(self) -> None:
        if self._errors:
            raise self._errors.pop(0)


def test_a_large_payload_is_in_the_store_and_reaches_the_handler(claims: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with TestClient(claims["app"]) as client:
            await claims["publish_large"]("images", LARGE, "alice")
            await claims["publish_large"]("images", b"small", "alice")
            await client.settle()
            large, small = client.records("images")
            assert (large.value, small.value) == (b"", b"small")
            assert [f"/{header(large, 'claim-check')}" in name for name in objects(claims)] == [True]
            assert [record.value for record in client.records("thumbnails")] == [LARGE[:100], b"small"]

    run(scenario())


def test_a_missing_object_is_final_and_its_claim_can_be_replayed(claims: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with TestClient(claims["app"]) as client:
            await claims["publish_large"]("images", LARGE, "alice")
            claims["store"].store.clear()
            await client.settle()
            (letter,) = client.records("images.dlt")
            assert header(letter, "aioshard.error") == "DecodeError"
            assert header(letter, "aioshard.attempts") == "1"
            (published,) = client.records("images")
            assert header(letter, "claim-check") == header(published, "claim-check")

    run(scenario())


def test_a_damaged_object_is_final(claims: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with TestClient(claims["app"]) as client:
            await claims["publish_large"]("images", LARGE, "alice")
            (name,) = objects(claims)
            claims["store"].pipe_file(name, LARGE[1:])
            await client.settle()
            assert [header(letter, "aioshard.attempts") for letter in client.records("images.dlt")] == ["1"]
            assert client.records("thumbnails") == []

    run(scenario())


def test_a_claim_cannot_name_another_file(claims: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with TestClient(claims["app"]) as client:
            claims["store"].pipe_file(f"{claims['root']}/private/file", SECRET)
            await client.publish("images", b"", headers=[("claim-check", "private/file")])
            await client.settle()
            assert [header(letter, "aioshard.error") for letter in client.records("images.dlt")] == ["DecodeError"]
            assert client.records("thumbnails") == []

    run(scenario())


def test_a_store_that_does_not_answer_is_retried(claims: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with TestClient(claims["app"]) as client:
            await claims["publish_large"]("images", LARGE, "alice")
            claims["store"] = Failing(claims["store"], TimeoutError("slow"), RuntimeError("an error of the client"))
            await client.settle(timeout=60.0)
            (handler,) = claims["app"].statistics().handlers
            assert (handler.retried, handler.dead_lettered) == (2, 0)
            assert [record.value for record in client.records("thumbnails")] == [LARGE[:100]]

    run(scenario())


def test_nothing_is_published_without_its_object(claims: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with TestClient(claims["app"]) as client:
            claims["store"] = Failing(claims["store"], TimeoutError("slow"))
            with pytest.raises(TimeoutError):
                await claims["publish_large"]("images", LARGE, "alice")
            assert client.records("images") == []

    run(scenario())


def test_a_repeated_publication_uses_the_same_object(claims: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with TestClient(claims["app"]) as client:
            for _ in range(2):
                await claims["publish_large"]("images", LARGE, "alice")
            assert len(client.records("images")) == 2
            assert len(objects(claims)) == 1

    run(scenario())


# Encryption ----------------------------------------------------------------------------------


ORDER = b'{"customer": "%s", "total": 7}' % SECRET


def sealed(recipe: dict[str, Any], content: bytes = ORDER, key: bytes | None = b"alice") -> Record:
    """A record that a producer with this recipe would publish."""
    message = recipe["encrypted"]("orders", content, key)
    return Record("orders", 0, 0, message.key, message.value, message.headers, 0.0)


def test_values_are_encrypted_on_the_way_in_and_out() -> None:
    recipe = load(ENCRYPTION)

    async def scenario() -> None:
        async with TestClient(recipe["app"]) as client:
            record = sealed(recipe)
            await client.publish("orders", record.value, key=record.key, headers=record.headers)
            await client.settle()
            (invoice,) = client.records("invoices")
            assert SECRET not in (record.value or b"")
            assert invoice.key == b"alice"
            value = invoice.value or b""
            key = AESGCM(recipe["KEYS"][header(invoice, "key-id")])
            assert key.decrypt(value[:12], value[12:], invoice.key) == b'{"total": 7}'

    run(scenario())


def test_the_same_content_is_never_the_same_value() -> None:
    recipe = load(ENCRYPTION)

    assert len({sealed(recipe).value for _ in range(100)}) == 100


def test_after_a_rotation_both_keys_decrypt_and_the_new_one_encrypts() -> None:
    recipe = load(ENCRYPTION)
    new, recipe["CURRENT"] = recipe["CURRENT"], OLD_KEY
    old_record = sealed(recipe)
    recipe["CURRENT"] = new
    new_record = sealed(recipe)

    assert [header(record, "key-id") for record in (old_record, new_record)] == [OLD_KEY, new]
    assert recipe["decrypted"](old_record) == recipe["decrypted"](new_record)
    del recipe["KEYS"][OLD_KEY]
    assert recipe["decrypted"](new_record).total == 7
    with pytest.raises(DecodeError):
        recipe["decrypted"](old_record)


def test_a_record_that_cannot_be_decrypted_is_final_and_shows_nothing() -> None:
    """A dead letter is in a topic too: it must stay encrypted, also if only the content is wrong."""
    recipe = load(ENCRYPTION)
    good = sealed(recipe)
    value = good.value or b""
    bad = {
        "changed": (value[:-1] + bytes([value[-1] ^ 1]), good.key, good.headers),
        "moved to another key": (value, b"ben", good.headers),
        "an unknown key": (value, good.key, (("key-id", b"2031-01"),)),
        "another key": (value, good.key, (("key-id", OLD_KEY.encode()),)),
        "plain text": (ORDER, good.key, ()),
        "too short": (b"1", good.key, good.headers),
        "a tombstone": (None, good.key, good.headers),
        "not an order": (sealed(recipe, b'{"customer": "%s"}' % SECRET).value, good.key, good.headers),
    }

    async def scenario() -> None:
        async with TestClient(recipe["app"]) as client:
            for content, key, headers in bad.values():
                await client.publish("orders", content, key=key, headers=headers)
            await client.settle()
            letters = client.records("orders.dlt")
            assert len(letters) == len(bad)
            assert {header(letter, "aioshard.error") for letter in letters} == {"DecodeError"}
            assert {header(letter, "aioshard.attempts") for letter in letters} == {"1"}
            shown = [content for letter in letters for _, content in letter.headers]
            assert not any(SECRET in (content or b"") for content in shown)
            assert client.records("invoices") == []

    run(scenario())


# Sentry --------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_sentry_gets_the_last_failed_attempt_of_each_record_without_its_payload(tmp_path: Path) -> None:
    output = await run_module("tests.project.docs.sentry_scenario", directory=tmp_path)
    found = json.loads(output)

    assert found["attempts"] == {"fails": 5, "recovers": 2, "hangs": 5, "is revoked": 6, "cannot be decoded": 0}
    reported = {event["tags"]["partition"]: event for event in found["events"]}
    assert len(found["events"]) == len(reported)
    cases = list(found["attempts"])
    types = {cases[number]: event["exception"]["values"][-1]["type"] for number, event in reported.items()}
    assert types == {"fails": "LookupError", "hangs": "TimeoutError", "cannot be decoded": "DecodeError"}
    for event in found["events"]:
        assert (event["tags"]["topic"], event["tags"]["offset"]) == ("orders", 0)
        assert event["exception"]["values"][-1]["stacktrace"]["frames"]
        assert SECRET.decode() not in json.dumps(event)


# Durable workflows ---------------------------------------------------------------------------


def workflow_events(directory: Path) -> list[str]:
    return (directory / "events.txt").read_text().splitlines()


@pytest.mark.slow
async def test_a_record_whose_handler_runs_twice_starts_one_workflow(tmp_path: Path) -> None:
    await run_module("tests.project.docs.dbos_scenario", "retried", directory=tmp_path)

    assert sorted(workflow_events(tmp_path)) == ["1 workflow", "attempt 1", "attempt 2", "charge 7", "ship 7"]


@pytest.mark.slow
async def test_a_workflow_that_was_killed_resumes_and_its_record_starts_no_other(tmp_path: Path) -> None:
    await run_module("tests.project.docs.dbos_scenario", "killed", directory=tmp_path, code=9)
    assert workflow_events(tmp_path) == ["attempt 1", "charge 7"]

    await run_module("tests.project.docs.dbos_scenario", "restarted", directory=tmp_path)

    assert sorted(workflow_events(tmp_path)[2:]) == ["1 workflow", "attempt 1", "ship 7"]


# Datadog -------------------------------------------------------------------------------------


def test_the_datadog_agent_reads_metrics_that_exist() -> None:
    """A counter goes by its name without `_total`; the check of the Agent finds nothing by the full name."""
    check, agent = (yaml.safe_load(block.text) for block in blocks("yaml") if block.page == PAGE)

    assert check.keys() == {"init_config", "instances"}
    (instance,) = check["instances"]
    prefix = instance.pop("raw_metric_prefix")
    names = {prefix + name for name in instance.pop("metrics")}
    assert names <= METRICS.keys()
    assert instance == {
        "openmetrics_endpoint": "http://localhost:8000/metrics",
        "namespace": "aioshard",
        "histogram_buckets_as_distributions": True,
    }
    assert agent == {"otlp_config": {"receiver": {"protocols": {"http": {"endpoint": "localhost:4318"}}}}}


# Testcontainers ------------------------------------------------------------------------------


KAFKA_CONTAINER = """
class KafkaContainer:
    def with_kraft(self):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def get_bootstrap_server(self):
        return {bootstrap!r}
"""
"""Stands for that of testcontainers 4.15, which needs Docker."""


@pytest.mark.kafka
async def test_the_test_with_a_container_passes_on_a_real_broker(own_kafka: KafkaBroker, tmp_path: Path) -> None:
    await own_kafka.create_topic("orders", partitions=2)
    package = tmp_path / "testcontainers" / "community"
    package.mkdir(parents=True)
    for parent in (package.parent, package):
        (parent / "__init__.py").touch()  # comes before the package if that is installed
    (package / "kafka.py").write_text(KAFKA_CONTAINER.format(bootstrap=own_kafka.bootstrap))
    (tmp_path / "test_billing.py").write_text(recipes()[CONTAINERS].text)

    await run_module("pytest", "-q", "--noconftest", "test_billing.py", directory=tmp_path)

    assert await own_kafka.committed("billing", "orders") != {}
