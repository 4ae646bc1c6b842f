"""Settings of Sphinx for the site that ``make docs`` builds.

The source folder is the repository's root, so a relative link leads to the same page on GitHub and on the
site.  Nothing is fetched while the site is built, and no page of it asks another host for anything.
"""

import hashlib
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCES = ("nbparallel", "magics", "widgets")
sys.path[:0] = [str(ROOT), str(ROOT / "magics"), str(ROOT / "widgets"), str(Path(__file__).parent)]
os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"  # this environment's kernel, not one in the user's folder
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:3])  # the kernel runs the code that is described

import nbparallel  # noqa: E402

project, author, copyright = "nbparallel", "the nbparallel developers", "the nbparallel developers"
version = release = nbparallel.__version__

root_doc = "docs/index"
include_patterns = [
    "docs/**.md",
    "docs/**.rst",
    "notebooks/*.ipynb",
    "notebooks/solutions/*.ipynb",  # by their lessons' links: they stand in no list
    "notebooks/*.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
]
exclude_patterns = [
    ".*",
    "build",
    "tests",
    "docs/site",
    "docs/dev",
    "**/.ipynb_checkpoints",
]
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.viewcode",
    "numpydoc",
    "sphinx_copybutton",
    "sphinx_design",
    "sections",
    "page_source",
    "magic_reference",
    "cell_lexer",
    "name_examples",
]
templates_path = [str(Path(__file__).parent / "templates")]  # autosummary looks in the source folder
default_role = "autolink"  # `all_reduce` in a docstring is a link where it is a name of ours
nitpicky = True

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
myst_links_external_new_tab = False


def _digest_of_sources() -> str:
    """Return what changes with the library: outputs of notebooks are kept for one state of it."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


nb_execution_mode = "cache"
nb_execution_cache_path = str(ROOT / "build" / "notebook-outputs" / _digest_of_sources())
nb_execution_timeout = 300
nb_execution_excludepatterns = ["notebooks/solutions/*.ipynb"]  # they need what their lessons have made
nb_execution_raise_on_error = True
nb_merge_streams = True
nb_ipywidgets_js: dict[str, dict[str, str]] = {}  # else every page asks other hosts for scripts

autosummary_generate = True
autodoc_typehints = "none"  # numpydoc's sections have them in words
autodoc_member_order = "bysource"
numpydoc_show_class_members = False
numpydoc_class_members_toctree = False

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_theme = "pydata_sphinx_theme"
html_title = "nbparallel"
html_static_path = [str(Path(__file__).parent / "static")]
html_extra_path = [str(Path(__file__).parent / "start")]
html_css_files = ["site.css"]
html_search_scorer = str(Path(__file__).parent / "scorer.js")
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "logo": {"text": "nbparallel"},
    "navbar_end": ["theme-switcher"],
    "show_toc_level": 2,
    "collapse_navigation": True,  # its toggles have no name for a screen reader
    "footer_start": ["copyright"],
    "footer_end": [],
    "secondary_sidebar_items": ["page-toc"],
}
html_sidebars = {"docs/index": [], "search": [], "genindex": []}
