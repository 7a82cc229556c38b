"""The version of this package."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("fedhelix")
except PackageNotFoundError:  # run from the source tree
    __version__ = "0.2.0"
