import os
from pathlib import Path

import pytest

from sim.config.writing import write_atomically


def test_a_file_is_replaced_whole_and_its_folder_made(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    for content in ("first", "second"):
        write_atomically(path, lambda temporary, content=content: temporary.write_text(content))
        assert path.read_text() == content
    assert list(path.parent.iterdir()) == [path]


def test_an_interrupted_write_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("whole")

    def stop_halfway(temporary: Path) -> None:
        temporary.write_text("ha")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, stop_halfway)
    assert [file.read_text() for file in tmp_path.iterdir()] == ["whole"]


def test_a_pipe_or_a_device_is_not_replaced_nor_what_leads_to_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/null")
    for name in ("pipe", "link"):
        with pytest.raises(OSError, match="expected a file, or nothing, in its place"):
            write_atomically(tmp_path / name, lambda temporary: temporary.write_text("new"))
    assert (tmp_path / "pipe").is_fifo()
    assert sorted(os.listdir(tmp_path)) == ["link", "pipe"]
