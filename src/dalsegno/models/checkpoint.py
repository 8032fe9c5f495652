"""A model folder in Hugging Face form: config.json, generation_config.json, safetensors files.

Here the files are found, opened and checked to be whole; what a model expects in them is `models.weights`. Every
defect is a `CheckpointError` that names the file or tensor and what is supported. Nothing here changes a folder.
"""

import hashlib
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dalsegno.errors import CheckpointError

__all__ = [
    "Checkpoint",
    "TensorEntry",
    "config_fingerprint",
    "open_weights",
    "read_config",
    "read_end_token_ids",
    "read_generation_config",
    "resolve_model_path",
    "weights_fingerprint",
]

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
# "architectures" is not among them: it chooses the model.
_ORIGIN_FIELDS = ("_name_or_path", "dtype", "torch_dtype", "transformers_version")
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
_SUPPORTED_WEIGHTS = f"supported are {_WEIGHTS}, or shards listed in {_INDEX}"


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a checkpoint as its file describes it; `dtype` is the safetensors name, such as "BF16"."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The tensors of a model folder, by name."""

    directory: Path
    tensors: dict[str, TensorEntry]

    def files(self) -> dict[Path, list[str]]:
        """Return the tensor names of each file, both in order."""
        names: dict[Path, list[str]] = {}
        for name, entry in sorted(self.tensors.items()):
            names.setdefault(entry.file, []).append(name)
        return names

    def open(self, file: Path) -> Any:
        """Open one of the files: a context manager with `get_tensor(name)`, which gives a tensor on the CPU.

        Raises:
            CheckpointError: it cannot be read.
        """
        return _open_file(file)

    def read(self, name: str) -> Any:
        """Return one tensor, on the CPU, as it is stored."""
        with _open_file(self.tensors[name].file) as handle:
            return handle.get_tensor(name)


def resolve_model_path(model: str | os.PathLike[str]) -> Path:
    """Return the local folder of `model`: a folder, or a Hugging Face hub id such as "owner/name".

    A hub id is downloaded to the hub's own cache unless it is there already.

    Raises:
        CheckpointError: there is no such folder, or the hub could not deliver it.
    """
    if not isinstance(model, str | os.PathLike) or not os.fspath(model):
        raise CheckpointError(f"model must be a folder or a hub id, got {model!r}")
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(f"model must be a folder or a hub id, got the file {path}")
    if not _HUB_ID.fullmatch(os.fspath(model)):
        raise CheckpointError(f"there is no model folder {path}, and it is no hub id of the form owner/name")
    return _download(os.fspath(model))


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES))
    except Exception as error:  # The hub client's errors have no common base, and each of them means the same here.
        raise CheckpointError(
            f"there is no folder {hub_id!r}, and the hub did not deliver it: {type(error).__name__}: {error}"
        ) from error


def read_config(path: Path) -> dict[str, Any]:
    """Return config.json of a model folder.

    Raises:
        CheckpointError: it is missing, no JSON object, or asks for quantised weights.
    """
    config = _read_json(path / "config.json", "a model folder holds config.json, safetensors files and a tokenizer")
    quantization = config.get("quantization_config") or config.get("compression_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise CheckpointError(
            f"{path / 'config.json'} has a quantization_config (quant_method={method!r}); quantised weights are not"
            " supported: only float32, float16 and bfloat16 safetensors are"
        )
    return config


def read_generation_config(path: Path) -> dict[str, Any]:
    """Return generation_config.json of a model folder, or an empty dict where there is none."""
    file = path / "generation_config.json"
    return _read_json(file, "") if file.exists() else {}


def read_end_token_ids(path: Path) -> frozenset[int]:
    """Return the ids that end an answer: `eos_token_id` of generation_config.json, of config.json or its text_config.

    Raises:
        CheckpointError: it is neither an integer nor a list of integers.
    """
    given = read_generation_config(path).get("eos_token_id")
    if given is None:
        config = read_config(path)
        given = config.get("eos_token_id")
        if given is None and isinstance(text := config.get("text_config"), dict):
            given = text.get("eos_token_id")
    ids = [] if given is None else given if isinstance(given, list) else [given]
    if any(isinstance(item, bool) or not isinstance(item, int) or item < 0 for item in ids):
        raise CheckpointError(f"{path}: eos_token_id must be a token id or a list of them, got {given!r}")
    return frozenset(ids)


