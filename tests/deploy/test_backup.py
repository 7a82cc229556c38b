"""Backup and restore of a server: what is in it, while it is written to, and bad input."""

import io
import sqlite3
import stat
import tarfile

import pytest

from fedhelix import UserError
from fedhelix.deploy.backup import back_up, restore
from fedhelix.deploy.keys import make_certificates, make_site_key


@pytest.fixture
def server(tmp_path):
    """A server's folder with an open database, and a run."""
    folder = tmp_path / "deployment"
    make_certificates(folder / "keys", [])
    make_site_key(folder / "keys", "north")
    (folder / "logs").mkdir()
    (folder / "logs" / "superlink.log").write_text("long")
    run = tmp_path / "runs" / "first"
    run.mkdir(parents=True)
    (run / "config.toml").write_text("rounds = 3")
    database = sqlite3.connect(folder / "superlink.db")
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("CREATE TABLE node (name TEXT)")
    database.execute("INSERT INTO node VALUES ('north')")
    database.commit()
    database.execute("INSERT INTO node VALUES ('half')")  # not committed
    yield folder, run
    database.close()


def test_what_was_backed_up_comes_back(server, tmp_path):
    folder, run = server
    assert back_up(folder, tmp_path / "b" / "all.tar.gz", [run]) > 500
    assert stat.S_IMODE((tmp_path / "b" / "all.tar.gz").stat().st_mode) == 0o600
    new = tmp_path / "new"
    assert restore(tmp_path / "b" / "all.tar.gz", new) == [new / "runs" / "first"]
    assert (new / "runs" / "first" / "config.toml").read_text() == "rounds = 3"
    for key in ("server.key", "north.key"):
        assert (new / "keys" / key).read_bytes() == (folder / "keys" / key).read_bytes()
        assert stat.S_IMODE((new / "keys" / key).stat().st_mode) == 0o600
    rows = sqlite3.connect(new / "superlink.db").execute("SELECT name FROM node").fetchall()
    assert rows == [("north",)] and not (new / "logs").exists()


def test_bad_input(server, tmp_path):
    folder, run = server
    archive = tmp_path / "all.tar.gz"
    with pytest.raises(UserError, match="holds no deployment"):
        back_up(tmp_path / "nowhere", archive)
    with pytest.raises(UserError, match="is no run folder"):
        back_up(folder, archive, [tmp_path])
    with pytest.raises(UserError, match="two run folders are called 'first'"):
        back_up(folder, archive, [run, run])
    assert not archive.exists() and not list(tmp_path.glob(".*"))
    back_up(folder, archive)
    first = archive.read_bytes()
    with pytest.raises(UserError, match=r"all.tar.gz' exists; name another file"):
        back_up(folder, archive, [run])
    assert archive.read_bytes() == first
    with pytest.raises(UserError, match="is not empty"):
        restore(archive, folder)
    archive.write_bytes(archive.read_bytes()[:300])
    with pytest.raises(UserError, match="cannot be restored"):
        restore(archive, tmp_path / "new")
    archive.write_bytes(b"no archive")
    with pytest.raises(UserError, match="cannot be restored: it is no whole archive") as said:
        restore(archive, tmp_path / "third")
    assert "\n" not in str(said.value)
    with pytest.raises(UserError, match=r"there is no file '.*missing'"):
        restore(tmp_path / "missing", tmp_path / "other" / "folder")
    assert not [name for name in ("new", "third", "other") if (tmp_path / name).exists()]


def test_an_archive_that_breaks_off_halfway_leaves_nothing(server, tmp_path, monkeypatch):
    back_up(server[0], tmp_path / "all.tar.gz", [server[1]])

    def extract(tar, folder, filter):
        tar.extract("keys", folder, filter=filter)
        tar.extract("superlink.db", folder, filter=filter)
        raise OSError("there is no space left")

    monkeypatch.setattr(tarfile.TarFile, "extractall", extract)
    (tmp_path / "empty").mkdir()
    for name in ("empty", "new"):
        with pytest.raises(UserError, match="cannot be restored: there is no space left"):
            restore(tmp_path / "all.tar.gz", tmp_path / name)
    assert not list((tmp_path / "empty").iterdir()) and not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["../evil", "keys/../../evil", "etc/passwd"])
def test_an_archive_that_leads_out_of_the_folder_is_refused(tmp_path, name):
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as tar:
        tar.addfile(entry := tarfile.TarInfo(name), io.BytesIO(b""))
        assert entry.size == 0
    with pytest.raises(UserError, match=r"is no backup|cannot be restored"):
        restore(tmp_path / "a.tar.gz", tmp_path / "new")
    assert not (tmp_path / "evil").exists() and not (tmp_path / "new").exists()
