"""What JSON and TOML files hold: names for what is read from one, or is about to be written into one."""

from collections.abc import Mapping
from typing import Any

JsonObject = dict[str, Any]
"""A JSON object or TOML table: strings, finite numbers, booleans, None, and lists and objects of them."""
JsonFields = Mapping[str, Any]
"""A `JsonObject` that is only read."""