def open_weights(path: Path) -> Checkpoint:
    """Read the headers of a folder's safetensors files.

    Raises:
        CheckpointError: no safetensors file, a missing or corrupt one, or an index that its shards contradict.
    """
    if (path / _WEIGHTS).exists():
        return Checkpoint(path, _read_header(path / _WEIGHTS))
    if not (path / _INDEX).exists():
        others = sorted(file.name for file in path.glob("*") if file.suffix in (".bin", ".pt", ".pth", ".gguf"))
        found = f" (found {', '.join(others[:3])})" if others else ""
        raise CheckpointError(f"{path} has no weights that can be loaded{found}; {_SUPPORTED_WEIGHTS}")
    weight_map = _read_json(path / _INDEX, _SUPPORTED_WEIGHTS).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{path / _INDEX} has no weight_map of tensor names to file names")
    tensors: dict[str, TensorEntry] = {}
    for file_name in sorted(set(weight_map.values())):
        for name, entry in _read_header(_shard(path, file_name)).items():
            if weight_map.get(name) != file_name:
                raise CheckpointError(f"{path / file_name} holds tensor {name!r}, which {_INDEX} does not place there")
            tensors[name] = entry
    lacking = sorted(weight_map.keys() - tensors.keys())
    if lacking:
        raise CheckpointError(f"{path / weight_map[lacking[0]]} lacks tensor {lacking[0]!r}, which {_INDEX} promises")
    return Checkpoint(path, tensors)


def weights_fingerprint(path: Path) -> str:
    """Return a SHA-256 hex digest over names, dtypes, shapes and bytes of all tensors in name order.

    How tensors are spread over files, paths and times do not enter. Each tensor is hashed on its own (in threads),
    so no more than a few tensors are in memory at a time.

    Raises:
        CheckpointError: as `open_weights`.
    """
    checkpoint = open_weights(path)
    with ExitStack() as stack, ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        handles = {file: stack.enter_context(checkpoint.open(file)) for file in checkpoint.files()}
        entries = [checkpoint.tensors[name] for name in sorted(checkpoint.tensors)]
        digests = pool.map(lambda entry: _tensor_digest(handles[entry.file], entry.name), entries)
        total = hashlib.sha256(b"dalsegno weights 1")
        for entry, digest in zip(entries, digests, strict=True):
            label = json.dumps([entry.name, entry.dtype, list(entry.shape)]).encode()
            total.update(len(label).to_bytes(8, "little") + label + digest)
    return total.hexdigest()


def config_fingerprint(path: Path) -> str:
    """Return a SHA-256 hex digest of config.json, less what says where it came from and not what is computed.

    Raises:
        CheckpointError: as `read_config`.
    """
    config = {name: value for name, value in read_config(path).items() if name not in _ORIGIN_FIELDS}
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def _tensor_digest(handle: Any, name: str) -> bytes:
    import torch

    return hashlib.sha256(handle.get_tensor(name).reshape(-1).view(torch.uint8).numpy()).digest()


def _shard(path: Path, file_name: str) -> Path:
    # An index may name files of its own folder only.
    if Path(file_name).name != file_name or not (path / file_name).is_file():
        raise CheckpointError(f"{path / _INDEX} names the file {file_name!r}, which is not in the folder")
    return path / file_name


def _read_header(file: Path) -> dict[str, TensorEntry]:
    entries: dict[str, TensorEntry] = {}
    with _open_file(file) as handle:
        for name in handle.keys():  # noqa: SIM118 - a file handle, not a dict
            part = handle.get_slice(name)
            entries[name] = TensorEntry(name, tuple(part.get_shape()), part.get_dtype(), file)
    return entries


def _open_file(file: Path) -> Any:
    """Open a safetensors file as a context manager with `keys`, `get_slice` and `get_tensor` (torch, on the CPU)."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is not a readable safetensors file: {error}") from error


def _read_json(file: Path, expected: str) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing; {expected}") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} must hold a JSON object, got {type(content).__name__}")
    return content
