"""Sends a trainer's weights to workers: what changed since the last version, without loss, over any transport.

A message is a header, a body and a checksum. The body of a snapshot is a manifest (JSON) and the numbers. The body of
an update has, for each segment of the manifest, a length, the sum of the new bits, and a wire of exact differences. A
segment is tensors of one dtype, up to tens of millions of numbers. Each rank of a sharded model sends a part: its own
shards. A buffer may hold several messages, one after the other. Nothing is unpickled.
"""

import json
import os
import secrets
import struct
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire import exact
from thinwire.errors import CollectiveError, WireError
from thinwire.integrations import checkpoint
from thinwire.integrations.models import describe, plain_name
from thinwire.wire import EXACT_DTYPES

_HEADER = struct.Struct("<4sBxHHxxQQQ8sQ")  # magic, kind, part, parts, publisher, base version, version, digest, body
_SEGMENT = struct.Struct("<Qq")  # bytes, sum of the new bits
_MAGIC = b"TWU1"
_SNAPSHOT, _UPDATE = range(2)
_SEGMENT_NUMEL = 1 << 25  # a segment ends with the tensor that reaches it; GPUs need long segments
_SENT = ["float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"]
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in [*_SENT, "float8_e4m3fn", "float8_e5m2"]}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Model = nn.Module | Mapping[str, Tensor]
Update = bytes | bytearray | memoryview | str | os.PathLike[str] | Sequence[Any]


class WeightBox(NamedTuple):
    """A published tensor, or the box of it that one rank has."""

    name: str
    dtype: str
    shape: tuple[int, ...]  # of the whole tensor
    start: tuple[int, ...]
    box: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.box) * DTYPES[self.dtype].itemsize


class Manifest(NamedTuple):
    """What a publisher sends: the pieces, in the order of their numbers, and the names of tied tensors."""

    pieces: tuple[WeightBox, ...]
    tied: tuple[tuple[str, str], ...]  # a name, and the name of the piece that has its numbers

    @classmethod
    def parse(cls, text: bytes) -> "Manifest":
        try:
            pieces, tied = json.loads(text)
            found = [WeightBox(str(n), str(d), *(tuple(map(int, sizes)) for sizes in rest)) for n, d, *rest in pieces]
            manifest = cls(tuple(found), tuple((str(a), str(b)) for a, b in tied))
            manifest.names()
            for piece in found:
                boxes = zip(piece.shape, piece.start, piece.box, strict=True)
                if piece.dtype not in DTYPES or any(not 0 <= at <= at + size <= whole for whole, at, size in boxes):
                    raise WireError(str(piece))
        except (ValueError, TypeError, KeyError) as error:
            raise WireError(f"the manifest of a snapshot is damaged: {error}") from error
        return manifest

    def text(self) -> bytes:
        return json.dumps([self.pieces, self.tied], separators=(",", ":")).encode()

    def digest(self) -> bytes:
        return blake2b(self.text(), digest_size=8).digest()

    def segments(self) -> list[list[WeightBox]]:
        """The pieces that are encoded together: of one dtype each."""
        closed, growing, numels = [], defaultdict[str, list[WeightBox]](list), Counter[str]()
        for piece in self.pieces:
            growing[piece.dtype].append(piece)
            numels[piece.dtype] += prod(piece.box)
            if numels[piece.dtype] >= _SEGMENT_NUMEL:
                closed.append(growing.pop(piece.dtype))
                numels[piece.dtype] = 0
        return [*closed, *growing.values()]

    def names(self) -> dict[str, list[str]]:
        """The names of the tensors that each piece is for: its own, and those tied to it."""
        found = {piece.name: [piece.name] for piece in self.pieces}
        for name, sent in self.tied:
            found[sent].append(name)
        return found


class WeightMessage(NamedTuple):
    """One message, its checksum verified."""

    kind: int
    part: int
    parts: int
    publisher: int
    base: int
    version: int
    digest: bytes
    body: memoryview


