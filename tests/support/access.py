"""Permissions on the guarded listener: SCRAM users and ACLs, set through the plain listener."""

import asyncio
import ssl
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal

from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from tests.support.cluster import DEADLINE, POLL_INTERVAL, GuardedCluster, KafkaCluster, is_ready
from tests.support.kafka_properties import Credentials

Resource = Literal["topic", "group", "transactional_id"]
Mechanism = Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"]

SCRAM_ITERATIONS = 4096

TYPES = {
    "topic": ResourceType.TOPIC,
    "group": ResourceType.GROUP,
    "transactional_id": ResourceType.TRANSACTIONAL_ID,
}


async def create_scram_user(cluster: GuardedCluster, user: Credentials) -> None:
    """Creates a user under SCRAM-SHA-512, or gives it a new password; returns when the user can log in."""
    info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, SCRAM_ITERATIONS)
    upsertion = UserScramCredentialUpsertion(user.username, info, user.password.encode())
    admin = _admin(cluster)  # kept until the answers are there: they are lost with it
    options = client_options(user, "SCRAM-SHA-512", cluster.certificates.ca_file)
    async with asyncio.timeout(DEADLINE):
        await _answers(admin.alter_user_scram_credentials([upsertion]))
        while not await is_ready(cluster.secure_bootstrap, **options):  # noqa: ASYNC110  (a broker sends no event)
            await asyncio.sleep(POLL_INTERVAL)


async def allow(
    cluster: KafkaCluster, user: Credentials, resource: Resource, name: str, *operations: AclOperation
) -> None:
    """Lets *user* do *operations* (all when none is given) with the topic, group or transactional id *name*."""
    await _bind(cluster, _bindings(user, resource, name, operations, AclPermissionType.ALLOW))


async def deny(
    cluster: KafkaCluster, user: Credentials, resource: Resource, name: str, *operations: AclOperation
) -> None:
    """Forbids *user* the *operations* (all when none is given); other ACLs do not change that."""
    await _bind(cluster, _bindings(user, resource, name, operations, AclPermissionType.DENY))


def client_options(user: Credentials, mechanism: Mechanism, ca_file: Path) -> dict[str, Any]:
    """How an aiokafka client logs in on the guarded listener."""
    return {
        "security_protocol": "SASL_SSL",
        "ssl_context": ssl.create_default_context(cafile=str(ca_file)),
        "sasl_mechanism": mechanism,
        "sasl_plain_username": user.username,
        "sasl_plain_password": user.password,
    }


def _admin(cluster: KafkaCluster) -> AdminClient:
    return AdminClient({"bootstrap.servers": cluster.bootstrap})


def _bindings(
    user: Credentials,
    resource: Resource,
    name: str,
    operations: Sequence[AclOperation],
    permission: AclPermissionType,
) -> list[AclBinding]:
    return [
        AclBinding(
            TYPES[resource],
            name,
            ResourcePatternType.LITERAL,
            f"User:{user.username}",
            "*",
            operation,
            permission,
        )
        for operation in operations or (AclOperation.ALL,)
    ]


async def _bind(cluster: KafkaCluster, bindings: list[AclBinding]) -> None:
    """Creates ACLs; returns when the broker goes by them, which is a moment after the controller took them."""
    admin = _admin(cluster)
    async with asyncio.timeout(DEADLINE):
        await _answers(admin.create_acls(bindings))
        for acl in bindings:
            same = AclBindingFilter(
                acl.restype, acl.name, acl.resource_pattern_type, acl.principal, acl.host, acl.operation,
                acl.permission_type,
            )  # fmt: skip
            while not await asyncio.wrap_future(admin.describe_acls(same)):  # noqa: ASYNC110  (the same)
                await asyncio.sleep(POLL_INTERVAL)


async def _answers(futures: dict[Any, Future[Any]]) -> None:
    await asyncio.gather(*(asyncio.wrap_future(future) for future in futures.values()))
