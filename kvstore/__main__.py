"""`python -m kvstore`: the command line (floor 4)."""

from kvstore.cli import main

if __name__ == "__main__":
    main()
