"""The flights that left New York in 2013 as lines of JSON, in the order of departure, for `aioshard publish`.

python examples/flights_lines.py | aioshard publish - flights --key aircraft
"""

import json
import sys

from aioshard.cli.demo import FLIGHTS, read_flights


def main(records: int) -> None:
    for flight in read_flights(records):
        aircraft = flight.aircraft and flight.aircraft.decode()
        print(json.dumps({"aircraft": aircraft} | json.loads(flight.value)))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else FLIGHTS)
