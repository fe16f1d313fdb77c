"""Words that this project once had of its own where the field has one, and the field's word for each.

An engineer who knows FlashAttention-3 or CUTLASS searches for the field's words, so the sources and documents use them.
The logs under docs/kernels/log/ are history and may keep theirs.
"""

import re
from collections.abc import Iterator, Mapping

FIELD_WORDS = {
    r"copy engine": "TMA",
    r"multiprocessors?": "SM",
    r"resident blocks?": "persistent CTA",
    r"interlude": "overlapped callback",
    r"gives? back|given back": "consumer_release",
    r"visitors?": "contributor",
    r"go(es)? round": "loops in cyclic order",
    r"announce[ds]?": "signals, pre-signalled",
    r"adders?": "reducer warp",
    r"outlet": "epilogue",
    r"stretch(es)?": "stream-K range",
    r"tail of zeros": "zero-padded",
    r"in vain": "wasted",
    r"anew": "again",
    r"nobody": "no thread, nothing",
    r"alike|likewise": "the same",
    r"repeats? bitwise": "is bitwise reproducible",
    r"of before|as they were": "earlier",
    r"tak(?:e|es|ing) turns|in turns": "alternate, ping-pong scheduling",
    r"claim(?:s|ed)?": "fetches the next work tile",
    r"suspicious": "needs recomputation",
    r"rings?": "pipeline",
    r"of own \w+ time": "times as fast as our own call",
    r"nats a byte": "nats per byte",
}
_BREAK = "\0"  # stands for each character of a line break but the first, so that offsets stay those of the text


def _pattern(words: str) -> str:
    return words.replace(" ", f"[ {_BREAK}]+")


_BANNED = re.compile(
    "|".join(rf"(?P<w{i}>\b(?:{_pattern(words)})\b)" for i, words in enumerate(FIELD_WORDS)), re.IGNORECASE
)
_INSTEAD = list(FIELD_WORDS.values())
_LINE_BREAK = re.compile(r"\s*\n[ \t]*(?://|#|>)?[ \t]*")


def words_are_the_fields(texts: Mapping[str, str]) -> Iterator[str]:
    """texts: path -> text. A line break, with a comment's slashes or a quotation's mark, counts as one space."""
    for path, text in texts.items():
        for match in _BANNED.finditer(_LINE_BREAK.sub(lambda at: " " + _BREAK * (len(at.group()) - 1), text)):
            found = re.sub(r"\s+(?://|#|>)?\s*", " ", text[match.start() : match.end()])
            line = text.count("\n", 0, match.start()) + 1
            instead = _INSTEAD[int(match.lastgroup[1:])]
            yield f"{path}:{line}: '{found}' is this project's own word; the field says: {instead}"
