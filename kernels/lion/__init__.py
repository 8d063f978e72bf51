"""Lion (Chen et al. 2023): specification in plain torch, fused kernel, launch."""
