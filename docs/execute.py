"""Run the notebooks of the documentation and keep their outputs: `python docs/execute.py`."""

from __future__ import annotations

from parts import notebooks

if __name__ == "__main__":
    for path in sorted(notebooks.FOLDER.glob("*.ipynb")):
        notebooks.write(path)
        print(path.name)
