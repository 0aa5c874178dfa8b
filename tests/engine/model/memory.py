"""The memory that tensors take, on any device."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Memory(TorchDispatchMode):
    """The bytes of all tensors made inside that are alive, and the most there ever were."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.most = 0
        self._sizes: dict[weakref.ref[torch.UntypedStorage], int] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        made = function(*args, **(kwargs or {}))
        for tensor in _tensors(made):
            storage = tensor.untyped_storage()
            reference = weakref.ref(storage, self._freed)
            if storage._cdata not in given and reference not in self._sizes:
                self._sizes[reference] = storage.nbytes()
                self.alive += storage.nbytes()
        self.most = max(self.most, self.alive)
        return made

    def _freed(self, reference: weakref.ref) -> None:
        self.alive -= self._sizes.pop(reference)


def _tensors(tree) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
