"""Small tensors: one thread is fastest."""

import torch

torch.set_num_threads(1)
