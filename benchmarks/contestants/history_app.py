"""The app of P10 and P11: Spark tasks import it, so its spec comes from their environment."""

import os

from aioshard import App
from benchmarks.contestants.handlers import make_work
from benchmarks.spec import IN_ENVIRONMENT, Spec

_spec = Spec.from_json(os.environ[IN_ENVIRONMENT])
app = App(_spec.group, bootstrap_servers=_spec.bootstrap, auto_offset_reset="earliest")
handler = make_work(_spec).handler
app.consume(_spec.topic, concurrency=_spec.concurrency)(handler)
