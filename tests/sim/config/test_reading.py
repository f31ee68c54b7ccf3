from pathlib import Path

import pytest

from sim.config.reading import Unreadable, read_bytes


def test_a_folder_in_the_place_of_a_file_is_no_regular_file(tmp_path: Path) -> None:
    with pytest.raises(Unreadable, match="it is no regular file"):
        read_bytes(tmp_path, 10)
