"""What needs an extra that is not installed says in one sentence which one to install."""

import subprocess
import sys

import pytest

from fedhelix.core.errors import UserError
from fedhelix.data import from_hub
from fedhelix.store.trackers import check_tracker


@pytest.mark.parametrize("name", ["sqlalchemy", "alembic"])
def test_a_database_of_mlflow_needs_more_packages(name, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setattr(mlflow, "get_tracking_uri", lambda: "sqlite:///mlflow.db")
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=rf"needs {name}; .* pip install 'fedhelix\[track\]'"):
        check_tracker("mlflow")
    monkeypatch.setattr(mlflow, "get_tracking_uri", lambda: "http://127.0.0.1:5000")
    check_tracker("mlflow")


class Pictures:
    """A data set of Hugging Face that cannot decode its pictures, or not for want of Pillow."""

    column_names = ("image", "label", "who")

    def __getitem__(self, column):
        raise ImportError("To support decoding images, please install 'Pillow'.")


def test_pictures_of_hugging_face_need_pillow(monkeypatch):
    with pytest.raises(ImportError, match="To support"):
        from_hub(Pictures(), "who")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UserError, match=r"needs PIL; .* pip install 'fedhelix\[data\]'"):
        from_hub(Pictures(), "who")


def test_a_deployment_in_python_needs_flower():
    script = "import sys; sys.modules['flwr'] = None; import fedhelix.deploy.localhost"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stderr.endswith('install it with: pip install "fedhelix[flower]"\n')
    assert "UserError: deployment needs Flower" in done.stderr
