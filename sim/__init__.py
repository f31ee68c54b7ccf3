"""A simulator of distributed LLM inference on measured GPUs, and the exact optimum of its strategy space.

>>> from sim.config.catalog import load_workload
>>> from sim.ops.heuristics import megatron_dims
>>> from sim.simulate import evaluate
>>> from sim.strategy import Strategy
>>> workload = load_workload("gpt_moe_1_2t_16k")
>>> evaluate(workload, Strategy(tp=8, ep=16, pp=2, batch=512, dims=megatron_dims(workload.model))).feasible
True
"""
