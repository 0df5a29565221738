"""`KindFinder`: what decides the text of an engine's answers, put together and measured."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from langchain_card import __version__, plugins
from langchain_card.config import EngineConfig
from langchain_card.errors import EngineError
from langchain_card.models.loader import ModelSpec, Pair
from langchain_card.models.store import ModelStore, file_state
from langchain_card.runtime.kind import DECODED, TEXT, WINDOW, Kind


class KindFinder:
    """The kind of an engine in this process, each part found once. Made when the models have been loaded.

    Args:
        config, pair: of the engine.
        adapters: the digests of the target's adapters, by name.
        measure: returns `Kind.machine`; called on the target's thread.
    """

    def __init__(
        self, config: EngineConfig, pair: Pair, adapters: Mapping[str, str], measure: Callable[[], str]
    ) -> None:
        self._config, self._pair, self._adapters, self._measure = config, pair, adapters, measure
        self._sources = [(spec, source, file_state(source)) for spec, source in _sources(config, pair)]
        self._lock = threading.Lock()
        self._answer = self._machine = ""

    def find(self, call: Callable[[Callable[[], str], int], str] | None = None) -> Kind:
        """Return the kind.

        Args:
            call: calls a function, which computes so many rows, on the target's thread; None to measure nothing.

        Raises:
            EngineError: a model's files have changed since they were loaded, or the engine has ended.
        """
        with self._lock:
            self._answer = self._answer or hashlib.sha256(repr(self._decisive()).encode()).hexdigest()
            if call is not None:
                self._machine = self._machine or call(self._measure, TEXT + DECODED + WINDOW)
            return Kind(self._answer, self._machine)

    def _decisive(self) -> tuple[object, ...]:
        """Return all that decides an answer's text apart from rounding. Under a lossy rule that is the draft, too."""
        config = self._config
        rule, steering = _plug_in("acceptance", config.acceptance), _plug_in("steering", config.steering)
        drafters = [*map(_drafter, config.modelless_drafters)]
        lossy = (drafters, config.stack, config.draft_context) if config.lossy else ()
        models = [_model(*loaded) for loaded in self._sources]
        adapters = sorted(self._adapters.items())
        return (__version__, models, self._pair.eos_ids, adapters, config.exact, rule, steering, lossy)


def hash_models(config: EngineConfig, pair: Pair) -> None:
    """Hash the files that are a part of the kind. The hashes are kept on disk for the process that loads them."""
    for _, source in _sources(config, pair):
        ModelStore().content_hash(source)


def hash_model(spec: ModelSpec) -> str:
    """Return the hash of a model's files (`ModelStore.content_hash`)."""
    store = ModelStore()
    return store.content_hash(store.source(spec.name, spec.folder))


def _sources(config: EngineConfig, pair: Pair) -> list[tuple[ModelSpec, Path]]:
    """Return the models that decide an answer's text, each with its GGUF file or folder."""
    drafts = (pair.draft, *pair.stack) if config.lossy and pair.draft is not None else ()
    return [(spec, ModelStore().source(spec.name, spec.folder)) for spec in (pair.target, *drafts)]


def _model(spec: ModelSpec, source: Path, state: str) -> tuple[object, ...]:
    """Return what a model's logits depend on; `state` is that of its files when it was loaded."""
    content = ModelStore().content_hash(source)
    if file_state(source) != state:
        limit = f"is not what was loaded: {source} has changed since then"
        raise EngineError("model", spec.name, limit, "make the engine anew")
    return content, spec.form, str(spec.dtype), spec.quantization, spec.integer_kv, spec.draft


def _drafter(spec: str) -> tuple[str, str]:
    """Return a drafter's spec, and the hash of what it was made of, if its class has a method `digest`."""
    plugin = plugins.find("drafters", spec)
    digest: Callable[..., str] = getattr(plugin.factory, "digest", lambda **_: "")
    return spec, digest(**plugin.options)


def _plug_in(kind: plugins.PlugInKind, spec: str | None) -> tuple[str, str] | None:
    return None if spec is None else (spec, plugins.package_of(kind, spec))
