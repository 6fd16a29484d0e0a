"""`python -m aioshard` runs the command `aioshard`."""

from aioshard.cli.main import main

if __name__ == "__main__":
    main()
