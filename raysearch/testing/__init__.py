"""For authors of searchers: the conformance suite that every searcher of ours runs. Needs pytest.

>>> from raysearch.testing import SearcherSuite
>>> class TestMine(SearcherSuite):
...     searcher = "my_package.mine:Mine"
"""

import pytest

pytest.register_assert_rewrite("raysearch.testing.searcher_suite")

from raysearch.testing.searcher_suite import SearcherSuite as SearcherSuite  # noqa: E402
