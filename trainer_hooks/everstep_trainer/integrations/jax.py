"""Run JAX inside a training function: arrays are snapshotted in each step, and JAX's processes regroup in place.

Example::

    def train(run):
        with distributed(run):
            mesh = jax.make_mesh((jax.device_count(),), ("data",))
            state = Pytree(initial_state(mesh))
            run.track(state=state)
            for step in run.steps(until=10_000):
                state.value, loss = update(state.value, batch(step))
                run.report(loss=loss)

A `Pytree` shows the arrays of this process to the memory tier as boxes of global arrays, so that any other number of
processes can restore them. On CPUs the tier reads JAX's own memory. From other devices each array is copied to the
host once per snapshot.

`distributed` forms JAX's distributed runtime anew in each generation, in the same processes. Compiled functions are
compiled again then. Everstep detects losses, so JAX's own detection is switched off. Tried with jax 0.10.2 on CPUs,
whose collectives are gloo's. The trainer itself needs torch, for its process group.

This module uses private parts of JAX, as they are in 0.10.2: ``jax._src.distributed.global_state``,
``jax._src.xla_bridge`` and the functions of ``jaxlib`` that make clients and services of the distributed runtime.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import re
import socket
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import torch
import torch.distributed as dist
from jax._src import distributed as jax_distributed
from jax._src import xla_bridge
from jax._src.lib import _jax
from jax.extend import backend as jax_backend
from torch.utils.dlpack import from_dlpack

from everstep.errors import NotRestorable
from everstep.ids import split_address
from everstep.layout.manifests import Box
from everstep_trainer.integrations.adapter_parts.tcp_forwarder import TcpForwarder
from everstep_trainer.run import Run
from everstep_trainer.state.arrays import ArrayPart

# ---- arrays of this process as boxes, and back


def _index_box(index: Sequence[slice], shape: tuple[int, ...]) -> Box:
    ranges = [part.indices(length) for part, length in zip(index, shape, strict=True)]
    return Box(tuple(start for start, _, _ in ranges), tuple(max(0, stop - start) for start, stop, _ in ranges))


def _device_boxes(array: Any) -> dict[Any, Box]:
    """Return the box that each device of this process holds."""
    indices = array.sharding.addressable_devices_indices_map(array.shape)
    return {device: _index_box(index, array.shape) for device, index in indices.items()}


def _local_data(array: Any) -> Iterator[tuple[Any, Box]]:
    """Yield the data of each device of this process, with its box; one device's if all have the whole array."""
    boxes = _device_boxes(array)
    # addressable_shards fails for a replicated array that device_put made on the devices of several processes
    for number in range(min(1, len(boxes)) if array.is_fully_replicated else len(boxes)):
        data = array.addressable_data(number)
        yield data, boxes[next(iter(data.devices()))]


_SHORT_INTEGER = re.compile(r"u?int[1-7]")  # which JAX keeps in a byte each


def _torch_dtype(dtype: Any) -> torch.dtype:
    """Return torch's dtype of the same elements; bytes for those that torch lacks or cannot copy, such as int4."""
    known = getattr(torch, np.dtype(dtype).name, None)
    if isinstance(known, torch.dtype) and not _SHORT_INTEGER.fullmatch(np.dtype(dtype).name):
        return known
    if np.dtype(dtype).itemsize != 1:
        raise TypeError(f"arrays of {dtype} cannot be stored: torch has no such elements")
    return torch.uint8


def _as_tensor(data: Any) -> torch.Tensor:
    """Return an array of one device as a tensor: its own memory on the CPU, else its copy on the host."""
    if data.device.platform == "cpu":
        with contextlib.suppress(jax.errors.JaxRuntimeError, BufferError, RuntimeError, TypeError):
            return from_dlpack(data)  # JAX does not donate memory while it is viewed from outside
    return _view_host(np.asarray(data))


