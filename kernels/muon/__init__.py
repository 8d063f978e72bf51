"""Muon as torch.optim.Muon computes it: specification in plain torch, Newton-Schulz, kernels, launches."""
