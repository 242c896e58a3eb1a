"""Runs the `meshloom` command.  It listens for Ctrl-C before it imports anything slow."""

import os
import sys
import threading
import time

from trainer.processes.ending import end_process
from trainer.processes.keyboard import end_on_interrupt


def main() -> None:
    open_standard_streams()
    end_on_interrupt()
    from scripts.exits import exits

    def call() -> None:
        from scripts.cli import cli

        cli.main(standalone_mode=False)

    try:
        exits(call)
    except SystemExit as ended:
        if ended.code:
            threading.Thread(target=end_anyway, args=[ended.code], daemon=True).start()
        raise


def end_anyway(code: int) -> None:
    """Ends a failed command whose threads never end, such as Orbax's if a save cannot begin."""
    threading.main_thread().join()
    time.sleep(30)
    end_process(code)


def open_standard_streams() -> None:
    """Opens streams that the caller closed, or files of the run would get their descriptors."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            flags, mode = (os.O_WRONLY, "w") if descriptor else (os.O_RDONLY, "r")
            setattr(sys, name, os.fdopen(os.open(os.devnull, flags), mode))


if __name__ == "__main__":
    main()
