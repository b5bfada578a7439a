"""Gemma 3 on Transformers: checkpoints, prompts and layers. Only this package and ``runners`` import Transformers."""

import logging

# Transformers imports torchao where it is installed, which then warns of GPU kernels that it cannot load and of its own
# use of PyTorch; int8 and int4 weights need neither, and a newcomer reads "Failed to load" as a broken installation.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
