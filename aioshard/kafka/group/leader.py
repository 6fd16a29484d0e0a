"""The leader of a classic group: it assigns partitions, and sees when to do that again."""

import asyncio
import logging
import random
from collections.abc import Collection, Mapping

from aioshard.kafka.errors import named
from aioshard.kafka.fetcher import Fetcher
from aioshard.kafka.group.assignors import GroupAssignor, Plan
from aioshard.kafka.group.classic import Elected
from aioshard.kafka.group.classic_driver import ClassicDriver
from aioshard.kafka.group.member import Backoff
from aioshard.kafka.offsets import GroupOffsets, log_ranges
from aioshard.kafka.wire.cluster import Cluster, CoordinatorKind
from aioshard.kafka.wire.errors import WireError
from aioshard.kafka.wire.requests import DESCRIBE_GROUPS
from aioshard.kafka.wire.responses import classic_members
from aioshard.records import TopicPartition
from aioshard.settings import Settings

logger = logging.getLogger("aioshard.kafka.group")

_BACKLOG_TIMEOUT = 0.5
"""Seconds to query the backlogs while the group waits for us; after that, we use our last known offsets."""


class Leader:
    """Acts for one member whenever it leads its group. All of it happens in the engine's event loop.

    Its member thread keeps the membership meanwhile, so a look-up that takes long costs the group time, and nothing
    else.
    """

    def __init__(
        self,
        driver: ClassicDriver,
        assignor: GroupAssignor,
        *,
        group_id: str,
        cluster: Cluster,
        offsets: GroupOffsets,
        fetcher: Fetcher,
        settings: Settings,
        isolation: int,
    ) -> None:
        """Do nothing yet; see `run`.

        Args:
            driver: The member.
            assignor: Its assignor.
            group_id: The group.
            cluster: Whom to ask.
            offsets: The committed offsets of the group.
            fetcher: The positions of the member's own partitions.
            settings: Where new partitions begin, and how often to look at backlogs.
            isolation: Up to where records count as a backlog.
        """
        self._driver = driver
        self._assignor = assignor
        self._group_id = group_id
        self._cluster = cluster
        self._offsets = offsets
        self._fetcher = fetcher
        self._settings = settings
        self._isolation = isolation
        self._elections: asyncio.Queue[Elected] = asyncio.Queue()

    def elect(self, election: Elected) -> None:
        """Accept that the group waits for our assignment."""
        self._elections.put_nowait(election)

    async def run(self) -> None:
        """Do the leader's work until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._assign_partitions(), name=f"assignments by {self._group_id}")
            tasks.create_task(self._watch_partitions(), name=f"partitions of topics of {self._group_id}")
            if self._settings.balance_interval:
                tasks.create_task(self._balance(), name=f"balance of {self._group_id}")

    # Assignments ----------------------------------------------------------------------

    async def _assign_partitions(self) -> None:
        while True:
            await self._assign(await self._elections.get())

    async def _assign(self, election: Elected) -> None:
        """Answer an election, unless there is a later one meanwhile."""
        partitions = await self._partitions_of(election)
        if partitions is None:
            return
        backlogs: Mapping[TopicPartition, int] = {}
        if self._assignor.name.endswith("lag"):
            everything = [TopicPartition(topic, number) for topic in partitions for number in partitions[topic]]
            backlogs = await self._backlogs(everything)
        now = self._driver.clock()
        plan = self._assignor.assign(election, partitions, now, backlogs)
        self._log(plan, partitions, now)
        self._driver.lead(election, plan.assignments, partitions, rejoin_at=plan.rejoin_at)
        self._report_partitions()  # they may have changed while we asked for the backlogs

    async def _partitions_of(self, election: Elected) -> dict[str, list[int]] | None:
        """Look up the partitions of the members' topics; None if there is a later election first.

        A topic that one broker does not know keeps the partitions that another one has named.
        """
        topics = election.topics
        backoff = Backoff(random.Random())  # noqa: S311 - no secret
        while self._elections.empty():
            try:
                await self._cluster.look_up(topics)
            except WireError as error:
                logger.info("the partitions of the topics of group %r are unknown: %s", self._group_id, error)
                await asyncio.sleep(backoff.next())
                continue
            return {topic: sorted(self._cluster.metadata.partitions(topic)) for topic in sorted(topics)}
        return None

    def _log(self, plan: Plan, partitions: Mapping[str, Collection[int]], now: float) -> None:
        denied = self._cluster.metadata.denied
        absent = [topic for topic, numbers in partitions.items() if not numbers]
        if absent:
            hidden = " to this user, who may not DESCRIBE all of them" if denied.intersection(absent) else ""
            logger.warning("no partitions of %s were assigned: the brokers report none%s", ", ".join(absent), hidden)
        if plan.withheld:
            logger.warning(
                "%d partitions of a lost member stay unassigned for %.3g s, until a replacement joins: %s",
                len(plan.withheld),
                plan.rejoin_at - now,
                named(sorted(plan.withheld)),
            )

    # Reasons for another assignment ---------------------------------------------------

    async def _watch_partitions(self) -> None:
        """Report the partitions of all topics that matter, now and after each change of the metadata."""
        metadata = self._cluster.metadata
        while True:
            version = metadata.version
            self._report_partitions()
            await self._cluster.updated_after(version)

    def _report_partitions(self) -> None:
        metadata = self._cluster.metadata
        watched = self._driver.watched
        self._cluster.follow(watched)
        certain = (metadata.missing | frozenset(metadata.topics)) & watched
        self._driver.partitions_changed({topic: list(metadata.partitions(topic)) for topic in certain})

    async def _balance(self) -> None:
        """Have the group rebalance once two looks in a row have found unequal backlogs."""
        was_unequal = False
        while True:
            await asyncio.sleep(self._settings.balance_interval)
            is_unequal = self._driver.leads and await self._would_pay()
            if is_unequal and was_unequal:
                logger.info("the members of group %r have unequal backlogs: requesting a rebalance", self._group_id)
                self._driver.rejoin("the members have unequal backlogs")
                is_unequal = False
            was_unequal = is_unequal

    async def _would_pay(self) -> bool:
        if not self._assignor.knows_group:
            await self._take_over()
        metadata = self._cluster.metadata
        partitions = [
            TopicPartition(topic, number) for topic in self._driver.watched for number in metadata.partitions(topic)
        ]
        return self._assignor.would_pay(await self._backlogs(partitions))

    async def _take_over(self) -> None:
        """Learn what a predecessor with our instance id has assigned."""
        request = DESCRIBE_GROUPS(groups=[self._group_id], operations=False)
        try:
            async with asyncio.timeout(_BACKLOG_TIMEOUT):
                node = await self._cluster.coordinator(CoordinatorKind.GROUP, self._group_id)
                group = classic_members(await self._cluster.ask(node, request), self._group_id)
        except (WireError, TimeoutError) as error:
            logger.debug("the assignment of group %r is unknown: %s", self._group_id, error)
            return
        self._assignor.take_over(group.members)

    async def _backlogs(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        """Return the number of uncommitted records of each partition, where known, to balance them.

        Takes at most half a second. If the brokers do not answer, it counts from our own positions to the log ends of
        the latest fetch.
        """
        fetcher = self._fetcher
        own = fetcher.partitions
        begins = {partition: fetcher.position(partition) for partition in own}
        ends = {partition: fetcher.end_offset(partition) for partition in own}
        try:
            async with asyncio.timeout(_BACKLOG_TIMEOUT):
                commits = await self._offsets.committed(partitions)
                ranges = await log_ranges(self._cluster, partitions, self._isolation, _BACKLOG_TIMEOUT)
        except (WireError, TimeoutError) as error:
            logger.info(
                "could not query the remaining records of the partitions: %s", str(error) or "no answer in time"
            )
        else:
            for partition, (start, end, _) in ranges.items():
                ends[partition] = end
                if partition in commits:
                    begins[partition] = max(commits[partition].offset, start)
                elif begins.get(partition) is None:
                    begins[partition] = {"earliest": start, "latest": end}.get(self._settings.auto_offset_reset or "")
        bounds = ((partition, begins.get(partition), end) for partition, end in ends.items())
        return {partition: end - begin for partition, begin, end in bounds if begin is not None and end is not None}
