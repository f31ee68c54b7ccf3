"""The paper's PPO on Ray RLlib: see `raysearch.ppo.searcher` for how the pieces fit together.

Importing this package is cheap; its modules (other than `options`) import torch and RLlib.
"""
