"""Small tensors: one thread is fastest."""

import os

import torch

torch.set_num_threads(1)

if not torch.cuda.is_available():
    # read when Triton is first imported: the kernels then run on CPU tensors, in float32 alone
    os.environ["TRITON_INTERPRET"] = "1"
