"""The paper's PPO on Ray RLlib: see `raysearch.searchers.ppo.ppo_searcher` for how the pieces fit together.

Importing this package is cheap; its modules (other than `options`) import torch and RLlib.
"""
