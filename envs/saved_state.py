"""What an environment, a searcher or an agent needs to go on where it stopped."""

from typing import Any

SavedState = dict[str, Any]
"""What `get_state` returns and `set_state` takes: plain data and arrays, as `raysearch.runs.checkpoint` packs them."""