class WeightPublisher:
    """Publishes the weights of a model again and again: first a snapshot, then what changed, without loss.

    The model is plain, DDP, FSDP2 or tensor parallel, or a mapping of names to tensors. Its parameters and persistent
    buffers are published, or those of `names`; floating-point ones as `dtype` if you pass one. One rank publishes a DDP
    model. Every rank of a sharded model publishes its own shards, and a worker needs the parts of all ranks. The
    publisher keeps a copy of what it published last, on the model's device.
    """

    def __init__(
        self,
        model: Model,
        *,
        dtype: torch.dtype | None = None,
        names: Iterable[str] | None = None,
        history: int = 8,  # updates that are kept for `since`
    ) -> None:
        if dtype is not None and dtype not in EXACT_DTYPES:
            raise CollectiveError(f"weights are published as {', '.join(map(str, EXACT_DTYPES))}, got dtype={dtype}")
        if history < 0:
            raise CollectiveError(f"history= is how many updates are kept, 0 or more, got {history}")
        self.version = 0  # of what was published last; 0 before that
        self._model = model
        self._dtype = dtype
        self._names = None if names is None else set(names)
        self._history: deque[tuple[int, bytes]] = deque(maxlen=history)
        self._id = secrets.randbits(63)
        self._manifest = Manifest((), ())
        self._base: list[Tensor] = []
        self._part = _Part()

    def publish(self, *, to: str | os.PathLike[str] | None = None, group: dist.ProcessGroup | None = None) -> bytes:
        """Return the next version as bytes; also write it to the file `to`, in one move, and send it to `group`.

        Of a sharded model each part is a file, `to` with the part's number as a suffix. Ranks of the group that do not
        publish call `WeightSubscriber.receive`.
        """
        found, tied, self._part = _published(_state(self._model, self._names), self._dtype)
        manifest = Manifest(tuple(found), tied)
        new = []
        for pieces in manifest.segments():
            flat = [found[piece].reshape(-1).to(DTYPES[piece.dtype]) for piece in pieces]
            new.append(torch.cat(flat) if len(flat) > 1 else flat[0].clone())
        is_new = not self.version or manifest != self._manifest
        body = _snapshot_body(manifest, new) if is_new else b"".join(map(_difference, new, self._base))
        message = self._message(_SNAPSHOT if is_new else _UPDATE, self.version + 1, manifest, body)
        self._manifest, self._base = manifest, new
        self.version += 1
        if is_new:
            self._history.clear()
        else:
            self._history.append((self.version, message))
        if to is not None and self._part.is_sent:
            path = to if self._part.parts == 1 else f"{os.fspath(to)}.{self._part.number}"
            with checkpoint.replacing(Path(path)) as file:
                file.write(message)
        if group is not None:
            _exchange(message if self._part.is_sent else b"", group)
        return message

    def snapshot(self) -> bytes:
        """All weights of the last version, for a worker that is new or missed too much."""
        if not self.version:
            raise CollectiveError("nothing was published yet: call publish() first")
        body = _snapshot_body(self._manifest, self._base)
        return self._message(_SNAPSHOT, self.version, self._manifest, body)

    def since(self, version: int) -> bytes:
        """What a worker with this version lacks: later updates, or a snapshot if it is shorter or they are gone."""
        missing = [message for number, message in self._history if number > version]
        is_known = 0 < version <= self.version and len(missing) == self.version - version
        if is_known and sum(map(len, missing)) <= sum(piece.nbytes for piece in self._manifest.pieces):
            return b"".join(missing)
        return self.snapshot()

    def _message(self, kind: int, version: int, manifest: Manifest, body: bytes) -> bytes:
        part, base = self._part, version - (kind == _UPDATE)
        fields = part.number, part.parts, self._id, base, version, manifest.digest(), len(body)
        header = _HEADER.pack(_MAGIC, kind, *fields)
        return b"".join((header, body, struct.pack("<I", zlib.crc32(body, zlib.crc32(header)))))


class _Copy(NamedTuple):
    """What a subscriber keeps of one part: the published bits of the segments it needs."""

    publisher: int
    manifest: Manifest
    segments: list[Tensor | None]


