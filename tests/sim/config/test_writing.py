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
