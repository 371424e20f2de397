"""Names of torch that it does not promise to keep: what to look at when a new version of torch breaks something."""

from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["OPDEFS", "FakeTensor", "FakeTensorMode", "TorchDispatchMode", "tree_leaves", "tree_map"]
