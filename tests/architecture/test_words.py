"""The field's words instead of the project's own: the rule holds on the real tree, and catches a planted violation."""

import pytest

from architecture import rules, word_rules


def test_sources_and_documents_use_the_fields_words():
    assert list(word_rules.words_are_the_fields(rules.worded_sources())) == []
    assert list(word_rules.identifiers_are_the_fields(rules.cpp_sources())) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("// The copy engine writes it.", "1: 'copy engine'"),
        ("int x;\n  // The copy\n  // engine writes it.", "2: 'copy engine'"),
        ("> A warp gives\n> back its stage.", "1: 'gives back'"),
        ("Multiprocessors are idle.", "1: 'Multiprocessors'"),
        ("Nobody reads it anew.", "1: 'Nobody'"),
        ("A call takes the Extended\none.", "1: 'the Extended'"),
        ("// BiasMask kernels: TMA loads the bias.", "1: 'BiasMask kernels'"),
        ("Tall kernels have three warpgroups.", "1: 'Tall kernels'"),
        ("A bias of diagonals has\none number for each diagonal.", "1: 'bias of diagonals'"),
        ("dQ is a GEMM of stored tiles.", "1: 'stored tiles'"),
    ],
)
def test_an_own_word_is_found(text, found):
    first, *_ = word_rules.words_are_the_fields({"a.h": text})
    assert first.startswith(f"a.h:{found}")


@pytest.mark.parametrize(
    "text",
    [
        "FLASH_ATTN_EXT_MULTIPROCESSORS=132",
        "multi_processor_count",
        "a ladder, a newt",
        "a small kernel",
        "kSingleTile",
    ],
)
def test_other_words_pass(text):
    assert list(word_rules.words_are_the_fields({"a.md": text})) == []


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("int keys_per_part;", "1: keys_per_part"),
        ("// The turns of two.\nTurns turns_{2};", "2: Turns"),
        ("struct BackwardProductKernel;", "1: BackwardProductKernel"),
        ("bool kStagesTerms;", "1: kStagesTerms"),
        ("struct DiagonalBands;", "1: DiagonalBands"),
    ],
)
def test_an_own_word_in_an_identifier_is_found(code, found):
    first, *_ = word_rules.identifiers_are_the_fields({"a.h": code})
    assert first.startswith(f"a.h:{found}")


def test_other_identifiers_pass():
    code = '// It turns pieces.\nint returned, kTaylorTerms; use(dot_product, cuda_multi_processors, "claims");'
    assert list(word_rules.identifiers_are_the_fields({"a.h": code})) == []