def _view_host(host: np.ndarray) -> torch.Tensor:
    """Return a tensor over an array's memory, which may be read-only; torch warns of that by other ways."""
    dtype = _torch_dtype(host.dtype)
    if not host.nbytes:
        return torch.empty(host.shape, dtype=dtype)
    host = np.ascontiguousarray(host)
    memory: Any = (ctypes.c_uint8 * host.nbytes).from_address(host.ctypes.data)
    memory.owner = host  # kept by the tensor, which keeps its buffer
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(host.shape)


def _as_numpy(tensor: torch.Tensor, dtype: Any) -> np.ndarray:
    """Return a contiguous tensor's memory as an array of ``dtype``."""
    if not tensor.numel():
        return np.empty(tuple(tensor.shape), dtype)
    return tensor.reshape(-1).view(torch.uint8).numpy().view(dtype).reshape(tuple(tensor.shape))


def _is_key(leaf: Any) -> bool:
    """Return whether a leaf is an array of typed random keys, whose numbers are inside it."""
    return isinstance(leaf, jax.Array) and bool(jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _numbers(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _rebuild(leaf: Any, filled: dict[Box, torch.Tensor]) -> Any:
    """Return an array like ``leaf``, which may be of numpy, with the numbers in ``filled``."""
    if isinstance(leaf, np.ndarray):
        (tensor,) = filled.values()
        return _as_numpy(tensor, leaf.dtype)
    if _is_key(leaf):
        return jax.random.wrap_key_data(_rebuild(_numbers(leaf), filled), impl=jax.random.key_impl(leaf))
    if not leaf.committed:
        (tensor,) = filled.values()
        host = _as_numpy(tensor, leaf.dtype)
        is_weak = leaf.weak_type and not leaf.shape  # a Python number that went through jit
        return jax.numpy.asarray(host.item() if is_weak else host)
    hosts = {box: _as_numpy(tensor, leaf.dtype) for box, tensor in filled.items()}
    shards = [jax.device_put(hosts[box], device) for device, box in _device_boxes(leaf).items()]
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)


class Pytree:
    """A pytree to track: ``run.track(state=Pytree(state))``. Its arrays are replaced in each step, through ``value``.

    Arrays of JAX and numpy are stored as parts of global arrays; any process's copy of a replicated part will do. An
    array that is not global, such as one on this process's own device, must be equal in all processes. Other leaves,
    such as numbers and strings, are small Python state. Restored arrays have the shardings of the arrays that ``value``
    had before, so they fit the mesh of the running generation.

    Args:
        value: The initial state. Its structure must be the stored one's; its shardings may be others.
    """

    def __init__(self, value: Any) -> None:
        self._restoring: dict[str, dict[Box, torch.Tensor]] = {}
        self.value = value

    @property
    def value(self) -> Any:
        """The pytree. Setting it waits until its arrays are computed, so that a lost peer shows in this step."""
        return self._value

    @value.setter
    def value(self, value: Any) -> None:
        leaves, self._structure = jax.tree_util.tree_flatten_with_path(jax.block_until_ready(value))
        named = [(_leaf_name(path), leaf) for path, leaf in leaves]
        self._leaves = dict(named)
        if len(self._leaves) < len(named):
            raise ValueError("two leaves of the pytree have one name: take keys without dots")
        self._value = value
        self._parts: tuple[ArrayPart, ...] | None = None

    def array_parts(self) -> Sequence[ArrayPart]:
        if self._parts is None:
            self._parts = tuple(self._make_parts())
        return self._parts

    def make_restore_parts(self, names: Collection[str]) -> Sequence[ArrayPart]:
        self._restoring = {}
        made = []
        for part in self.array_parts():
            if part.name in names:
                local = torch.empty(part.box.size, dtype=part.local.dtype)
                self._restoring.setdefault(part.name, {})[part.box] = local
                made.append(ArrayPart(part.name, part.shape, part.box, local))
        return made

    def adopt_restored(self) -> None:
        restored, self._restoring = self._restoring, {}
        self._replace({name: _rebuild(self._leaves[name], filled) for name, filled in restored.items()})

    def state_dict(self) -> dict[str, Any]:
        return {name: leaf for name, leaf in self._leaves.items() if not _is_array(leaf)}

    def load_state_dict(self, stored: dict[str, Any]) -> None:
        wanted = self.state_dict()
        if missing := sorted(wanted.keys() - stored.keys()):
            raise NotRestorable(f"the stored pytree has no {', '.join(missing[:3])}: restore with the same structure")
        self._replace({name: stored[name] for name in wanted})

    def _replace(self, leaves: dict[str, Any]) -> None:
        self.value = jax.tree_util.tree_unflatten(self._structure, (self._leaves | leaves).values())

    def _make_parts(self) -> Iterator[ArrayPart]:
        arrays = {name: _numbers(leaf) for name, leaf in self._leaves.items() if _is_array(leaf)}
        for array in arrays.values():
            if isinstance(array, jax.Array) and any(d.platform != "cpu" for d in array.sharding.device_set):
                array.copy_to_host_async()
        for name, array in arrays.items():
            if isinstance(array, np.ndarray):
                _torch_dtype(array.dtype)
                box = Box((0,) * array.ndim, array.shape)
                yield ArrayPart(name, array.shape, box, _view_host(array.copy()))
                continue
            seen = set[Box]()
            for data, box in _local_data(array):
                if box not in seen:
                    seen.add(box)
                    yield ArrayPart(name, array.shape, box, _as_tensor(data))


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray)


