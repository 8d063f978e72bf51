"""Muon as in torch.optim.Muon: specification in plain torch, Newton-Schulz, kernels, launches."""
