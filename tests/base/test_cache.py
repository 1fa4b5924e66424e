"""The cache of what is built on demand: made once, trusted only where nobody else can write."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from blockscale.base import cache, files
from blockscale.base.errors import LibraryError

NAME = "kernel-0123.so"


@pytest.fixture
def place(monkeypatch, tmp_path):
    """Return the cache folder, which is not there yet; temporary folders lie in ``tmp``."""
    monkeypatch.setenv("BLOCKSCALE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(files.tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path / "cache"


class Maker:
    """Counts what it makes, and does something else while it does."""

    def __init__(self, meanwhile=lambda: None):
        self.fates, self.meanwhile = [], meanwhile

    def __call__(self, path: Path, fate: str) -> None:
        self.fates.append(fate)
        self.meanwhile()
        path.write_bytes(b"new")


def read(path: Path) -> bytes:
    data = path.read_bytes()
    if data == b"damaged":
        raise LibraryError(f"{path}: is damaged")
    return data


def fetched(maker: Maker) -> bytes:
    return cache.fetch(NAME, maker, read)


def of_another(path: Path, monkeypatch) -> None:
    """Let ``path`` belong to another user, neither this one nor root."""
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:
        monkeypatch.setattr(cache.os, "geteuid", lambda: 12345)


def alone(capfd, why: str) -> None:
    """Check that the one line said is why nothing is kept, and that nothing is left behind."""
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith(f"blockscale: the cache folder cannot be used ({why}")
    assert line.endswith(
        "), so this process builds for itself alone; set BLOCKSCALE_CACHE to a folder that you can "
        "write and others cannot"
    )
    assert not list(Path(files.tempfile.tempdir).iterdir())


def test_made_once_in_a_folder_of_the_user_alone(place, capfd):
    maker = Maker()
    assert fetched(maker) == fetched(maker) == b"new"
    assert maker.fates == [f"kept in {place}"]
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert sorted(p.name for p in place.iterdir()) == [".lock", NAME]
    assert capfd.readouterr().err == ""
    assert not list(Path(files.tempfile.tempdir).iterdir())


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o722])
def test_a_folder_that_others_can_write(place, capfd, mode):
    """What lies there is not looked at, and nothing is put there."""
    place.mkdir()
    (place / NAME).write_bytes(b"theirs")
    place.chmod(mode)
    maker = Maker()
    assert fetched(maker) == b"new"
    assert maker.fates == ["for this process alone"]
    assert (place / NAME).read_bytes() == b"theirs"
    alone(capfd, f"{place} can be written by others (mode {mode:o}), whose code would run as you")


def test_a_folder_of_another_user(place, capfd, monkeypatch):
    place.mkdir(0o700)
    (place / NAME).write_bytes(b"theirs")
    of_another(place, monkeypatch)
    assert fetched(Maker()) == b"new"
    alone(capfd, f"{place} belongs to user ")


@pytest.mark.parametrize("mode", [0o666, 0o620, 0o646])
def test_a_file_that_others_could_write(place, capfd, mode):
    """It is replaced, and said so."""
    place.mkdir(0o700)
    (place / NAME).write_bytes(b"theirs")
    (place / NAME).chmod(mode)
    maker = Maker()
    assert fetched(maker) == fetched(maker) == b"new"
    assert maker.fates == [f"kept in {place}"]
    said = capfd.readouterr().err
    assert f"{NAME} can be written by others (mode {mode:o})" in said
    assert said.endswith("; building it again\n")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user(place, capfd, monkeypatch):
    place.mkdir(0o700)
    (place / NAME).write_bytes(b"theirs")
    of_another(place / NAME, monkeypatch)
    assert fetched(Maker()) == b"new"
    assert "belongs to user 12345, whose code would run as you" in capfd.readouterr().err


def test_a_link_is_no_file(place, capfd, tmp_path):
    """Its target may lie where others write."""
    place.mkdir(0o700)
    (tmp_path / "theirs").write_bytes(b"theirs")
    (place / NAME).symlink_to(tmp_path / "theirs")
    assert fetched(Maker()) == b"new"
    assert "is no file; building it again" in capfd.readouterr().err
    assert (tmp_path / "theirs").read_bytes() == b"theirs"


def test_what_is_damaged_is_made_again(place, capfd):
    place.mkdir(0o700)
    (place / NAME).write_bytes(b"damaged")
    assert fetched(Maker()) == b"new"
    said = capfd.readouterr().err
    assert said == f"blockscale: {place / NAME}: is damaged; building it again\n"
    assert (place / NAME).read_bytes() == b"new"


def test_a_folder_in_place_of_the_file(place, capfd):
    (place / NAME / "x").mkdir(parents=True, mode=0o700)
    place.chmod(0o700)
    assert fetched(Maker()) == b"new"
    first, second = capfd.readouterr().err.splitlines()
    assert first.endswith("is no file; building it again")
    assert f"({place / NAME}: Is a directory), so this process builds for itself" in second


def test_deleted_while_it_is_made(place, capfd):
    """The folder is made again."""
    maker = Maker(lambda: [p.unlink() for p in place.iterdir()] and place.rmdir())
    assert fetched(maker) == b"new"
    assert (place / NAME).read_bytes() == b"new"
    assert capfd.readouterr().err == ""


def test_full_disk(place, capfd, monkeypatch):
    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    assert fetched(Maker()) == b"new"
    assert [p.name for p in place.iterdir()] == [".lock"]
    alone(capfd, "No space left on device")


def test_a_file_in_place_of_the_folder(place, capfd):
    place.write_bytes(b"")
    assert fetched(Maker()) == b"new"
    alone(capfd, f"{place}: File exists")


def test_an_error_of_the_maker_leaves_nothing(place):
    with pytest.raises(RuntimeError, match="no compiler"):
        fetched(Maker(lambda: (_ for _ in ()).throw(RuntimeError("no compiler"))))
    assert [p.name for p in place.iterdir()] == [".lock"]
    assert not list(Path(files.tempfile.tempdir).iterdir())


def test_folder(monkeypatch, tmp_path, capfd):
    """The variable, or the user's cache; ~ is the home folder, and without one there is none."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for chosen, path in (
        (str(tmp_path / "k"), tmp_path / "k"),
        ("~/k", tmp_path / "k"),
        ("", tmp_path / ".cache" / "blockscale"),
    ):
        monkeypatch.setenv("BLOCKSCALE_CACHE", chosen)
        assert cache.folder() == path
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", dict[int, str]().__getitem__)  # no such user
    monkeypatch.chdir(tmp_path)
    assert cache.folder() is None
    assert fetched(Maker()) == b"new"
    assert "(there is no home folder for ~/.cache/blockscale), so this" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