class WeightSubscriber:
    """Keeps the weights of a model at the versions that a `WeightPublisher` sends, bit for bit.

    The model, or mapping of names to tensors, may have fewer tensors than are published; `names`, if given, are the
    only ones that are updated. It may have other floating-point dtypes, to which weights are rounded. The subscriber
    keeps the published bits on `device`, by default that of each tensor. Sharded models and quantized tensors are
    refused by name.
    """

    def __init__(
        self, model: Model, *, names: Iterable[str] | None = None, device: torch.device | str | None = None
    ) -> None:
        self.version = 0  # that was applied last; 0 before that
        self._model = model
        self._targets = _targets(model, None if names is None else set(names))
        self._device = None if device is None else torch.device(device)
        self._copies: dict[int, _Copy] = {}

    def apply(self, update: Update) -> int:
        """Apply what `publish`, `since` or `snapshot` returned, or the file that was written; returns the version.

        Pass all parts of a sharded model in one call, as a list. An update that is damaged, or does not follow the
        subscriber's version, raises WireError and leaves the model as it was.
        """
        self._targets = _targets(self._model, set(self._targets))  # it may have been moved to a GPU
        messages = sorted(_messages(update), key=lambda message: (message.version, message.kind, message.part))
        version, copies = self.version, self._copies
        for number in dict.fromkeys(message.version for message in messages):
            copies = self._next([m for m in messages if m.version == number], version, copies)
            version = number
        if version != self.version or copies is not self._copies:
            self._write(copies)
            self.version, self._copies = version, copies
        return self.version

    def receive(self, group: dist.ProcessGroup) -> int:
        """Apply what publishers send with `publish(group=group)`; returns the version."""
        return self.apply(_exchange(b"", group))

    def _next(self, messages: list[WeightMessage], version: int, copies: dict[int, _Copy]) -> dict[int, _Copy]:
        """New copies with one version's messages applied; `copies` are not changed."""
        found = {message.part: message for message in messages}
        first = messages[0]
        if set(found) != set(range(first.parts)) or any(m.parts != first.parts for m in messages):
            have = ", ".join(map(str, sorted(found)))
            raise WireError(f"version {first.version} has {first.parts} parts, got {have}: pass the parts of all ranks")
        if any((m.kind, m.base) != (first.kind, first.base) for m in messages):
            raise WireError(f"parts of version {first.version} have different bases: pass the snapshots of all ranks")
        is_same = all(p in copies and copies[p].publisher == m.publisher for p, m in found.items())
        if first.kind == _SNAPSHOT:
            if is_same and first.version < version:
                raise WireError(f"this snapshot is version {first.version}, the subscriber has {version}: it is old")
            return {part: self._snapshot(message) for part, message in found.items()}
        if not is_same:
            raise WireError("the update is of another publisher, or a restarted one: apply publisher.snapshot() first")
        if first.base != version:
            raise WireError(
                f"the update leads from version {first.base} to {first.version}, the subscriber has {version}: apply "
                f"publisher.since({version}), or publisher.snapshot()"
            )
        return {part: self._updated(message, copies[part]) for part, message in found.items()}

    def _snapshot(self, message: WeightMessage) -> _Copy:
        size = int.from_bytes(message.body[:4], "little")
        manifest = Manifest.parse(bytes(message.body[4 : 4 + size]))
        at = 4 + size
        if len(message.body) != at + sum(piece.nbytes for piece in manifest.pieces):
            raise WireError("the numbers of a snapshot do not fit its manifest: it is damaged")
        segments: list[Tensor | None] = []
        names = manifest.names()
        for pieces in manifest.segments():
            end = at + sum(piece.nbytes for piece in pieces)
            wanted = [name for piece in pieces for name in names[piece.name] if name in self._targets]
            device = (self._device or self._targets[wanted[0]].device) if wanted else None
            bits = torch.frombuffer(bytearray(message.body[at:end]) or bytearray(8), dtype=torch.uint8)[: end - at]
            segments.append(None if device is None else bits.view(DTYPES[pieces[0].dtype]).to(device))
            at = end
        return _Copy(message.publisher, manifest, segments)

    def _updated(self, message: WeightMessage, copy: _Copy) -> _Copy:
        if message.digest != copy.manifest.digest():
            raise WireError("the update is of other names, shapes or dtypes than the snapshot: apply a new snapshot")
        at, segments = 0, []
        for old in copy.segments:
            if len(message.body) < at + _SEGMENT.size:
                raise WireError("an update ends before its last segment: it is damaged")
            size, total = _SEGMENT.unpack_from(message.body, at)
            body = message.body[at + _SEGMENT.size : at + _SEGMENT.size + size]
            at += _SEGMENT.size + size
            new = old if old is None or not size else _decoded(body, old)
            if new is not None and _sum(new) != total:
                raise WireError("the weights do not have the sum of the published ones: the update is damaged")
            segments.append(new)
        if at != len(message.body):
            raise WireError("an update does not end with its last segment: it is damaged")
        return copy._replace(segments=segments)

    def _write(self, copies: dict[int, _Copy]) -> None:
        """Write the copies to the model; before that raise WireError unless they have all of it, in its shapes."""
        numels, places = Counter[str](), []
        for copy in copies.values():
            names = copy.manifest.names()
            for pieces, values in zip(copy.manifest.segments(), copy.segments, strict=True):
                parts = () if values is None else values.split([prod(piece.box) for piece in pieces])
                for piece, part in zip(pieces, parts, strict=False):
                    spans = tuple(slice(a, a + n) for a, n in zip(piece.start, piece.box, strict=True))
                    for name in self._targets.keys() & names[piece.name]:
                        tensor = self._targets[name]
                        if piece.shape != tensor.shape:
                            have = tuple(tensor.shape)
                            raise WireError(f"{name} is published with shape {piece.shape}, the model has {have}")
                        are_floats = part.is_floating_point() and tensor.is_floating_point()
                        if part.dtype != tensor.dtype and not are_floats:
                            raise WireError(f"{name} is published as {part.dtype}, the model has {tensor.dtype}")
                        numels[name] += part.numel()
                        places.append((tensor, spans, part.view(piece.box)))
        missing = sorted(name for name, tensor in self._targets.items() if numels.get(name) != tensor.numel())
        if missing:
            raise WireError(f"{', '.join(missing)} of the model are not published: choose others with names=")
        for tensor, spans, part in places:
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                tensor[spans].copy_(part)


