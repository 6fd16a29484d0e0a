"""The index of parked keys against a naive one: order per key, and each key due once at a time."""

from collections.abc import Hashable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from aioshard.core.parking import NEVER, ParkedEntry, ParkedKeys
from tests.simulation.seeds import SEEDS

keys = st.sampled_from([b"a", b"b", "c", ("orders", b"a"), None])


class ParkedMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.parked = ParkedKeys()
        self.by_key: dict[Hashable, dict[int, float]] = {}
        self.due: dict[Hashable, float] = {}
        self.replaying: set[Hashable] = set()
        self.now = 0.0
        self.next_offset = 0

    def key_of(self, offset: int, key: Hashable) -> Hashable:
        return ("alone", offset) if key is None else key

    @rule(key=keys, delay=st.floats(0.0, 10.0), gap=st.integers(1, 3))
    def add(self, key: Hashable, delay: float, gap: int) -> None:
        offset = self.next_offset
        self.next_offset += gap
        due = self.now + delay
        self.parked.add(ParkedEntry(offset, key, generation=1, stored_at=offset, due=due, retries=0))
        identity = self.key_of(offset, key)
        if identity not in self.by_key:
            self.due[identity] = due
        self.by_key.setdefault(identity, {})[offset] = due

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        offsets = [offset for entries in self.by_key.values() for offset in entries]
        offset = data.draw(st.sampled_from([*offsets, 10_000]))
        removed = self.parked.remove(offset)
        assert (removed is not None) == (offset in offsets)
        for identity, entries in list(self.by_key.items()):
            if offset in entries:
                first = min(entries) == offset
                del entries[offset]
                if first:
                    self.replaying.discard(identity)
                    self.due[identity] = 0.0
                if not entries:
                    del self.by_key[identity]
                    self.due.pop(identity, None)
                    self.replaying.discard(identity)

    @rule(seconds=st.floats(0.0, 5.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def take_due(self) -> None:
        entry = self.parked.take_due(self.now)
        ready = {k: due for k, due in self.due.items() if k not in self.replaying and due <= self.now}
        if entry is None:
            assert not ready
            return
        identity = next(k for k, entries in self.by_key.items() if entry.offset in entries)
        assert entry.offset == min(self.by_key[identity])
        assert ready[identity] == min(ready.values())
        self.replaying.add(identity)

    @rule(data=st.data(), delay=st.sampled_from([0.0, 1.0, NEVER]))
    def postpone(self, data: st.DataObject, delay: float) -> None:
        if not self.replaying:
            return
        identity = data.draw(st.sampled_from(sorted(self.replaying, key=repr)))
        head = self.parked.get(min(self.by_key[identity]))
        assert head is not None
        self.parked.postpone(head.key, self.now + delay)
        self.replaying.discard(identity)
        self.due[identity] = self.now + delay

    @invariant()
    def agrees(self) -> None:
        assert len(self.parked) == sum(map(len, self.by_key.values()))
        assert self.parked.keys == len(self.by_key)
        for key in (b"a", b"b", "c", ("orders", b"a")):
            assert (key in self.parked) == (key in self.by_key)
        waiting = [due for identity, due in self.due.items() if identity not in self.replaying]
        assert self.parked.next_due == (min(waiting) if waiting else None)


TestParked = ParkedMachine.TestCase
TestParked.settings = settings(max_examples=max(SEEDS, 100), deadline=None)
