"""The search as an environment: actions, elites, reward, and the gate that counts and records every call."""

from envs.archive import AddStatus, Elite, EliteArchive
from envs.recording import BudgetExhausted, CallGate
from envs.reward import ImprovementReward
from envs.rows import COMPACT_FILE, ROWS_FILE, CallRow, DamagedRows, RowsTaken, RowWriter, compact, read_rows
from envs.space import Action, StrategySpace
from envs.strategy_env import Evaluate, Observation, SimulatorFailure, StrategyEnv

__all__ = [
    "COMPACT_FILE",
    "ROWS_FILE",
    "Action",
    "AddStatus",
    "BudgetExhausted",
    "CallGate",
    "CallRow",
    "DamagedRows",
    "Elite",
    "EliteArchive",
    "Evaluate",
    "ImprovementReward",
    "Observation",
    "RowWriter",
    "RowsTaken",
    "SimulatorFailure",
    "StrategyEnv",
    "StrategySpace",
    "compact",
    "read_rows",
]
