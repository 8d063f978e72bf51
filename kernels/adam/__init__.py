"""Adam and AdamW: specification in plain torch, fused kernel, launch."""
