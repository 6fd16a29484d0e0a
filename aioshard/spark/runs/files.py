"""What is in the directory of a run: one name for each, for all that write or read it."""

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
"""The file that ends a run at the next border of a micro-batch."""
CHECKPOINT = "checkpoint"
"""Spark's own: how far the run is."""
OUTCOMES = "outcomes"
STAGING = "staging"
"""Where a batch is written before it is complete; nobody else reads there."""
SUMMARIES = "summaries"
"""Rows by status of each batch, as JSON."""
HALTED = "halted.json"
"""The records that ended the last drain."""
VERIFIED = "verified.json"
"""Written by the verification: `{"plan": digest, "ok": true, "ends": {topic: {partition: offset}}, "halted": [names],
"dead_lettered": 0}`. Without `ends`, those of the plan."""
LETTERS = "letters.json"
"""Written when dead letters were sent: `{"plan": digest, "acknowledged": 0}`."""
HANDED_OVER = "handover.json"
