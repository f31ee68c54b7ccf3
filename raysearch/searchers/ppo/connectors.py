"""What stands between episodes and learner: advantages as searches have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.apis.value_function_api import ValueFunctionAPI
from ray.rllib.evaluation.postprocessing import Postprocessing
from ray.rllib.utils.numpy import convert_to_numpy

ValueEstimate = Callable[[Mapping[str, np.ndarray], np.ndarray | None], tuple[np.ndarray, np.ndarray]]


class AddAdvantages(ConnectorV2):
    """Learner: advantages and value targets from rewards and the value network, if the module has one.

    Args:
        estimate: From columns and expected returns, each `[n]`, to both, `[n]`.
    """

    def __init__(self, estimate: ValueEstimate) -> None:
        super().__init__()
        self._estimate = estimate

    def __call__(self, *, rl_module: Any, batch: dict[str, Any], episodes: Any, **_: Any) -> dict[str, Any]:
        """Adds two columns to each module's batch, which is complete otherwise."""
        for module_id, columns in batch.items():
            module = rl_module[module_id].unwrapped()
            has_values = isinstance(module, ValueFunctionAPI)
            values: Any = convert_to_numpy(module.compute_values(columns)) if has_values else None
            device = columns[Columns.OBS].device
            arrays: Any = convert_to_numpy(dict(columns))
            advantages, targets = self._estimate(arrays, values)
            for name, column in ((Postprocessing.ADVANTAGES, advantages), (Postprocessing.VALUE_TARGETS, targets)):
                columns[name] = torch.from_numpy(column.astype(np.float32)).to(device)
        return batch
