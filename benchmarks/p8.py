"""P8: a deploy under load, in which three members are stopped and replaced in turn; and a member that is killed."""

from benchmarks.deploying import deploy, kill
from benchmarks.report import Report, Verdict
from benchmarks.stage import Stage

TITLE = "Clean deploy: three members under load, each stopped with SIGTERM and replaced in turn; and a killed one"
OURS, KILLED = "aioshard", "aioshard, static"
RATES = {OURS: 2_000, "plain loop": 300, "faststream-concurrent-aiokafka": 2_000}
"""Records per second that are produced; a plain loop cannot do more than 200 in each process."""


async def run(stage: Stage) -> Report:
    """Measure one deploy for each contestant, and one kill."""
    report = Report("P8", TITLE)
    names = [OURS] if stage.quick else list(RATES)
    for name in names:
        found = await deploy(stage, f"p8-{len(name)}", name, RATES[name])
        stage.say(f"{name}: {found.produced:,} records, {found.twice} ran twice, {found.lost} were lost")
        report.rows.append(
            {"contestant": name, "records": found.produced, "ran twice": found.twice, "lost": found.lost}
        )
        if name == OURS:
            report.verdicts += [
                Verdict("records that ran twice", found.twice, must=0),
                Verdict("records lost", found.lost, must=0),
            ]
    found = await kill(stage, "p8-kill", KILLED)
    report.rows.append(
        {"contestant": "aioshard, kill -9", "records": found.produced, "ran again": found.twice, "lost": found.lost}
    )
    report.verdicts += [
        Verdict("records that ran twice, kill -9 in the middle", found.twice, must=2_500, aim=1_000),
        Verdict("records lost, kill -9 in the middle", found.lost, must=0),
    ]
    return report
