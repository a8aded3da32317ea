"""A model of NCCL: what a rank asks of torch.distributed is recorded, and all ranks are then executed together."""