# --- what is published ------------------------------------------------------------------------------------------------


class _Part(NamedTuple):
    number: int = 0
    parts: int = 1
    is_sent: bool = True  # False where another rank sends the same


def _state(model: Model, names: set[str] | None) -> dict[str, Tensor]:
    """Parameters and persistent buffers, or those of `names`, by their names without wrappers."""
    inner: Any = model
    while isinstance(inner, DistributedDataParallel) or hasattr(inner, "_orig_mod"):
        inner = inner.module if isinstance(inner, DistributedDataParallel) else inner._orig_mod
    if not isinstance(inner, nn.Module | Mapping):
        raise CollectiveError(f"expected a model, or a mapping of names to tensors, got {type(inner).__name__}")
    if isinstance(inner, nn.Module) and any(hasattr(module, "_fsdp_wrapped_module") for module in inner.modules()):
        raise CollectiveError(f"expected a plain, DDP or FSDP2 model, got {describe(inner)}")
    found = inner.state_dict() if isinstance(inner, nn.Module) else inner
    state = {plain_name(name): value for name, value in found.items() if isinstance(value, Tensor)}
    if missing := sorted((names or set()) - set(state)):
        raise CollectiveError(f"the model has no {', '.join(missing)}: check names=, or subscribe anew")
    chosen = {name: value for name, value in state.items() if names is None or name in names}
    if meta := [name for name, value in chosen.items() if value.is_meta]:
        raise CollectiveError(f"{meta[0]} is on the meta device, without numbers: materialize the model first")
    return chosen


def _targets(model: Model, names: set[str] | None) -> dict[str, Tensor]:
    """The tensors that a worker's updates are written to, as the model has them now."""
    found = _state(model, names)
    for name, tensor in found.items():
        if hasattr(tensor, "placements"):
            raise CollectiveError(f"{name} is sharded, and a worker needs whole tensors: subscribe before sharding")
        if (tensor.is_floating_point() and tensor.itemsize == 1) or tensor.is_quantized:
            raise CollectiveError(
                f"{name} is {tensor.dtype}, quantized with scales that a publisher does not know: leave it out "
                "with names=, subscribe a mapping with a bf16 tensor of that name, and quantize it after apply()"
            )
        if tensor.layout != torch.strided:
            raise CollectiveError(f"{name} is {tensor.layout}, which cannot be published: leave it out with names=")
        if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
            raise CollectiveError(f"{name} is expanded, and its elements share memory: clone it, or leave it out")
    return found


def _published(
    state: dict[str, Tensor], dtype: torch.dtype | None
) -> tuple[dict[WeightBox, Tensor], tuple[tuple[str, str], ...], _Part]:
    """What this rank publishes, the names of tied tensors, and its part; floating-point numbers travel as `dtype`."""
    shards = {name: _shard(name, value) for name, value in state.items()}
    parts = {part for part, *_ in shards.values() if part is not None}
    if len(parts) > 1:
        raise CollectiveError("the tensors of a sharded model must all be sharded over the same ranks to be published")
    own = parts.pop() if parts else _Part()
    found: dict[WeightBox, Tensor] = {}
    tied = []
    seen: dict[object, str] = {}
    for name, (part, local, start) in shards.items():
        if own.number and part is None:
            continue  # part 0 has what all ranks hold
        key = local.data_ptr(), local.shape, local.stride(), local.dtype
        if local.numel() and key in seen:
            tied.append((name, seen[key]))
            continue
        seen[key] = name
        sent = dtype if dtype is not None and local.is_floating_point() else local.dtype
        if sent not in _NAMES:
            raise CollectiveError(f"{name} is {sent}, which cannot be published; leave it out with names=")
        found[WeightBox(name, _NAMES[sent], tuple(state[name].shape), start, tuple(local.shape))] = local
    return found, tuple(tied), own


