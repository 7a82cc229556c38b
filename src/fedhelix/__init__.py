"""fedhelix: federated learning on clients whose data differ.

Its names are those of `federation/public.py`, `load_run`, `metrics` and `partition`. They are
imported when one of them is first used, since PyTorch alone takes seconds; `fedhelix --help` needs
none of them.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedhelix import metrics as metrics
    from fedhelix import partition as partition
    from fedhelix.deploy.finished import load_run as load_run
    from fedhelix.federation.public import *  # noqa: F403 - its `__all__` says what
else:
    from fedhelix.core.version import __version__ as __version__

    def __getattr__(name: str) -> Any:
        """A subpackage or a public name; `__all__` is one, too."""
        unknown = AttributeError(f"module 'fedhelix' has no attribute '{name}'")
        if name.startswith("_") and name != "__all__":
            raise unknown
        if find_spec(f"fedhelix.{name}"):
            return import_module(f"fedhelix.{name}")
        public = import_module("fedhelix.federation.public")
        globals().update({known: getattr(public, known) for known in public.__all__})
        globals()["load_run"] = import_module("fedhelix.deploy.finished").load_run
        globals()["__all__"] = sorted([*public.__all__, "load_run", "metrics", "partition"])
        if name not in globals():
            raise unknown
        return globals()[name]

    def __dir__() -> list[str]:
        """All names, whether or not they are imported yet."""
        return sorted({*globals(), *__getattr__("__all__")})
