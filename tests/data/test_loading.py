from __future__ import annotations

import dataclasses
import gzip
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from fedhelix.core.errors import UserError
from fedhelix.data import available, load, sources


@pytest.fixture(autouse=True)
def nothing_else_around(monkeypatch, tmp_path_factory):
    """No test depends on what this computer happens to hold."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.delenv(sources.FOLDER_VARIABLE, raising=False)
    monkeypatch.setattr(sources, "SYSTEM_FOLDERS", ())
    monkeypatch.setitem(sys.modules, "datasets", None)


def no_hub(monkeypatch) -> None:
    find = sources.importlib.util.find_spec
    without = lambda name: None if name == "datasets" else find(name)  # noqa: E731
    monkeypatch.setattr(sources.importlib.util, "find_spec", without)


def pixels(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def write_idx(path: Path, array: np.ndarray) -> None:
    head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, dtype=">u4").tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wb") as file:
        file.write(head + array.tobytes())


def write_idx_set(
    folder: Path, ending: str = "", prefix: str = "", test: str = "t10k"
) -> tuple[np.ndarray, ...]:
    arrays = (
        pixels(6, 28, 28),
        np.arange(6, dtype=np.uint8),
        pixels(3, 28, 28),
        np.arange(3, dtype=np.uint8),
    )
    names = "train-images-idx3", "train-labels-idx1", f"{test}-images-idx3", f"{test}-labels-idx1"
    for name, array in zip(names, arrays, strict=True):
        write_idx(folder / f"{prefix}{name}-ubyte{ending}", array)
    return arrays


def write_npz(
    path: Path, shape: tuple[int, ...] = (28, 28), **changes: np.ndarray
) -> dict[str, np.ndarray]:
    arrays = {
        "x_train": pixels(6, *shape),
        "y_train": np.arange(6, dtype=np.uint8),
        "x_test": pixels(3, *shape),
        "y_test": np.arange(3, dtype=np.uint8),
    } | changes
    np.savez(path, **arrays)
    return arrays


class TestLoad:
    def test_digits_come_with_the_library(self):
        data = load()
        assert repr(data) == "Dataset(digits: 1438 train, 359 test, 1×8×8 uint8, 10 classes)"
        assert torch.equal(data.x, load("Digits").x)
        prepared = data.prepare(data.x)
        assert abs(float(prepared.mean())) < 0.01
        assert abs(float(prepared.std()) - 1) < 0.01

    def test_a_wrong_name_gets_the_nearest_right_one(self):
        with pytest.raises(
            UserError, match="unknown data set 'fashon-mnist'; did you mean 'fashion-mnist'"
        ):
            load("fashon-mnist")

    @pytest.mark.parametrize("spelling", ["fashion-mnist", "fashion_mnist"])
    def test_npz(self, tmp_path, spelling):
        arrays = write_npz(tmp_path / f"{spelling}.npz")
        data = load("fashion_mnist", tmp_path)
        assert data.name == "fashion-mnist"
        assert np.array_equal(data.x[:, 0], arrays["x_train"])
        assert data.y_test.tolist() == [0, 1, 2]

    def test_colour_npz_has_its_channels_moved(self, tmp_path):
        arrays = write_npz(tmp_path / "cifar10.npz", (32, 32, 3))
        data = load("cifar10", str(tmp_path))
        assert data.shape == (3, 32, 32)
        assert np.array_equal(data.x.permute(0, 2, 3, 1), arrays["x_train"])

    def test_the_folder_may_come_from_the_environment_or_be_the_cache(self, tmp_path, monkeypatch):
        cache = sources.cache_folder()
        cache.mkdir(parents=True)
        write_npz(cache / "mnist.npz", y_train=np.full(6, 7, dtype=np.uint8))
        assert load("mnist").y.tolist() == [7] * 6
        write_npz(tmp_path / "mnist.npz")
        monkeypatch.setenv(sources.FOLDER_VARIABLE, str(tmp_path))
        assert load("mnist").y.tolist() == [0, 1, 2, 3, 4, 5]

    @pytest.mark.parametrize("folder", ["mnist", "MNIST/raw"])
    @pytest.mark.parametrize("ending", ["", ".gz"])
    def test_idx(self, tmp_path, folder, ending):
        x, y, x_test, _ = write_idx_set(tmp_path / folder, ending)
        data = load("mnist", tmp_path)
        assert np.array_equal(data.x[:, 0], x)
        assert np.array_equal(data.y, y)
        assert np.array_equal(data.x_test[:, 0], x_test)
        assert np.array_equal(load("mnist", tmp_path / folder).x, data.x)

    def test_fashion_is_never_taken_for_mnist(self, tmp_path, monkeypatch):
        no_hub(monkeypatch)
        write_idx_set(tmp_path / "FashionMNIST" / "raw")
        assert len(load("fashion-mnist", tmp_path).x) == 6
        for folder in (tmp_path, tmp_path / "FashionMNIST" / "raw"):
            with pytest.raises(UserError, match="mnist was not found"):
                load("mnist", folder)

    def test_system_folder(self, tmp_path, monkeypatch):
        monkeypatch.setattr(sources, "SYSTEM_FOLDERS", (tmp_path,))
        write_idx_set(tmp_path / "fashion-mnist", ".gz")
        assert len(load("fashion-mnist").x) == 6

    def test_emnist_is_put_upright(self, tmp_path):
        x, *_ = write_idx_set(tmp_path / "EMNIST" / "raw", prefix="emnist-byclass-", test="test")
        data = load("emnist", tmp_path)
        assert data.classes == 62
        assert np.array_equal(data.x[:, 0], x.swapaxes(1, 2))

    def test_cifar_binary(self, tmp_path):
        folder = tmp_path / "cifar-10-batches-bin"
        folder.mkdir()
        names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
        records = {name: pixels(2, 1 + 3072) for name in names}
        for index, name in enumerate(names):
            records[name][:, 0] = index
            records[name].tofile(folder / f"{name}.bin")
        data = load("cifar10", tmp_path)
        assert data.y.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
        assert data.y_test.tolist() == [5, 5]
        assert np.array_equal(data.x[2], records["data_batch_2"][0, 1:].reshape(3, 32, 32))

    def test_cifar100_takes_the_fine_label(self, tmp_path):
        folder = tmp_path / "cifar-100-binary"
        folder.mkdir()
        record = pixels(2, 2 + 3072)
        record[:, 0], record[:, 1] = 3, 77
        for name in ("train.bin", "test.bin"):
            record.tofile(folder / name)
        assert load("cifar100", tmp_path).y.tolist() == [77, 77]

    def test_svhn(self, tmp_path):
        savemat = pytest.importorskip("scipy.io").savemat
        x = pixels(32, 32, 3, 4)
        for part in ("train", "test"):
            savemat(
                tmp_path / f"{part}_32x32.mat",
                {"X": x, "y": np.array([[10], [1], [2], [9]], dtype=np.uint8)},
            )
        data = load("svhn", tmp_path)
        assert data.y.tolist() == [0, 1, 2, 9]
        assert np.array_equal(data.x[3, 2], x[:, :, 2, 3])


class TestBadFiles:
    @pytest.mark.parametrize("content", [b"", b"no npz at all", b"PK\x03\x04 half of a zip file"])
    def test_damaged_npz(self, tmp_path, content):
        (tmp_path / "mnist.npz").write_bytes(content)
        with pytest.raises(UserError, match=r"mnist\.npz' is damaged"):
            load("mnist", tmp_path)

    def test_pickled_arrays_are_not_read(self, tmp_path):
        write_npz(tmp_path / "mnist.npz", y_train=np.array([{}] * 6, dtype=object))
        with pytest.raises(UserError, match=r"mnist\.npz' is damaged.*allow_pickle"):
            load("mnist", tmp_path)

    def test_wrong_npz(self, tmp_path):
        np.savez(tmp_path / "mnist.npz", x_train=pixels(2, 28, 28))
        with pytest.raises(UserError, match=r"mnist\.npz' lacks some of x_train, y_train"):
            load("mnist", tmp_path)
        write_npz(tmp_path / "mnist.npz", x_test=np.zeros((3, 28, 28)))
        with pytest.raises(UserError, match="images must be uint8"):
            load("mnist", tmp_path)
        write_npz(tmp_path / "mnist.npz", y_test=np.array([0, 1, 12]))
        with pytest.raises(
            UserError, match=r"mnist\.npz' does not hold mnist: y_test .* 12 at index 2"
        ):
            load("mnist", tmp_path)

    @pytest.mark.parametrize("ending", ["", ".gz"])
    def test_damaged_idx(self, tmp_path, ending):
        write_idx_set(tmp_path / "mnist", ending)
        path = tmp_path / "mnist" / f"t10k-images-idx3-ubyte{ending}"
        whole = path.read_bytes()
        for content in (whole[:-9], whole[:6], b"", b"nonsense, really"):
            path.write_bytes(content)
            with pytest.raises(UserError, match=r"t10k-images-idx3-ubyte.*is damaged"):
                load("mnist", tmp_path)

    def test_damaged_cifar_and_svhn(self, tmp_path):
        for name in ("train.bin", "test.bin"):
            (tmp_path / "cifar100").mkdir(exist_ok=True)
            (tmp_path / "cifar100" / name).write_bytes(b"123")
        with pytest.raises(UserError, match=r"train\.bin' is damaged"):
            load("cifar100", tmp_path)
        for name in ("train_32x32.mat", "test_32x32.mat"):
            (tmp_path / name).write_bytes(b"123")
        with pytest.raises(UserError, match=r"train_32x32\.mat' is damaged"):
            load("svhn", tmp_path)

    def test_missing_says_what_to_do(self, tmp_path, monkeypatch):
        no_hub(monkeypatch)
        with pytest.raises(UserError) as error:
            load("mnist", tmp_path)
        message = str(error.value)
        assert f"mnist was not found in {tmp_path}" in message
        assert f"put mnist.npz (x_train, y_train, x_test, y_test) into {tmp_path}" in message
        assert "pip install 'fedhelix[data]'" in message
        with pytest.raises(UserError, match=r"nist\.gov"):
            load("emnist")

    def test_the_python_version_of_cifar_is_named_as_the_reason(self, tmp_path, monkeypatch):
        no_hub(monkeypatch)
        (tmp_path / "cifar-10-batches-py").mkdir()
        with pytest.raises(
            UserError,
            match="python version, which is pickle and never read: take the binary version",
        ):
            load("cifar10", tmp_path)

    def test_a_folder_that_does_not_exist(self, tmp_path):
        with pytest.raises(UserError, match="nowhere', which is no folder"):
            load("mnist", tmp_path / "nowhere")


class Column(dict):
    @property
    def column_names(self):
        return list(self)


class TestDownload:
    def use_hub(self, monkeypatch, load_dataset) -> None:
        monkeypatch.setattr(sources.importlib.util, "find_spec", lambda name: object())
        monkeypatch.setitem(
            sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset)
        )

    def test_it_is_kept_in_the_cache(self, monkeypatch):
        requested = []

        def load_dataset(name, config):
            requested.append((name, config))
            part = Column(
                img=list(pixels(5, 32, 32, 3)), fine_label=[0, 1, 2, 3, 99], coarse_label=[0] * 5
            )
            return {"train": part, "test": part}

        self.use_hub(monkeypatch, load_dataset)
        first, second = load("cifar100"), load("cifar100")
        assert requested == [("uoft-cs/cifar100", None)]
        assert torch.equal(first.x, second.x)
        assert first.y.tolist() == second.y.tolist() == [0, 1, 2, 3, 99]
        assert [path.name for path in sources.cache_folder().iterdir()] == ["cifar100.npz"]

    def test_no_network(self, monkeypatch):
        def load_dataset(name, config):
            raise ConnectionError("no route\nto host")

        self.use_hub(monkeypatch, load_dataset)
        with pytest.raises(
            UserError, match=r"could not be downloaded \(no route to host\): put mnist\.npz"
        ):
            load("mnist")


def test_available(tmp_path, monkeypatch):
    no_hub(monkeypatch)
    write_npz(tmp_path / "mnist.npz")
    (tmp_path / "svhn.npz").write_bytes(b"broken")
    rows = {row.name: row for row in available(tmp_path)}
    assert list(rows) == [
        "digits",
        "breast-cancer",
        "wine",
        "synthetic-text",
        "synthetic-series",
        "mnist",
        "fashion-mnist",
        "emnist",
        "cifar10",
        "cifar100",
        "svhn",
        "femnist",
        "shakespeare",
        "har",
        "ag-news",
    ]
    assert dataclasses.astuple(rows["mnist"])[1:4] == (str(tmp_path / "mnist.npz"), 6, 3)
    assert rows["cifar10"].found is None
    assert "pip install" in rows["cifar10"].how
    assert "damaged" in rows["svhn"].how
    digits = load("digits")
    assert (rows["digits"].train, rows["digits"].test) == (len(digits.x), len(digits.x_test))


def test_real_fashion_mnist_where_found(monkeypatch):
    monkeypatch.undo()
    if not next(row.found for row in available() if row.name == "fashion-mnist"):
        pytest.skip("Fashion-MNIST is not on this computer")
    data = load("fashion-mnist")
    assert data.y.bincount().tolist() == [6000] * 10
    assert data.y_test.bincount().tolist() == [1000] * 10
    prepared = data.prepare(data.x)
    assert abs(float(prepared.mean())) < 1e-3
    assert abs(float(prepared.std()) - 1) < 1e-3