PROCESS = f"""
import os, sys, time
from pathlib import Path
from blockscale.base import cache

def make(path, fate):
    print("made", flush=True)
    if sys.argv[1:]:
        child = os.fork()  # which outlives this process, and must not keep the lock
        if child == 0:
            time.sleep(60)
        print(child, flush=True)
        sys.stdin.readline()
        os._exit(9)
    time.sleep(0.5)
    path.write_bytes(b"new")

print(cache.fetch({NAME!r}, make, Path.read_bytes).decode(), flush=True)
"""


def started(*arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", PROCESS, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )


def test_processes_make_it_once(place):
    """Three at a time: two of them wait, say so, and take what the first has made."""
    outputs = [process.communicate(timeout=60) for process in [started() for _ in range(3)]]
    assert sorted(out for out, _ in outputs) == ["made\nnew\n", "new\n", "new\n"]
    for out, err in outputs:
        waited = f"blockscale: another process builds {NAME}; waiting for it\n"
        assert err in ("", waited) if out == "new\n" else err == ""


def test_a_killed_process_leaves_no_lock(place):
    """Nor do its children hold it."""
    first = started("hold")
    assert first.stdout.readline() == "made\n"
    child = int(first.stdout.readline())
    second = started()
    try:
        assert second.stderr.readline().endswith("; waiting for it\n")
        first.stdin.close()
        assert first.wait(60) == 9
        assert second.communicate(timeout=60)[0] == "made\nnew\n"
    finally:
        os.kill(child, 9)
        second.kill()


FORKED = """
import os, sys, threading
from blockscale.base.files import temporary_folder

def fork():
    child = os.fork()
    if child == 0:
        sys.exit()  # runs what is to be done at exit
    os.waitpid(child, 0)

with temporary_folder() as folder:
    fork()
    thread = threading.Thread(target=fork)
    thread.start()
    thread.join()
    print(folder.is_dir(), flush=True)
print(folder.exists())
"""


def test_forked_children_leave_a_temporary_folder(place):
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True)
    assert done.stdout.split() == ["True", "False"], done.stderr
