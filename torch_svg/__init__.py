"""Sparse VideoGen attention for diffusers video pipelines on TPU through PyTorch/XLA.

Importing this package loads neither jax nor torch_xla and touches no device.
"""

from .config import SparseVideoConfig
from .density_search import tune_density
from .enabling import disable, enable, sparse_attention
from .processor import SparseVideoAttnProcessor

__version__ = "0.1.0"

__all__ = ["SparseVideoAttnProcessor", "SparseVideoConfig", "disable", "enable", "sparse_attention", "tune_density"]
