"""Operations between ranks, named as in torch.distributed, for numpy arrays."""
