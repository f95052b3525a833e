"""What the fork server imports once for all ranks. No threads may run here: ranks are forked."""

import torch

from topoep_titan.titan import device

device.install()
torch.set_num_threads(1)

import torchtitan.trainer

import topoep_titan.titan.job
