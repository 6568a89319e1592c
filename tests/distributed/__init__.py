"""The bridge to torch.distributed.pipelining."""
import pytest
import torch

if torch.__version__ < "2.13":
    pytest.skip("splitpipe.distributed needs torch 2.13", allow_module_level=True)
