"""What a scrape of a thousand partitions costs: time, and the event loop meanwhile."""

from benchmarks.p14 import LONGEST_HOLD, MOST_SECONDS, scrapes

PARTITIONS = 1_000


async def test_a_scrape_of_a_thousand_partitions_is_quick_and_never_holds_the_loop() -> None:
    found = await scrapes(PARTITIONS, rounds=5)

    for scrape in found:
        assert scrape.page.count(b'\naioshard_partition_lag_records{group="billing",') == PARTITIONS
    # The machine may be half as fast, or keep the loop's thread from running: the scrape's own cost is there each time.
    assert min(scrape.seconds for scrape in found) <= 2 * MOST_SECONDS
    assert min(scrape.hold for scrape in found) <= LONGEST_HOLD
