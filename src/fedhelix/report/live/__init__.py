"""Run folders as they grow: what has been read is kept, and only what is new is read.

Folders may be half written, damaged, deleted meanwhile or made by a stranger. So nothing here
follows a symbolic link, opens anything but regular files, trusts a size, or builds a path from what
a browser sent.
"""

from fedhelix.report.live.details import client_history, run_details
from fedhelix.report.live.run import WatchedRun
from fedhelix.report.live.watch import Watch

__all__ = ["Watch", "WatchedRun", "client_history", "run_details"]
