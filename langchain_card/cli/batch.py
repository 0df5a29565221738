"""`langchain-card batch`: a file of requests, answered by a model here or by a server."""

from __future__ import annotations

import argparse
import asyncio
import sys
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_card.cli.fields import REPLICAS, add_served_fields, needing_server, served_model
from langchain_card.errors import InvalidInputError, check_range

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from fastapi import FastAPI
    from httpx import AsyncClient

    from langchain_card.serve.batch_file import BatchInput, BatchOutput
    from langchain_card.serve.batch_run import BatchRun

SERVER_CONCURRENCY = 16
"""Requests at a time by default, with `--server`."""
SPARE = 4
"""Requests beyond those that a model here decodes at once, so that it never waits for the next."""
_MAX_SHOWN = 10
"""Bad lines that are shown."""
_LONGEST_ANSWER = 86_400.0
"""Seconds that an answer of a model here may take, and wait: nobody waits for it alone."""


def register(subparsers: Any) -> None:
    """Add `batch` and its options."""
    here = argparse.ArgumentParser(add_help=False)
    add_served_fields(here)
    here.add_argument("--replicas", type=int, default=1, metavar="N", help=f"{REPLICAS} (%(default)s)")
    words = "answer a file of requests in OpenAI's batch format; the same command goes on where it stopped"
    parser = subparsers.add_parser("batch", parents=[here], help=words)
    parser.add_argument("input", type=Path, metavar="IN", help="requests, a JSON object a line")
    parser.add_argument("output", type=Path, metavar="OUT", help="answers, a line each; those that it holds stay")
    parser.add_argument("--server", metavar="URL", help="server that answers, in place of a model here")
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="its first line is a key of the server")
    at_once = f"requests at a time ({SPARE} more than are decoded at once; with --server {SERVER_CONCURRENCY})"
    parser.add_argument("--concurrency", type=int, metavar="N", help=at_once)
    parser.set_defaults(run=run, here=vars(here.parse_args([])))


def run(args: argparse.Namespace) -> int:
    """Answer the requests that have no answer yet.

    Returns:
        0; 1 if some failed for now; 2 if lines are refused; 130 if interrupted.
    """
    from langchain_card.serve.batch_file import BatchInput, BatchOutput

    with needing_server("batch"):
        from langchain_card.serve.batch_run import client_of_app, client_of_server

    if args.concurrency is not None:
        check_range("--concurrency", args.concurrency, 1, 1024)
    server = client_of_server(args.server, _key(args)) if args.server else None
    requests = BatchInput(args.input)
    bad = [*islice(requests.check(), _MAX_SHOWN + 1)]
    app = None if bad or server else _application(args)
    if bad := bad or (_unknown_models(requests, app) if app else []):
        return _refuse(bad)
    with BatchOutput(args.output, requests) as output:
        batch = _Batch(requests, output, str(args.output), args.server or "the model")
        if batch.is_done:
            return batch.end(None)
        try:
            if server is not None:
                return batch.answer(args.concurrency or SERVER_CONCURRENCY, server)
            assert app is not None
            with app.state.service.model.load() as model:  # not by the application: here ctrl-c works
                seats = model.engine.config.limits.num_seqs * args.replicas
                return batch.answer(args.concurrency or seats + SPARE, client_of_app(app))
        except KeyboardInterrupt:
            return batch.interrupted()


