"""The site, for Sphinx: made of the repository's own Markdown files, where they are. `make docs` builds it."""

import re
import sys
from pathlib import Path

from sphinx.pycode import ModuleAnalyzer

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

project = "flash_attn_ext"
release = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE).group(1)
version = release
html_title = f"{project} {release}"

# The menu: titles of its parts, and the pages of each. What is not here is no page of the site.
MENU = {
    "Use it": ("docs/semantics", "docs/numerics", "docs/api"),
    "Ways in": ("docs/torch_backend", "docs/flash_attn", "docs/transformers", "docs/tools"),
    "Figures": ("benchmarks/results/README",),
    "Inside": ("docs/architecture", "docs/hopper", "csrc/README", "docs/kernels/README"),
    "The project": ("CONTRIBUTING", "tests/README", "CHANGELOG"),
}
KERNEL_PAGES = tuple(
    path.relative_to(ROOT).with_suffix("").as_posix()
    for folder in ("docs/kernels", "docs/kernels/log")
    for path in sorted((ROOT / folder).glob("*.md"))
    if path.name != "README.md"
)

root_doc = "README"
include_patterns = [
    f"{page}.md" for page in (root_doc, *KERNEL_PAGES, *(page for part in MENU.values() for page in part))
]
# Folders in which Sphinx need not look for pages.
exclude_patterns = ["build", "dist", "demo", ".*", "flash_attn_ext", "build_support", "examples", "*.egg-info"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4  # with the names that GitHub gives them
highlight_language = "text"
nitpicky = True
# Types in signatures, which have no page here.
nitpick_ignore_regex = [("py:.*", r"(.*\.)?(Tensor|SdpaReplacement)")]

OVERLOADED_NAMES = [f"integrations.flash_attn.{name}" for name in ("functions", "packed_tensors", "kvcache")]

add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_maximum_signature_line_length = 100
napoleon_numpy_docstring = False

html_theme = "furo"
templates_path = ["."]
html_additional_pages = {"index": "redirect.html"}  # the first page is README's
html_copy_source = False
html_show_sphinx = False


def add_menu(app, page: str, source: list[str]) -> None:
    """To the first page, and the kernels' pages to theirs: on GitHub a menu would be noise."""
    parts = {page_: {title: pages} for page_, title, pages in (("docs/kernels/README", "Kernels", KERNEL_PAGES),)}
    parts[root_doc] = MENU
    for title, pages in parts.get(page, {}).items():
        entries = "\n".join(f"/{entry}" for entry in pages)
        source[0] += f"\n\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n{entries}\n```\n"


def show_signatures_of_implementations(app) -> None:
    """Not those of overloads, which have no defaults and differ in the type of the result alone."""
    for name in ("reference", "functional", "varlen", "kv_cache", *OVERLOADED_NAMES):
        analyzer = ModuleAnalyzer.for_module(f"flash_attn_ext.{name}")
        analyzer.analyze()
        analyzer.overloads.clear()


def setup(app) -> None:
    app.connect("builder-inited", show_signatures_of_implementations)
    app.connect("source-read", add_menu)
