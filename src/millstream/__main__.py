"""The ``millstream`` command, also as ``python -m millstream``."""

from millstream.cli import early_signals


def main() -> None:
    early_signals.install()
    from millstream.cli.main import main as run_command_line

    try:
        run_command_line()
    finally:
        early_signals.install()  # Python prints a traceback, too, if it is interrupted while it ends


if __name__ == "__main__":
    main()
