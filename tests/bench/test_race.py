"""The race: resumed where it stopped, each peer beside its own plain decoding, losses kept, pages from one file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import race as script
from benchmarks import race_page as page
from benchmarks.pages import marks
from langchain_card.bench import machine
from langchain_card.bench.compare import Comparison, Row, conditions
from langchain_card.bench.machine import bytes_a_pass
from langchain_card.bench.method import Run
from langchain_card.bench.prompts import chat_ids, find, named_sets
from langchain_card.bench.race import (
    Race,
    bandwidth_share,
    details,
    fastest,
    load_race,
    losses,
    resumed,
    run_race,
    summary,
)
from langchain_card.errors import EngineError, InvalidInputError
from langchain_card.models.gguf import open_gguf
from langchain_card.models.store import ModelStore
from langchain_card.models.tokenizer import load_tokenizer
from langchain_card.runtime.step_timer import memory_bandwidth
from tests.support import tiny

pytestmark = pytest.mark.usefixtures("one_thread")
BEGIN, END = marks("race")
ABOUT: dict[str, Any] = {
    "command": "python benchmarks/race.py code chat --json race.json",
    "machine": {"processor": "a CPU", "cores": 2, "memory": "24 GiB", "torch": "2.13"},
    "packages": {"llama-server": "12 (abc)"},
    "code": "a hash of the code",
    "engine": {"model": "m"},
    "asked": {"max_tokens": 4, "count": 2, "skip": 0},
    "files": ["code", "chat"],
    "texts": "a hash",
    "options": {"llama-server": {"flash-attn": "on"}},
    "bandwidth": 40e9,
    "bytes_a_pass": 1e9,
}
SPEEDS = {"plain": 20.0, "card": 40.0, "llama-server": 25.0, "llama-server-draft": 50.0, "llama-server-ngram": 30.0}
PROMPTS = {"code": [[1], [2]], "chat": [[3], [4]]}


class Timed:
    """A method with a given speed. It fails, or is interrupted, at the call with a given number."""

    weights = "none"

    def __init__(self, name: str, stops: int = -1, error: BaseException | None = None) -> None:
        self.name, self.prompts = name, list[int]()
        self._stops, self._error = stops, error

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int, repeat: int) -> Run:
        if len(self.prompts) == self._stops and self._error is not None:
            raise self._error
        self.prompts.append(prompts[0][0])
        answer = (1, 2, 3, 4) if "ngram" not in self.name else (1, 2, 3, 5)
        return Run((answer,), 0.1, 3 / SPEEDS.get(self.name, 10.0), 3, peak=1 << 30, figures={"acceptance": 0.5})


def raced(methods: Sequence[Timed]) -> Race:
    race = Race(dict(ABOUT), {method.name: "none" for method in methods})
    run_race(race, methods, PROMPTS, 4, lambda *_: None)
    return race


@pytest.fixture
def race() -> Race:
    return raced([Timed(name) for name in SPEEDS])


def test_a_race_that_was_cut_short_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "race.json"
    race = resumed(file, ABOUT)
    race.weights.update(dict.fromkeys(SPEEDS, "none"))
    first = [Timed(name, 2 if name == "card" else -1, KeyboardInterrupt()) for name in SPEEDS]
    with pytest.raises(KeyboardInterrupt):
        run_race(race, first, PROMPTS, 4, lambda *_: race.save(file))
    later, second = resumed(file, ABOUT), [Timed(name) for name in SPEEDS]
    assert sum(len(found.rows) for found in later.sets.values()) == sum(len(each.prompts) for each in first)
    run_race(later, second, PROMPTS, 4, lambda *_: later.save(file))
    for before, after in zip(first, second, strict=True):
        assert before.prompts[:2] == [1, 2] and after.prompts == [3, 4], "a turn that was cut short is run again"
    assert all(len(found.rows) == 2 * len(SPEEDS) for found in later.sets.values())
    assert [*summary(load_race(file))] == [*summary(raced([Timed(name) for name in SPEEDS]))]


def test_a_race_under_other_conditions_is_refused(tmp_path: Path, race: Race) -> None:
    race.save(tmp_path / "race.json")
    with pytest.raises(InvalidInputError, match="another value of 'asked'"):
        resumed(tmp_path / "race.json", ABOUT | {"asked": {"max_tokens": 5}})
    with pytest.raises(InvalidInputError, match="another value of 'code'"):
        resumed(tmp_path / "race.json", ABOUT | {"code": "another"})
    assert resumed(tmp_path / "race.json", ABOUT | {"command": "another"}).weights == race.weights


def test_a_method_that_fails_is_left_out_and_tried_again(tmp_path: Path) -> None:
    weak = Timed("llama-server", 1, EngineError("llama-server", "exit code 1", "its process ended"))
    race = raced([Timed("plain"), Timed("card"), weak])
    assert weak.prompts == [1] and "process ended" in race.failed["llama-server"]
    assert "*llama-server* was left out" in page.page(race)
    race.save(tmp_path / "race.json")
    assert not resumed(tmp_path / "race.json", ABOUT).failed


def test_a_line_of_the_summary(race: Race) -> None:
    header, code, chat = summary(race)
    line = dict(zip(header, code, strict=True))
    assert line["text"] == "code" and chat[0] == "chat" and line["plain, tokens/s"] == "20.0"
    assert line["card"] == "40.0" and line["times plain (95 %)"] == "2.00" and line["llama-server"] == "25.0"
    assert line["llama-server, best"] == "50.0 (draft)" and line["card / best peer"] == "0.80"
    assert line["plain / llama-server"] == "0.80" and line["equal to plain"] == "2 of 2"


def test_a_line_of_the_details(race: Race) -> None:
    header, *lines = details(race)
    found = {line[1]: dict(zip(header, line, strict=True)) for line in lines if line[0] == "code"}
    draft, ngram = found["llama-server-draft"], found["llama-server-ngram"]
    assert draft["times own plain (95 %)"] == "2.00" and draft["card / it (95 %)"] == "0.80"
    assert (
        draft["equal to own plain"] == "2 of 2" and ngram["equal to own plain"] == "0 of 2" and draft["bandwidth"] == ""
    )
    assert found["plain"]["bandwidth"] == "50%" and found["llama-server"]["bandwidth"] == "62%"
    assert found["llama-server"]["times own plain (95 %)"] == "" and found["plain"]["equal to plain"] == ""
    assert draft["acceptance"] == "0.50" and draft["peak memory"] == "1.0 GiB" and draft["first token"] == "0.10 s"
    assert bandwidth_share(race, race.of("code"), "card") is None


def test_losses_are_kept(race: Race) -> None:
    assert losses(race)[:2] == [
        "code: plain was 0.80 times llama-server.",
        "code: card was 0.80 times llama-server-draft.",
    ]
    assert len(losses(race)) == 4 and all(line in page.page(race) for line in losses(race))
    slow = Timed("openvino")
    assert "No peer took part" in page.page(raced([Timed("plain"), Timed("card")]))
    assert "None: no peer was faster" in page.page(raced([Timed("plain"), Timed("card"), slow]))


def test_a_peer_that_missed_a_prompt_is_not_the_best(race: Race) -> None:
    code = race.of("code")
    assert fastest(code, ["llama-server", "llama-server-draft"]) == "llama-server-draft"
    code.rows.remove(code.of("llama-server-draft")[1])
    assert fastest(code, ["llama-server", "llama-server-draft"]) == "llama-server"


def test_the_pages_are_filled_between_their_marks(race: Race, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs").mkdir()
    files = [tmp_path / "README.md", tmp_path / "docs" / "performance.md"]
    for file in files:
        file.write_text(f"before\n{BEGIN}\nEARLIER\n{END}\nafter\n")
    monkeypatch.setattr(page, "ROOT", tmp_path)
    monkeypatch.setattr(page, "DOCS", tmp_path / "docs")
    race.save(tmp_path / "race.json")
    for _ in range(2):
        page.main(tmp_path / "race.json")
    for text in (file.read_text() for file in files):
        assert text.startswith("before\n") and text.endswith(f"{END}\nafter\n") and "EARLIER" not in text
        assert text.count("| code |") >= 1 and text.count(BEGIN) == 1
    assert "`flash-attn on`" in text and "40.0 GB/s" in text and ABOUT["command"] in text


@pytest.mark.slow
def test_the_script_races(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    target = tiny.make_target("llama", tmp_path / "target")
    draft = tiny.make_draft(target, tmp_path / "draft", noise=0.02)
    monkeypatch.setattr(script, "memory_bandwidth", lambda: 4e10)
    asked_for, run = list[Any](), script.run_race
    monkeypatch.setattr(script, "run_race", lambda *given: (asked_for.append(given[2]), run(*given)))
    file = tmp_path / "race.json"
    own = ["--model", target, "--draft-model", draft, "--dtype", "float64", "--max-model-len", "256"]
    asked = ["--count", "2", "--skip", "1", "--max-tokens", "4", "--methods", "card", "--json", str(file), *own]
    script.main(["own", *asked])
    assert "| own  | card " in capsys.readouterr().out
    texts = [chat_ids(load_tokenizer(target), text) for text in find("own", 3)]
    assert asked_for == [{"own": texts[1:]}]
    race = load_race(file)
    assert {row.group for row in race.of("own").rows} == {0, 1} and len(race.of("own").rows) == 4
    assert race.about["bandwidth"] == 4e10 and race.about["bytes_a_pass"] is None
    written = json.loads(file.read_text())
    kept = written["rows"]["own"][:2]
    file.write_text(json.dumps(written | {"rows": {"own": written["rows"]["own"][:3]}}))
    monkeypatch.setattr(script, "memory_bandwidth", lambda: 3e10)
    script.main(["own", *asked])
    assert load_race(file).about["bandwidth"] == 4e10, "the highest of both"
    assert json.loads(file.read_text())["rows"]["own"][:2] == kept, "a whole turn is not run again"
    with pytest.raises(InvalidInputError, match="holds a complete race"):
        script.main(["own", *asked])


def test_sets_are_named(tmp_path: Path) -> None:
    rows = "\n".join(json.dumps({"prompt": f"text {number}"}) for number in range(5))
    (tmp_path / "mbpp.jsonl").write_text(rows)
    file = str(tmp_path / "mbpp.jsonl")
    found = named_sets([file, f"Other={file}", "own"], count=2, skip=1)
    assert [*found] == ["mbpp", "Other", "own"] and found["mbpp"] == found["Other"] == ["text 1", "text 2"]
    with pytest.raises(InvalidInputError, match="a set mbpp already"):
        named_sets([file, file], 1)
    with pytest.raises(InvalidInputError, match="has 1 rows after the first 4, not 2"):
        named_sets([file], 2, skip=4)
    with pytest.raises(InvalidInputError, match="none of the sets"):
        named_sets(["absent.jsonl"], 2)


@pytest.mark.slow
def test_the_bytes_of_a_pass_leave_out_embeddings_that_are_no_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = ModelStore().pull("smollm2-135m")
    sizes = {tensor.name: int(tensor.n_bytes) for tensor in open_gguf(file).tensors}
    assert "output.weight" not in sizes and bytes_a_pass(file) == sum(sizes.values())

    class Tensor:
        def __init__(self, name: str, n_bytes: int) -> None:
            self.name, self.n_bytes = name, n_bytes

    reader = type(
        "Reader", (), {"tensors": [Tensor("token_embd.weight", 7), Tensor("output.weight", 5), Tensor("a", 2)]}
    )
    monkeypatch.setattr(machine, "open_gguf", lambda _: reader)
    assert bytes_a_pass(file) == 7


def test_memory_is_read_at_some_speed() -> None:
    assert 1e8 < memory_bandwidth(1 << 24, 2) < 1e13


def test_bench_says_what_a_peer_gains_over_its_own_plain_decoding(race: Race) -> None:
    said = conditions(race.of("code"))
    assert (
        "llama-server-draft beside its own plain decoding: 2.00 times llama-server, 2 of 2 answers are equal." in said
    )
    assert any("0 of 2 answers are equal" in line for line in said if line.startswith("llama-server-ngram"))
    alone = Comparison({"plain": "none"}, [Row("plain", 0, 0, Run(((1,),), 0.1, 1.0, 1))])
    assert not conditions(alone)
