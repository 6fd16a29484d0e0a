"""P12: pauses of partitions and repeated records in a deploy, for each kind of membership."""

import statistics

from benchmarks.deploying import Deploy, deploy
from benchmarks.peers import PEERS
from benchmarks.report import Cell, Report, Verdict
from benchmarks.stage import Contestant, ContestantFailedError, Stage

TITLE = "Deploy: how long partitions stand still while three members are stopped and replaced in turn"
OURS = "aioshard"
PROTOCOLS = ("aioshard, classic", "aioshard, KIP-848")
RATE = 2_000
SLOW_RATE = 300
"""For contestants that process one record at a time: 200 in each process."""
ONE_AT_A_TIME = ("plain loop", "FastStream")
STUCK = "a member processed nothing for 90 s"


async def run(stage: Stage) -> Report:
    """Measure one deploy for each contestant."""
    report = Report("P12", TITLE)
    contestants = stage.lineup(
        [Contestant(OURS)],
        [
            Contestant("aioshard, static"),
            *map(Contestant, PROTOCOLS),
            Contestant("plain loop"),
            Contestant("FastStream", package="faststream"),
            Contestant("faststream-concurrent-aiokafka", package="faststream_concurrent_aiokafka"),
            *(Contestant(name, peer=True) for name in PEERS),
        ],
    )
    for number, contestant in enumerate(contestants):
        name = contestant.name
        try:
            found = await deploy(stage, f"p12-{number}", name, SLOW_RATE if name in ONE_AT_A_TIME else RATE)
        except (ContestantFailedError, TimeoutError) as failure:
            if name.startswith(OURS):
                raise
            stage.say(f"{name}: {failure}")
            lines = str(failure).splitlines() or [STUCK]
            report.rows.append({"contestant": name, "records": lines[-1]})
            continue
        report.rows.append(_row(stage, name, found))
        if name.startswith(OURS):
            report.verdicts += [
                Verdict(f"records that ran twice, {name}", found.twice, must=0),
                Verdict(f"records lost, {name}", found.lost, must=0),
            ]
    report.notes.append(
        "Stood still: for each partition the longest time in which nothing of it was processed; median. Under KIP-848, "
        "brokers from 4.3 assign partitions at most once a second, unless consumer.assignment.interval.ms is shorter."
    )
    return report


def _row(stage: Stage, name: str, found: Deploy) -> dict[str, Cell]:
    stood = found.standstills()
    took = (found.ended - found.began) / 1e9
    stage.say(f"{name}: {found.twice} ran twice, {found.lost} lost, at most {stood[-1]:.1f} s without a record")
    return {
        "contestant": name,
        "records": found.produced,
        "ran twice": found.twice,
        "lost": found.lost,
        "stood still, s": round(statistics.median(stood), 2),
        "at most, s": round(stood[-1], 2),
        "deploy, s": round(took, 1),
    }
