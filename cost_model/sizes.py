"""Elements and bytes that one rank holds, remembered, because a search asks again and again."""

from __future__ import annotations

from autopar.ir import Dims, Layout, Mesh, Tensor, local_elements


class Sizes:
    """Local sizes of tensors on one mesh."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._elements: dict[tuple[Dims, Layout], int] = {}

    def elements(self, dims: Dims, layout: Layout) -> int:
        """Elements of a tensor of these dims that one rank holds. Raises LayoutError."""
        key = (dims, layout)
        found = self._elements.get(key)
        if found is None:
            found = self._elements[key] = local_elements(dims, layout, self.mesh)
        return found

    def bytes(self, tensor: Tensor, layout: Layout) -> int:
        """Bytes of `tensor` that one rank holds."""
        return self.elements(tensor.dims, layout) * tensor.itemsize_bytes
