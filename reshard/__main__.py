"""`python -m reshard`."""

from reshard.entry import main

if __name__ == "__main__":
    main()
