"""The app of a group process: `python -m aioshard run tests.services.idempotence.member:app`; see `processes`."""

import json
import os
import threading

from examples import inbox_postgresql
from tests.services.idempotence.processes import STANDSTILL, VARIABLE
from tests.services.idempotence.stores import app_of, store_at
from tests.support.guard import wait_for_end


def end_with(parent: int) -> None:
    """A test that is killed leaves no member behind."""
    wait_for_end(parent)
    os._exit(1)


threading.Thread(target=end_with, args=(os.getppid(),), name="end with the test", daemon=True).start()
inbox_postgresql.STANDSTILL = STANDSTILL
what = json.loads(os.environ[VARIABLE])
app = app_of(store_at(what["address"]), what["group"], what["topic"], **what["settings"])
