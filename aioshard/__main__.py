"""`python -m aioshard` is the command `aioshard`."""

from aioshard.cli.main import main

if __name__ == "__main__":
    main()
