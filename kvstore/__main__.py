"""`python -m kvstore`: the command line."""

import sys

try:
    from kvstore.cli.main import main
except MemoryError:
    print("kvstore: there is no memory left to start; raise the limit of this process", file=sys.stderr)
    raise SystemExit(71) from None

if __name__ == "__main__":
    main()
