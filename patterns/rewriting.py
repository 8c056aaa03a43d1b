"""Operations of a rewrite: add constants and nodes, and replace a tensor by a new one. Nothing is deleted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

import numpy as np

from sbonnx.graph import Constant, Node, Tensor, Variable
from sbonnx.graph.edit import add_constant

from .index import GraphIndex, move_readers
from .match import Match


class Edit:
    """Changes of one rewrite. New nodes are inserted directly before the root of the match, in its scope."""

    def __init__(self, index: GraphIndex, match: Match) -> None:
        self.opset = index.opset
        self._index = index
        self._match = match
        self._new: list[Node] = []
        self._orphaned: list[Tensor] = []
        self._touched: list[Node] = []
        self._heirs: list[tuple[Tensor, Constant]] = []

    def fresh(self, stem: str) -> str:
        """Return a name that no node or tensor of the model has, in any scope."""
        return self._index.names.fresh(stem)

    def constant(self, stem: str, values: np.ndarray, *, instead: Tensor | None = None) -> Constant:
        """Add a constant (initializer), named after `stem`.

        Args:
            instead: the constant that it replaces: the new one also gets its name, unless something still reads the old
                one after the rewrite. Readers of the old one in which it becomes the same values, as in the branches of
                a merged decoder, share the new one.
        """
        values = np.ascontiguousarray(values).reshape(np.shape(values))
        tensor = None if instead is None else self._index.heir_of(instead, values)
        if tensor is None:
            tensor = add_constant(self._index.graph, stem, values, self._index.names)
        if instead is not None:
            self._heirs.append((instead, tensor))
        return tensor

    @overload
    def node(
        self,
        op: str,
        inputs: Sequence[Tensor | None],
        attrs: Mapping[str, Any] | None = None,
        *,
        name: str,
        outputs: Literal[1] = 1,
        domain: str = "",
    ) -> Variable: ...

    @overload
    def node(
        self,
        op: str,
        inputs: Sequence[Tensor | None],
        attrs: Mapping[str, Any] | None = None,
        *,
        name: str,
        outputs: int,
        domain: str = "",
    ) -> tuple[Variable, ...]: ...

    def node(
        self,
        op: str,
        inputs: Sequence[Tensor | None],
        attrs: Mapping[str, Any] | None = None,
        *,
        name: str,
        outputs: int = 1,
        domain: str = "",
    ) -> Variable | tuple[Variable, ...]:
        """Add a node.

        Args:
            op, attrs, domain: as in ONNX; attributes that are None are left out.
            inputs: tensors; None for an optional input that is left out.
            name: kept if it is the name of a matched node that the rewrite makes unnecessary; else a free name is
                derived from it.
            outputs: number of outputs.

        Returns:
            The output tensor, or a tuple of them. If passed to `replace`, it takes name, type and shape of the replaced
            tensor.
        """
        read = [Variable.empty() if tensor is None else tensor for tensor in inputs]
        while read and read[-1].is_empty():
            read.pop()
        results = tuple(Variable(self.fresh(f"{name}_output")) for _ in range(outputs))
        kept = {key: value for key, value in (attrs or {}).items() if value is not None}
        node = Node(op, name, kept, inputs=read, outputs=list(results), domain=domain or None)
        self._index.add(node, before=self._match.root)
        self._new.append(node)
        return results[0] if outputs == 1 else results

    def replace(self, old: Tensor, new: Tensor) -> None:
        """Replace `old` by `new` for all readers of `old`, including those in bodies, and as an output.

        A tensor created by this edit takes the name, type and shape of `old`. An existing tensor keeps its name, unless
        `old` is an output: then it takes the output's name. If this is impossible (`Match.why_not_replace`), `check`
        must have refused.
        """
        if old is new:
            return
        why = self._index.why_not_replace(old, new)
        assert why is None, why
        producer = new.inputs[0] if new.inputs else None
        if producer is not None and (self._index.is_output(old) or any(node is producer for node in self._new)):
            self._take_over(old, new, producer)
        else:
            self._touched += move_readers(old, new)
            self._orphaned.append(old)

    def _take_over(self, old: Tensor, new: Tensor, producer: Node) -> None:
        """Make `old` the output of `new`'s producer; the old producer gets an unused output instead."""
        self._touched += move_readers(new, old)
        if old.dtype is None:
            old.dtype = new.dtype
        if old.shape is None:
            old.shape = new.shape
        for node in old.inputs:
            for position, tensor in enumerate(node.outputs):
                if tensor is old:
                    left = Variable(self.fresh(f"{old.name}_unused"))
                    list.__setitem__(node.outputs, position, left)
                    list.append(left.inputs, node)
                    self._orphaned.append(left)
        list.clear(old.inputs)
        for position, tensor in enumerate(producer.outputs):
            if tensor is new:
                list.__setitem__(producer.outputs, position, old)
                list.append(old.inputs, producer)
        list.clear(new.inputs)

    def finish(self) -> list[Node]:
        """Remove nodes without readers and assign the final names of new nodes.

        Returns:
            The live nodes whose neighbourhood changed.
        """
        orphans = [producer for tensor in self._orphaned for producer in tensor.inputs]
        lost = self._index.bury([*self._match.nodes, *orphans])
        lonely = [reader for tensor in lost if len(tensor.outputs) <= 2 for reader in tensor.outputs]
        for old, heir in self._heirs:
            if self._index.used(old):
                self._index.add_heir(old, heir)
            else:
                old.name, heir.name = heir.name, old.name
        own = {node.name for node in self._match.nodes}
        for node in self._new:
            if node.name not in own or self._index.live_names[node.name] > 1:
                self._index.rename(node, self.fresh(node.name))
        readers = [reader for node in self._new for tensor in node.outputs for reader in tensor.outputs]
        return [node for node in (*self._new, *self._touched, *readers, *lonely) if self._index.alive(node)]
