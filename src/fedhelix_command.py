"""The command `fedhelix`. It stands beside the package, whose import takes seconds in which
somebody may stop it.
"""

import sys


def main() -> None:
    """Run the command line; Ctrl-C ends it with one sentence from its first moment on."""
    try:
        from fedhelix.cli.app import main as run

        run()  # it may be stopped while it says what was wrong
    except KeyboardInterrupt:
        print("fedhelix: stopped.", file=sys.stderr)
        sys.exit(130)
