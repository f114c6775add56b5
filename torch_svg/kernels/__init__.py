"""Attention kernels. Nothing is imported here: the JAX modules load jax, and importing torch_svg must not.

``reference``    torch, f32: the definition of correct.
``xla``          JAX with ordinary operations, over the same work tables; for devices without Mosaic.
``block_sparse`` the Pallas TPU kernel.
``dense``        the same kernel for plain dense attention, query and key lengths of their own.
``profiling``    the Pallas kernel that probes the patterns of a plan on sampled query rows.
``tuning``       block sizes by chip, head_dim and grid.
"""