def _leaf_name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".") or "value"


# ---- JAX's distributed runtime, formed anew in each generation
#
# A coordination service, in rank 0, tells processes of each other. JAX ends every process whose connection to it breaks
# (see tcp_forwarder.py), which must not happen when rank 0 is lost. So each process connects through a forwarder of its
# own, and rank 0's service is reached through another one, which is cut before the service ends: its last answers would
# end the other processes as well. Clients and services are made directly, since ``jax.distributed.initialize`` does
# not set ``shutdown_on_destruction``, whose default waits for lost peers.

logger = logging.getLogger(__name__)

HEARTBEAT_TIMEOUT_S = 10_000_000
"""Never: Everstep detects lost ranks, and JAX's own detection would end the others."""
INITIALIZATION_TIMEOUT_S = 60
ADDRESS_BYTES = 256
SERVICE_ATTEMPTS = 5  # to find a free port for the service

_COMMUNICATION = re.compile(
    r"Gloo [\w -]+ failed|/gloo/\S*:\d+\]|[Cc]oordination ?[Ss]ervice|NCCL \w+ .*(failed|error)"
)


def is_lost_peer(error: BaseException) -> bool:
    """Return whether an error of JAX comes from its collectives or its coordination service.

    Example::

        try:
            state = update(state)
        except jax.errors.JaxRuntimeError as error:
            if not is_lost_peer(error):
                raise
    """
    return isinstance(error, RuntimeError | ValueError) and _COMMUNICATION.search(str(error)) is not None


@contextlib.contextmanager
def distributed(run: Run) -> Iterator[None]:
    """Form JAX's distributed runtime of this generation's ranks, and leave it at the end of the block.

    Make and use all arrays inside of the block: those of an earlier generation belong to devices that no longer exist.
    Functions compiled by ``jax.jit`` may be defined outside. Errors of collectives, by which JAX reports a lost peer,
    leave the block as ``torch.distributed.DistBackendError``, which Everstep answers with the next generation. Without
    ``everstep-launch`` or torchrun there is one process, and no runtime is formed.

    Example::

        def train(run):
            with distributed(run):
                assert jax.process_count() == run.world_size

    Args:
        run: The run of the training function.
    """
    _clear()  # arrays of the generation before are gone by now
    runtime = _Runtime()
    try:
        if run.world_size > 1:
            with run.atomic():  # an interrupt in between would lose the service, whose end shows in other processes
                runtime.join(run)
        yield
    except (RuntimeError, ValueError) as error:
        if run.generation == 0 or not is_lost_peer(error):
            raise
        raise dist.DistBackendError(f"a collective of JAX failed: {error}") from error
    finally:
        with run.atomic():
            runtime.leave()


