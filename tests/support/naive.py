"""The plain loop over transformers, which is shipped for the tests of plug-ins, and near-ties in its answers."""

from langchain_card.testing.naive import Forward, PlainAnswer, choose, generate, load, process, reading

__all__ = ["Forward", "PlainAnswer", "generate", "is_near_tie", "load", "process", "reading"]


def is_near_tie(answer: PlainAnswer, place: int, token_id: int, share: float) -> bool:
    """Return whether `token_id` were chosen at `place` if its logit and the chosen one's were closer by a `share`.

    The share is one of the range of the logits. This covers ties of two scores, and tokens at the border of top-k,
    top-p or min-p.
    """
    logits = answer.logits[place].double().clone()
    shift = share * (logits.max() - logits.min()) / 2
    logits[token_id] += shift
    logits[answer.token_ids[place]] -= shift
    return choose(logits, answer.prompt_ids, answer.token_ids[:place], answer.params) == token_id
