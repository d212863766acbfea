"""Checkpoints of DeepSpeed: ZeRO stages 0 to 3, and Universal Checkpoints.

Weights and buffers have their names in the module. The states of a parameter `NAME` are `fp32.NAME` (its float32
master), `exp_avg.NAME`, `exp_avg_sq.NAME` and so on, by the names of the optimizer, and `step.NAME`.
"""
