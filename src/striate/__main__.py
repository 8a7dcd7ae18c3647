"""``python -m striate``: the command line where its script is not on the path."""

from striate.cli.app import main

if __name__ == "__main__":
    main()
