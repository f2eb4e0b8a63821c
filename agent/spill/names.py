"""What the tensors and the small state of a job are called in an ordinary checkpoint. Pure.

The names are those under which ``torch.distributed.checkpoint.save`` stores what ``get_model_state_dict`` and
``get_optimizer_state_dict`` return, each under the key the object is tracked by: ``model.<name>``,
``optimizer.state.<name>.exp_avg``, ``optimizer.param_groups.0.lr``. An optimizer that trains several tracked modules
names parameters with their modules' keys. What only Everstep reads stands under ``everstep``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agent.spill.dcp_metadata import Path
from agent.spill.python_state import flatten
from everstep.manifests import Tensor

OWN = "everstep"


def own_path(*parts: str) -> Path:
    """The path of something that only Everstep reads."""
    return (OWN, *parts)


class Names:
    """The paths of one job's state.

    Args:
        catalog: every tensor of the job.
        state: the Python state of any rank; it tells which of the tracked objects are optimizers.
    """

    def __init__(self, catalog: Sequence[Tensor], state: Mapping[str, Any]) -> None:
        self._optimizers = frozenset(state.get("groups", ()))
        self._members: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
        self._modules: dict[str, set[str]] = defaultdict(set)
        for tensor in catalog:
            for top, index in tensor.groups:
                self._members[top][index].append(tensor.name)
                self._modules[top].add(tensor.name.partition(".")[0])

    def tensor(self, tensor: Tensor) -> tuple[Path, ...]:
        """Where a tensor stands: once, and again for each other name of a tied one."""
        return tuple(map(self._path, (tensor.name, *tensor.aliases)))

    def _path(self, name: str) -> Path:
        top, _, rest = name.partition(".")
        if top in self._optimizers:
            parameter, _, moment = rest.rpartition(".")
            return top, "state", self._parameter(top, parameter), moment
        return top, rest

    def _parameter(self, optimizer: str, name: str) -> str:
        """A parameter's name in an optimizer's state: within its module, where there is only one."""
        module, _, within = name.partition(".")
        return within if self._modules[optimizer] == {module} else name

    def shared(self, state: Mapping[str, Any]) -> Iterator[tuple[Path, Any]]:
        """What is stored once for the job: hyper-parameters, and the state of objects that are no modules."""
        for top, groups in state.get("groups", {}).items():
            for index, (_, group) in enumerate(groups):  # names of its parameters on this rank, and its options
                names = [self._parameter(top, name) for name in self._members[top][index]]
                yield from flatten((top, "param_groups", index), {**group, "params": names})
        for key, value in state.get("objects", {}).items():
            yield from flatten((key,), value)

    def of_modules(self, state: Mapping[str, Any]) -> Iterator[tuple[str, Path, Any]]:
        """Modules' extra state, each with the module's full name."""
        for name, extra in state.get("extra", {}).items():
            top, _, module = name.partition(".")
            for path, value in flatten((top, f"{module}._extra_state" if module else "_extra_state"), extra):
                yield name, path, value

    def scalars(self, state: Mapping[str, Any]) -> Iterator[tuple[str, Path, Any]]:
        """Optimizer state that is no tensor, each with the full name of the parameter it belongs to; empty, of none."""
        for top, parameters in state.get("scalars", {}).items():
            for name, values in parameters.items():
                of = (self._parameter(top, name),) if name else ()
                for path, value in flatten((top, "state", *of), values):
                    yield name, path, value
