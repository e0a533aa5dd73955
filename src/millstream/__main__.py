"""``python -m millstream``: the same as the ``millstream`` command."""

from millstream.cli import main

if __name__ == "__main__":
    main()
