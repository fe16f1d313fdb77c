"""How long a file, a function or a parameter list may be. Each budget holds on the real tree, and is measured right."""

import pytest

from architecture import cpp_rules, cpp_text, python_rules, rules

CPP_RULES = [
    cpp_rules.files_are_short,
    cpp_rules.functions_are_small,
    cpp_rules.templates_are_small,
    cpp_rules.no_commented_out_code,
]
PYTHON_RULES = [
    python_rules.files_are_short,
    python_rules.functions_are_small,
    python_rules.parameter_lists_are_short,
]


@pytest.mark.parametrize("rule", CPP_RULES, ids=lambda rule: rule.__name__)
def test_cpp_sources_keep(rule):
    assert list(rule(rules.cpp_sources())) == []


@pytest.mark.parametrize("rule", PYTHON_RULES, ids=lambda rule: rule.__name__)
def test_python_sources_keep(rule):
    assert list(rule(rules.python_sources())) == []


def test_every_rule_is_tested_and_run():
    from architecture import test_layering

    assert set(cpp_rules.RULES) == {*CPP_RULES, *test_layering.CPP_RULES}
    assert set(python_rules.RULES) == {*PYTHON_RULES, *test_layering.PYTHON_RULES}


def _function(num_lines: int) -> str:
    return "void f(int a) {\n" + "  a += 1;\n" * (num_lines - 2) + "}\n"


@pytest.mark.parametrize(
    ("rule", "allowed", "refused"),
    [
        (cpp_rules.files_are_short, "\n" * 500, "\n" * 501),
        (cpp_rules.functions_are_small, _function(80), _function(81)),
        (
            cpp_rules.functions_are_small,
            "int f(int a, int b, Map<int, int> c, int d, int e, int g) { return 0; }",
            "template <class T> T f(int a, int b, int c, int d, int e, int g, int h) const noexcept { return 0; }",
        ),
        (
            cpp_rules.functions_are_small,
            "struct S { S(int a, int b) : a_(a), b_{b} {} };",
            "struct S {\n public:\n  S(int a, int b, int c, int d, int e, int f, int g) : a_(a), b_{b} {} };",
        ),
        (
            cpp_rules.templates_are_small,
            "template <class A, int kB, class C = Pair<int, int>> struct S;",
            "template <class A, int kB, bool kC, class... D> struct S;",
        ),
        (cpp_rules.no_commented_out_code, "// The maximum is -inf; see (3).", "// m = max(m, s);"),
        (cpp_rules.no_commented_out_code, "// for every key, in order", "// for (int k = 0; k < n; ++k) {"),
        (cpp_rules.no_commented_out_code, "#if defined(__CUDACC__)", "#if 0"),
        (cpp_rules.no_commented_out_code, "// O = P V (equation 3)", "// return lse;"),
    ],
)
def test_cpp_budget(rule, allowed, refused):
    assert list(rule({"host/a.h": allowed})) == []
    assert list(rule({"host/a.h": refused}))


def test_bindings_may_mirror_the_users_keywords():
    text = "void f(int a, int b, int c, int d, int e, int g, int h) {}"
    assert list(cpp_rules.functions_are_small({"bindings.cpp": text})) == []


@pytest.mark.parametrize(
    ("rule", "allowed", "refused"),
    [
        (python_rules.files_are_short, "\n" * 500, "\n" * 501),
        (
            python_rules.functions_are_small,
            'def f():\n    """Docs.\n' + "\n" * 100 + '    """\n' + "    x = 1\n" * 77,
            "def f():\n" + "    x = 1\n" * 80,
        ),
        (
            python_rules.parameter_lists_are_short,
            "class A:\n    def f(self, a, b, c, d, e, *, f): ...",
            "def f(a, b, c, d, e, *, f, g): ...",
        ),
    ],
)
def test_python_budget(rule, allowed, refused):
    assert list(rule({"flash_attn_ext/a.py": allowed})) == []
    assert list(rule({"flash_attn_ext/a.py": refused}))


def test_functions_are_read_whole():
    code = cpp_text.without_comments(
        """
        template <class T>
        inline auto scale(const T& x, std::pair<int, int> p) -> decltype(x) {  // { not a brace
          if (x) { call(1, 2); }
          auto lambda = [&](int i) { return i; };
          return "}{"[0];
        }
        bool A::operator==(const A& b) const { return true; }
        """
    )
    found = {f.name: (f.num_lines, f.num_parameters) for f in cpp_text.functions(code)}
    assert found == {"scale": (5, 2), "operator==": (1, 1)}
