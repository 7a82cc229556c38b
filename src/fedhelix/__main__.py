"""`python -m fedhelix` is the command `fedhelix`."""

from fedhelix.cli.app import main

if __name__ == "__main__":
    main()
