"""Words that this project once had of its own where the field has one, and the field's word for each.

An engineer who knows FlashAttention-3 or CUTLASS searches for the field's words, so the sources and documents use them.
The logs under docs/kernels/log/ are history and may keep theirs. Case does not matter, except in (?-i:...).
"""

import re
from collections.abc import Iterator, Mapping

from architecture import cpp_text

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
    r"work items?": "work tile",
    r"suspicious": "needs recomputation",
    r"rings? of (stages|tiles)": "pipeline",
    r"of own \w+ time": "times as fast as our own call",
    r"nats a byte": "nats per byte",
    # Kernels that had names of their own before there were tables of them.
    r"(?-i:Extended|Modified) (kernel|variant)s?|(the|an) (?-i:Extended|Modified)|(?-i:kExtended)": "generic",
    r"(?-i:Plain) (kernel|variant)s?|(as|the) (?-i:Plain)": "scale-only",
    r"(?-i:Short|Small|Tall) (kernel|variant)s?|(?-i:Tall)": "what differs: two CTAs per SM, more queries per tile",
    r"(?-i:BiasMask|SplitKv|SingleTile) (kernel|variant)s?": "kernel for a bias and a mask, split-KV, single-tile",
    r"(?-i:Variant::k\w+)": "ScoreMode",
    r"storing kernels?": "two-pass",
    r"few-queries kernels?": "query-stationary",
    r"all-keys kernels?": "single-tile",
    r"stored (scores?|P|dS|matrix|matrices|tiles?)": "materialised",
    r"(d?bias(es)?|boxes|bands?) of diagonals|numbers? for (each|a) diagonal": "relative-position bias, block diagonal",
}
# The same for identifiers in C++, of which the words are separated and in lower case: kPartKeys is "part keys". Some of
# these are words of prose, where they have their usual meaning.
FIELD_IDENTIFIERS = {
    r"turns?": "semaphore, rank; ping-pong",
    r"claims?": "fetch",
    r"visits": "iteration, contributor",
    r"walks?": "loop order",
    r"pieces?": "vector, chunk, slice",
    r"suspicious": "needs recompute",
    r"(own|staged|fetched|box|loads?|stages?) terms": "bias and mask; augmented columns",
    r"of diagonals|diagonal (boxes|bands?)": "relative bias, block diagonals",
    r"nothing added": "no bias and mask; no augmented step",
    r"keys per part|(store|take|run|merge|is) parts?": "split, partial",
    r"start (scores|values|d[pqkv])": "issue the GEMM",
    r"product tile|(row|backward) product": "GEMM",
    r"(from|kind of|may be) stored|store in d\w+": "materialised",
    r"hand over": "store",
    r"(work|head|gemm) items?|item at": "work tile; head coord",
}
_BREAK = "\0"  # stands for each character of a line break but the first, so that offsets stay those of the text


def _pattern(words: str) -> str:
    return words.replace(" ", f"[ {_BREAK}]+")


def _any_of(words: Mapping[str, str]) -> re.Pattern:
    return re.compile("|".join(rf"(?P<w{i}>\b(?:{_pattern(own)})\b)" for i, own in enumerate(words)), re.IGNORECASE)


def _instead(match: re.Match, words: Mapping[str, str]) -> str:
    return list(words.values())[int(match.lastgroup[1:])]


_BANNED = _any_of(FIELD_WORDS)
_BANNED_IDENTIFIERS = _any_of(FIELD_WORDS | FIELD_IDENTIFIERS)
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
_WORD_OF_IDENTIFIER = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_LINE_BREAK = re.compile(r"\s*\n[ \t]*(?://|#|>)?[ \t]*")


def words_are_the_fields(texts: Mapping[str, str]) -> Iterator[str]:
    """texts: path -> text. A line break, with a comment's slashes or a quotation's mark, counts as one space."""
    for path, text in texts.items():
        for match in _BANNED.finditer(_LINE_BREAK.sub(lambda at: " " + _BREAK * (len(at.group()) - 1), text)):
            found = re.sub(r"\s+(?://|#|>)?\s*", " ", text[match.start() : match.end()])
            line = text.count("\n", 0, match.start()) + 1
            yield f"{path}:{line}: '{found}' is this project's own word; the field says: {_instead(match, FIELD_WORDS)}"


def identifiers_are_the_fields(texts: Mapping[str, str]) -> Iterator[str]:
    """texts: path -> C++ text."""
    own = FIELD_WORDS | FIELD_IDENTIFIERS
    for path, text in texts.items():
        seen = set()
        for match in _IDENTIFIER.finditer(cpp_text.without_comments(text)):
            name = match.group()
            words = " ".join(_WORD_OF_IDENTIFIER.findall(name)).lower()
            if name not in seen and (found := _BANNED_IDENTIFIERS.search(words)):
                line = cpp_text.line_of(text, match.start())
                yield f"{path}:{line}: {name} has this project's own word; the field says: {_instead(found, own)}"
            seen.add(name)