class _Batch:
    """A file's requests and answers, and what is said about them.

    Args:
        requests: the input, checked.
        output: the answers.
        name: the output's name.
        answering: what answers.
    """

    def __init__(self, requests: BatchInput, output: BatchOutput, name: str, answering: str) -> None:
        self._requests, self._output, self._name, self._answering = requests, output, name, answering
        self._total, self._earlier = len(requests.line_of), len(output.answered)

    @property
    def is_done(self) -> bool:
        """Whether every request has its answer."""
        return len(self._output.answered) == self._total

    def answer(self, concurrency: int, client: AbstractAsyncContextManager[AsyncClient]) -> int:
        """Answer the rest, `concurrency` requests at a time, and return the exit code."""
        from langchain_card.chat.progress import ConsoleProgress
        from langchain_card.serve.batch_run import BatchRun

        with ConsoleProgress() as progress:

            def report(batch: BatchRun) -> None:
                progress.update("answers", len(self._output.answered), self._total, "{:,}".format, self._more(batch))

            async def send() -> BatchRun:
                async with client as opened:
                    batch = BatchRun(opened, self._output, concurrency, report)
                    await batch.run(self._requests.requests())
                return batch

            batch = asyncio.run(send())
        return self.end(batch)

    def _more(self, batch: BatchRun) -> str:
        earlier = f", {self._earlier:,} were there" if self._earlier else ""
        failed = f", {batch.num_failures:,} failed" if batch.num_failures else ""
        return f"{earlier}{failed}, {batch.tokens_per_second:.1f} tokens/s"

    def end(self, batch: BatchRun | None) -> int:
        """Print what came of the run, None where nothing was left to do, and return the exit code."""
        answered, refused = len(self._output.answered), self._output.refused
        new = f"{batch.num_answers:,} new at {batch.tokens_per_second:.1f} tokens/s" if batch else "none new"
        earlier = f", {self._earlier:,} were there" if self._earlier else ""
        wrong = f"; {refused:,} refused: see response.body.error" if refused else ""
        print(f"{answered:,} of {self._total:,} answers are in {self._name} ({new}{earlier}{wrong})")
        if batch is None or not batch.num_failures:
            return 0
        unsent = self._total - answered - batch.num_failures
        failed = f"{batch.num_failures:,} failed, the last with {batch.last_failure!r}"
        if batch.stopped:
            failed = f"{self._answering} does not answer: {failed}, {unsent:,} were not sent"
        print(f"langchain-card: {failed}; the same command tries again", file=sys.stderr)
        return 1

    def interrupted(self) -> int:
        """Print how far the run came, and return the exit code."""
        answers = f"{len(self._output.answered):,} of {self._total:,} answers are in {self._name}"
        print(f"langchain-card: interrupted; {answers}, and the same command goes on", file=sys.stderr)
        return 130


def _key(args: argparse.Namespace) -> str | None:
    """Return the key of the server; raise `InvalidInputError` for an option that does not go with `--server`."""
    for name, default in args.here.items():
        if (value := getattr(args, name)) != default:
            option, limit = f"--{name.replace('_', '-')}", "is an option of a model here, not of a server"
            raise InvalidInputError(option, value, limit, "leave it out, or --server")
    from langchain_card.serve.settings import read_keys

    return read_keys(args.api_key_file)[0] if args.api_key_file else None


def _application(args: argparse.Namespace) -> FastAPI:
    """Return the server's application over the model here; nothing is loaded."""
    with needing_server("batch"):
        from langchain_card.serve import Settings, create_app
        from langchain_card.serve.batch_file import MAX_LINE_BYTES

    if args.api_key_file is not None:
        raise InvalidInputError("--api-key-file", str(args.api_key_file), "goes with --server only", "leave it out")
    model = served_model(args, args.replicas)
    settings = Settings(
        model_names=tuple(args.served_model_name) if args.served_model_name else None,
        max_body_bytes=MAX_LINE_BYTES,
        max_wait_seconds=_LONGEST_ANSWER,
        deadline_seconds=_LONGEST_ANSWER,
    )
    return create_app(model, settings)


def _unknown_models(requests: BatchInput, app: FastAPI) -> list[InvalidInputError]:
    """Return an error for the first line of each model that is not here."""
    names = app.state.service.all_names
    limit = f"is not served here; there is {', '.join(names)}"
    return [
        requests.error(number, "body.model", name, limit, f"--served-model-name {name} is a name for the model here")
        for name, number in requests.models.items()
        if name not in names
    ]


def _refuse(bad: list[InvalidInputError]) -> int:
    for error in bad[:_MAX_SHOWN]:
        print(f"langchain-card: {error}", file=sys.stderr)
    if len(bad) > _MAX_SHOWN:
        print("langchain-card: more lines are bad; nothing was sent", file=sys.stderr)
    return 2
