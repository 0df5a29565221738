"""A batch's files: every bad line is found before anything is sent, and OUT holds each answer once, whatever cut it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from langchain_card.errors import InvalidInputError
from langchain_card.serve import batch_file
from langchain_card.serve.batch_file import BatchInput, BatchOutput

CHAT = "/v1/chat/completions"


def line(custom_id: Any = "a", **fields: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": CHAT, "body": {"model": "m"}} | fields)


def checked(path: Path, *lines: str) -> BatchInput:
    path.write_text("\n".join(lines) + "\n")
    requests = BatchInput(path)
    assert not [*requests.check()]
    return requests


@pytest.fixture
def requests(tmp_path: Path) -> BatchInput:
    return checked(tmp_path / "in", *(line(name, body={"model": "m", "text": name * 9}) for name in "abcd"))


def answer(path: Path, requests: BatchInput, statuses: dict[str, int]) -> bytes:
    """Add answers; a status of 0 is a failure. Returns the whole file."""
    with BatchOutput(path, requests) as output:
        for custom_id, status in statuses.items():
            if status:
                output.add_answer(custom_id, status, "id", {"text": "ä\n" + custom_id})
            else:
                output.add_failure(custom_id, "http_500", "failed")
    return path.read_bytes()


def answered(path: Path, requests: BatchInput) -> list[str]:
    with BatchOutput(path, requests) as output:
        return sorted(output.answered)


# IN.


def test_requests_are_read_as_they_are_written(tmp_path: Path) -> None:
    body = {"model": "m", "big": 10**30, "half": 0.5, "text": "é\u2028\n", "stream": False}
    text = [line("a", body=body), "", "  ", line("b", url="/v1/completions", more=1)]
    requests = checked(tmp_path / "in", *text)
    assert [request[:3] for request in requests.requests()] == [(1, "a", CHAT), (4, "b", "/v1/completions")]
    assert next(requests.requests()).body == body
    assert (requests.line_of, requests.models) == ({"a": 1, "b": 4}, {"m": 1})


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("{", "in, line 2 = '{': must be JSON in UTF-8; EOF"),
        ("[1]", "in, line 2 = '[1]': must be a JSON object"),
        ('{"custom_id": NaN}', "in, line 2 = '{\"custom_id\": NaN}': must be JSON in UTF-8; expected"),
        (line(None), "in, line 2: custom_id = None: must be a string"),
        (line(""), "in, line 2: custom_id = '': must be a string"),
        (line("b", method="GET"), "in, line 2: method = 'GET': must be POST"),
        (
            line("b", url="/v1/embeddings"),
            "in, line 2: url = '/v1/embeddings': must be one of /v1/chat/completions, /v",
        ),
        (line("b", url={}), "in, line 2: url = {}: must be one of"),
        (line("b", body="hello"), "in, line 2: body = 'hello': must be a JSON object"),
        (line("b", body={"stream": True}), "in, line 2: body.stream = True: answers come whole. Hint: leave it out"),
        (line("a"), "in, line 2: custom_id = 'a': is that of line 1, too"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, bad: str, said: str) -> None:
    path = tmp_path / "in"
    path.write_text(f"{line()}\n{bad}\n{line('c')}\n{{\n")
    first, second = BatchInput(path).check()
    assert said in str(first)
    assert "line 4" in str(second), "the rest is checked, too"


def test_files_that_hold_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "in"
    with pytest.raises(InvalidInputError, match=r"IN = .*cannot be read \(No such file"):
        next(BatchInput(path).check())
    path.write_text("\n \n")
    assert ["holds no request" in str(error) for error in BatchInput(path).check()] == [True]
    monkeypatch.setattr(batch_file, "MAX_LINE_BYTES", 1000)
    path.write_text(line("a" * 1000))
    with pytest.raises(InvalidInputError, match=r"line 1 = .*must have 1,000 bytes at most"):
        next(BatchInput(path).check())


# OUT.


def test_lines_have_the_form_of_openai(tmp_path: Path, requests: BatchInput) -> None:
    written = answer(tmp_path / "out", requests, {"b": 200, "a": 0})
    found, failed = map(json.loads, written.splitlines())
    assert found.pop("id").startswith("batch_req_") and found.pop("id", None) is None
    response = {"status_code": 200, "request_id": "id", "body": {"text": "ä\nb"}}
    assert found == {"custom_id": "b", "response": response, "error": None}
    assert failed.pop("id") and failed == {
        "custom_id": "a", "response": None, "error": {"code": "http_500", "message": "failed"},
    }  # fmt: skip


def test_what_is_final_stays_and_the_rest_is_dropped(tmp_path: Path, requests: BatchInput) -> None:
    out = tmp_path / "out"
    statuses = {"a": 200, "b": 0, "c": 400, "d": 429}
    before = answer(out, requests, statuses)
    with BatchOutput(out, requests) as output:
        assert (output.answered, output.refused) == ({"a", "c"}, 1)
        output.add_answer("b", 200, "id", {})
    kept = before.splitlines(keepends=True)
    assert out.read_bytes().startswith(kept[0] + kept[2]) and out.read_bytes().count(b"\n") == 3
    assert answered(out, requests) == ["a", "b", "c"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_a_torn_line_is_cut_off_wherever_it_is_torn(tmp_path: Path, requests: BatchInput) -> None:
    out = tmp_path / "out"
    first, last = answer(out, requests, {"a": 200, "b": 200}).splitlines(keepends=True)
    for end in (*range(1, 21), len(last) // 2, len(last) - 2, len(last) - 1):
        out.write_bytes(first + last[:end])
        assert answered(out, requests) == ["a"]
        assert out.read_bytes() == first
    out.write_bytes(last[:20])
    assert answered(out, requests) == [] and not out.read_bytes()


def test_an_answer_that_is_there_twice_stays_once(tmp_path: Path, requests: BatchInput) -> None:
    out = tmp_path / "out"
    whole = answer(out, requests, {"a": 200, "b": 200})
    out.write_bytes(whole + whole)
    assert answered(out, requests) == ["a", "b"] and out.read_bytes() == whole


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ("notes of mine", "line 1 is not a line of a batch's answers: notes of mine"),
        ('{"id":"batch_req_1"}\n', "line 1 is not a line of a batch's answers"),
        ('{"custom_id":"a","response":{"status_code":null}}\n', "line 1 is not a line of a batch's answers"),
        ('{"custom_id":"x","response":null}\n', "line 1 answers custom_id 'x', which .*in does not have"),
    ],
)
def test_another_file_is_refused_and_left_alone(tmp_path: Path, requests: BatchInput, held: str, said: str) -> None:
    out = tmp_path / "out"
    out.write_text(held)
    with pytest.raises(InvalidInputError, match=rf"OUT = .*out': {said}"):
        answered(out, requests)
    assert out.read_text() == held
    with pytest.raises(InvalidInputError, match="is the input, too"):
        answered(requests.path, requests)
    with pytest.raises(InvalidInputError, match=r"its folder does not exist.*mkdir -p"):
        answered(tmp_path / "none" / "out", requests)
    with pytest.raises(InvalidInputError, match=r"cannot be written \(Is a directory\)"):
        answered(tmp_path, requests)


def test_one_process_at_a_time(tmp_path: Path, requests: BatchInput) -> None:
    """A lock on a file that was replaced holds nobody off."""
    out = tmp_path / "out"
    answer(out, requests, {"a": 200, "b": 0})
    before = out.stat().st_ino
    with BatchOutput(out, requests):
        assert out.stat().st_ino != before, "it was replaced"
        with pytest.raises(InvalidInputError, match="another process writes it"):
            answered(out, requests)
    assert answered(out, requests) == ["a"]


def test_a_link_stays_a_link(tmp_path: Path, requests: BatchInput) -> None:
    out, link = tmp_path / "out", tmp_path / "link"
    answer(out, requests, {"a": 200, "b": 0})
    link.symlink_to(out)
    assert answered(link, requests) == ["a"]
    assert link.is_symlink() and out.read_bytes().count(b"\n") == 1
