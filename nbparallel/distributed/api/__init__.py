"""The operations as users call them, spelled as in torch.distributed."""