def _shard(name: str, value: Any) -> tuple[_Part | None, Tensor, tuple[int, ...]]:
    """This rank's part (None: every rank has the whole tensor), its elements, and where they start in the tensor."""
    placements = getattr(value, "placements", ())
    axes = [axis for axis, placement in enumerate(placements) if placement.is_shard()]
    others = [axis for axis, placement in enumerate(placements) if placement.is_replicate()]
    if len(axes) > 1 or len(axes) + len(others) < len(placements):
        raise CollectiveError(f"{name} has placements {placements}; tensors sharded once can be published")
    local = value.to_local() if placements else value
    if not axes:
        return None, local.detach(), (0,) * value.dim()
    (axis,) = axes
    at, parts, cut = value.device_mesh.get_coordinate(), value.device_mesh.size(axis), placements[axis].dim
    part = _Part(at[axis], parts, all(at[other] == 0 for other in others))
    first = min(-(-value.shape[cut] // parts) * part.number, value.shape[cut])
    return part, local.detach(), tuple(first if dim == cut else 0 for dim in range(value.dim()))


# --- bytes ------------------------------------------------------------------------------------------------------------


def _bits(x: Tensor) -> Tensor:
    return x.view(_BITS[x.itemsize])


def _sum(x: Tensor) -> int:
    return int(_bits(x).sum(dtype=torch.int64))


def _bytes(x: Tensor) -> bytes:
    return x.contiguous().view(torch.uint8).cpu().numpy().tobytes()


def _difference(new: Tensor, base: Tensor) -> bytes:
    """A segment of an update: empty if nothing changed, the numbers themselves if their dtype has no code."""
    body = b""
    if not torch.equal(_bits(new), _bits(base)):
        body = _bytes(exact.encode(new, base) if new.dtype in EXACT_DTYPES else new)
    return _SEGMENT.pack(len(body), _sum(new)) + body


def _decoded(body: memoryview, old: Tensor) -> Tensor:
    wire = torch.frombuffer(bytearray(body), dtype=torch.uint8).to(old.device)
    if old.dtype in EXACT_DTYPES:
        return exact.decode(wire, old)
    if wire.numel() != old.nbytes:
        raise WireError(f"a segment of {old.nbytes} plain bytes came as {wire.numel()}: the update is damaged")
    return wire.view(old.dtype)


def _snapshot_body(manifest: Manifest, segments: Sequence[Tensor]) -> bytes:
    text = manifest.text()
    return b"".join((struct.pack("<I", len(text)), text, *map(_bytes, segments)))


def _messages(update: Any) -> list[WeightMessage]:
    """The messages of an update, their checksums verified."""
    if isinstance(update, str | os.PathLike):
        update = Path(update).read_bytes()
    if isinstance(update, Tensor) or not isinstance(update, Iterable):  # tensors iterate, too
        raise CollectiveError(f"expected an update as bytes, a path, or a list of these, got {type(update).__name__}")
    if not isinstance(update, bytes | bytearray | memoryview):
        return [message for part in update for message in _messages(part)]
    view, found = memoryview(update).cast("B"), []
    while len(view):
        if len(view) < _HEADER.size + 4 or bytes(view[:4]) != _MAGIC:
            raise WireError("these bytes are no update of a WeightPublisher, or were cut short")
        *fields, length = _HEADER.unpack_from(view)
        end = _HEADER.size + length
        if len(view) < end + 4 or zlib.crc32(view[:end]) != int.from_bytes(view[end : end + 4], "little"):
            raise WireError("an update was cut short or damaged: its checksum is wrong; ask the publisher for it again")
        message = WeightMessage._make([*fields[1:], view[_HEADER.size : end]])
        if message.kind > _UPDATE or message.part >= message.parts:
            raise WireError("an update is of another version of thinwire: use one version everywhere")
        found.append(message)
        view = view[end + 4 :]
    return found


def _exchange(message: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """The messages that ranks of a group send; b"" is none."""
    device = checkpoint.device_of(group)
    length = torch.tensor([len(message)], device=device)
    lengths = [torch.empty_like(length) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, length, group=group)
    found = []
    for rank, size in enumerate(int(one) for one in lengths):
        if size:
            data = torch.empty(size, dtype=torch.uint8, device=device)
            if rank == dist.get_rank(group):
                data.copy_(torch.frombuffer(bytearray(message), dtype=torch.uint8))
            dist.broadcast(data, group=group, group_src=rank)
            found.append(_bytes(data))
    return found
