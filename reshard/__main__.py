"""`python -m reshard`."""

from reshard.cli.entry import main

if __name__ == "__main__":
    main()
