"""Files are whole or absent; names fit a file system; a full disk is told as one."""

from __future__ import annotations

import errno
import multiprocessing
import os
from pathlib import Path

import pytest

from bebop.errors import BadInput, ConfigError, DiskError
from bebop.store.files import (
    check_room,
    content_hash,
    disk_fault,
    filled,
    read_json,
    replacing,
    safe_name,
    write_json,
    write_text,
)


def test_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = write_text(tmp_path / "a.txt", "old")
    with pytest.raises(RuntimeError), replacing(path) as part:
        part.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_a_folder_is_replaced_whole(tmp_path):
    for content in ("old", "new"):
        with replacing(tmp_path / "folder") as part:
            part.mkdir()
            (part / content).write_text(content)
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]
    assert [p.name for p in (tmp_path / "folder").iterdir()] == ["new"]


def test_bytes_that_are_no_text_are_kept(tmp_path):
    raw = b"caf\xe9 \xff\r\nline"
    path = write_text(tmp_path / "README.md", raw.decode("utf-8", errors="surrogateescape"))
    assert path.read_bytes() == raw


@pytest.mark.parametrize("content", ["", "{", "[1]", "\xff"])
def test_file_that_is_no_json_object_is_named(tmp_path, content):
    path = tmp_path / "run.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(BadInput, match=r"run\.json"):
        read_json(path)


@pytest.mark.parametrize("text", ["a/b=[c, d]", "x" * 300, "é" * 200, "tab\tnew\nline", "data.tasks=[{name: a}]"])
def test_labels_fit_a_file_system(tmp_path, text):
    name = safe_name(text)
    (tmp_path / name).mkdir()
    assert (tmp_path / name).is_dir() and len(os.fsencode(name)) <= 80
    assert safe_name(text + "1") != name


def _make(home: str) -> None:
    def make(folder: Path) -> None:
        with open(Path(home) / "made", "a") as file:
            file.write("x")
        (folder / "a").write_text("a")

    filled(Path(home) / "name", make)


def test_two_processes_make_a_cached_folder_once(tmp_path):
    processes = [multiprocessing.get_context("fork").Process(target=_make, args=(str(tmp_path),)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert (tmp_path / "made").read_text() == "x"


def test_killed_makers_leftovers_go_and_are_never_used(tmp_path):
    left = tmp_path / ".name.0badcafe.part"
    left.mkdir()
    (left / "half").write_text("half")
    _make(str(tmp_path))
    assert not left.exists()


def test_name_of_a_cache_follows_every_value_and_refuses_objects():
    base = {"a": 1, "b": [1.5, None], "c": {"d": Path("/x")}}
    names = {content_hash(parts) for parts in (base, {**base, "a": 2}, {**base, "b": [1.5, 0]}, {**base, "c": {}})}
    assert len(names) == 4 and content_hash({"b": [1.5, None], "c": {"d": "/x"}, "a": 1}) in names
    with pytest.raises(BadInput, match="object"):
        content_hash({"a": object()})


def test_full_disk_is_found_behind_other_errors(tmp_path):
    with pytest.raises(IndexError) as caught:
        try:
            raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "x"))
        except OSError as error:
            raise IndexError("list index out of range") from error
    assert str(disk_fault(caught.value, tmp_path)).startswith(f"{tmp_path / 'x'}: no space left on the disk")
    assert disk_fault(IndexError("list index out of range"), tmp_path) is None


def test_too_little_room_is_told_before_the_work(tmp_path):
    with pytest.raises(DiskError, match=r"a copy of the policy needs .* GiB, its disk has .* free"):
        check_room(tmp_path, 2**60, "a copy of the policy")
    check_room(tmp_path, 1, "a copy of the policy")


def test_odd_numbers_come_back(tmp_path):
    write_json(tmp_path / "a.json", {"x": float("inf"), "y": (1, 2)})
    assert read_json(tmp_path / "a.json") == {"x": float("inf"), "y": [1, 2]} and read_json(tmp_path / "none") == {}


def test_a_cache_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="not a directory; set BEBOP_HOME=") as error:
        filled(tmp_path / "file" / "policies" / "tiny", lambda folder: None)
    assert "\n" not in str(error.value)
