"""``python -m penstock`` is ``penstock``, also where no folder of programs is on the path."""

from penstock.cli import main

if __name__ == "__main__":
    main()
