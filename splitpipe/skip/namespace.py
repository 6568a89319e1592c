"""A namespace: what tells skips of one name apart."""
from __future__ import annotations

from dataclasses import dataclass, field
from uuid import UUID, uuid4


@dataclass(frozen=True, repr=False)
class Namespace:
    """Tells skips of one name apart, in ``layer.isolate(namespace)``.

    Each namespace differs from every other and equals its copies, pickled ones too: a copied model has the
    connections of the original.

    Example:
        >>> import copy
        >>> namespace = Namespace()
        >>> copy.deepcopy(namespace) == namespace, Namespace() == namespace
        (True, False)
    """

    id: UUID = field(default_factory=uuid4, init=False)

    def __repr__(self) -> str:
        return f"<Namespace {self.id.hex[:8]}>"
