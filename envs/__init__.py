"""The search as an environment: actions, elites, reward, and the gate that counts and records every call."""

from envs.archive import AddStatus, Elite, EliteArchive
from envs.calls import CallRow
from envs.chain import DamagedRows
from envs.recording import BudgetExhausted, CallGate
from envs.registration import ENV_ID
from envs.reward import ImprovementReward
from envs.rows import COMPACT_FILE, ROWS_FILE, RowsTaken, RowWriter, compact, read_rows
from envs.space import Action, StrategySpace
from envs.strategy_env import Evaluate, Observation, SimulatorFailure, StrategyEnv
from envs.vector_env import EvaluateMany, VectorStrategyEnv

__all__ = [
    "COMPACT_FILE",
    "ENV_ID",
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
    "EvaluateMany",
    "ImprovementReward",
    "Observation",
    "RowWriter",
    "RowsTaken",
    "SimulatorFailure",
    "StrategyEnv",
    "StrategySpace",
    "VectorStrategyEnv",
    "compact",
    "read_rows",
]