class _Service:
    """The coordination service of a generation, in rank 0, and the forwarder by which it is reached."""

    def __init__(self, host: str, world_size: int) -> None:
        for attempt in range(SERVICE_ATTEMPTS):
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = int(free.getsockname()[1])
            try:
                self._service = _jax.get_distributed_runtime_service(
                    f"127.0.0.1:{port}",
                    world_size,
                    heartbeat_timeout=HEARTBEAT_TIMEOUT_S,
                    shutdown_timeout=1,
                )
                break
            except RuntimeError:  # another process took the port
                if attempt == SERVICE_ATTEMPTS - 1:
                    raise
        self._forwarder = TcpForwarder(host, ("127.0.0.1", port), hold=False)
        self.address = f"{host}:{self._forwarder.port}"

    def close(self) -> None:
        self._forwarder.close()
        self._service.shutdown()


class _Runtime:
    """This process's part in JAX's distributed runtime of one generation."""

    def __init__(self) -> None:
        self._service: _Service | None = None
        self._forwarder: TcpForwarder | None = None

    def join(self, run: Run) -> None:
        host = _own_host()
        if run.rank == 0:
            self._service = _Service(host, run.world_size)
        address = _broadcast("" if self._service is None else self._service.address)
        self._forwarder = TcpForwarder("127.0.0.1", split_address(address), hold=True)
        state = jax_distributed.global_state
        state.process_id, state.num_processes, state.coordinator_address = run.rank, run.world_size, address
        state.client = _jax.get_distributed_runtime_client(
            f"127.0.0.1:{self._forwarder.port}",
            run.rank,
            init_timeout=INITIALIZATION_TIMEOUT_S,
            shutdown_timeout=1,
            heartbeat_timeout=HEARTBEAT_TIMEOUT_S,
            shutdown_on_destruction=False,
            use_compression=False,
        )
        state.client.connect()
        _advertise(host)

    def leave(self) -> None:
        state = jax_distributed.global_state
        state.client, state.process_id, state.num_processes, state.coordinator_address = None, 0, 1, None
        try:
            if self._service is not None:
                self._service.close()
        finally:
            if self._forwarder is not None:
                self._forwarder.close_when_idle()  # the client lives as long as arrays of its devices do
            _clear()


def _clear() -> None:
    """Drop JAX's devices and compiled functions; the next call makes new ones."""
    try:
        jax_backend.clear_backends()
    except (RuntimeError, ValueError) as error:  # effects of a failed step, such as prints, were still awaited
        logger.info("JAX had unfinished work: %s", error)
        jax_backend.clear_backends()
    gc.collect()


def _advertise(host: str) -> None:
    """Make gloo listen at the address by which this process reaches the others; a host's name may be a loopback's."""
    if jax.config.jax_cpu_collectives_implementation != "gloo":
        return

    def make_client() -> Any:
        client = jax_distributed.global_state.client
        gloo = None if client is None else _jax.make_gloo_tcp_collectives(distributed_client=client, hostname=host)
        return xla_bridge.make_cpu_client(collectives=gloo)

    xla_bridge.register_backend_factory("cpu", make_client, priority=0, fail_quietly=False)


def _own_host() -> str:
    """Return the address of this machine towards the rendezvous store."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


def _broadcast(address: str) -> str:
    """Return rank 0's address on all ranks."""
    data = torch.zeros(ADDRESS_BYTES, dtype=torch.uint8)
    text = address.encode()
    data[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    dist.broadcast(data, src=0)
    return bytes(data.tolist()).rstrip(b"\0").decode()
