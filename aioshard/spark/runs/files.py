"""Names of the files in the directory of a run, shared by all code that reads or writes them."""

__all__ = [
    "CHECKPOINT",
    "HALTED",
    "HANDED_OVER",
    "LETTERS",
    "OUTCOMES",
    "PLAN",
    "STAGING",
    "STOP",
    "SUMMARIES",
    "VERIFIED",
]

PLAN = "plan.json"
STOP = "stop"
"""Ends a run at the next border of a micro-batch."""
CHECKPOINT = "checkpoint"
"""Spark's own checkpoint: the progress of the run."""
OUTCOMES = "outcomes"
STAGING = "staging"
"""Holds a batch until it is complete; only its writer reads it."""
SUMMARIES = "summaries"
"""Row counts by status for each batch, as JSON."""
HALTED = "halted.json"
"""The records that ended the last drain."""
VERIFIED = "verified.json"
"""Written by the verification: `{"plan": digest, "ok": true, "ends": {topic: {partition: offset}}, "halted": [names],
"dead_lettered": 0}`. Without `ends`, the plan's ends apply."""
LETTERS = "letters.json"
"""Written once the dead letters are sent: `{"plan": digest, "acknowledged": 0}`."""
HANDED_OVER = "handover.json"
