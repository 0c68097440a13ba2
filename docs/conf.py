# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The documentation site: make docs."""

import inspect
import os
import re
import sys
from pathlib import Path

from pyro.distributions import TorchDistribution
from pyro.infer.mcmc.mcmc_kernel import MCMCKernel
from torch.nn import Module

import pyro_nmm

DOCS = Path(__file__).parent
TUTORIALS = DOCS / "tutorials"
sys.path.insert(0, str(DOCS))
import notebooks  # noqa: E402

project = "pyro-nmm"
author = "The pyro-nmm contributors"
project_copyright = author
release = pyro_nmm.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "sphinx-mathjax-offline",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build", "**.ipynb_checkpoints", "gallery/*/README.md"]
nitpicky = False

# Pages: GitHub shows the same ones, with its own anchors and mathematics.
myst_enable_extensions = ["amsmath", "colon_fence", "dollarmath"]
myst_heading_anchors = 4

# The site needs no other host: sphinx-mathjax-offline copies MathJax into _static.
mathjax_path = "mathjax/tex-chtml.js"

# Tutorials run when the site is built, and again when their text changes.
nb_execution_mode = "cache"
nb_execution_raise_on_error = True
# Seconds. A cell of a minute takes ten or more on a busy machine: half of this has no reserve, and
# with twice of it a cell that hangs is reported an hour later.
nb_execution_timeout = 1800
nb_merge_streams = True
nb_code_prompt_show = "Code of the picture"  # cells with the tag hide-input
nb_code_prompt_hide = "Hide the code"

templates_path = ["_templates"]
autosummary_generate = True
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_default_options = {"members": True, "inherited-members": True}


# Sphinx takes texts of Pyro, torch and scikit-learn for the methods that override theirs.
autodoc_inherit_docstrings = False

#: Methods that a library calls, and not a user.
CALLED_BY_LIBRARIES = {"enumerate_support", "expand", "extra_repr", "progress", "support"}
DATA_OF_LIBRARIES = {"shown"} | {
    name for library in (Module, TorchDistribution, MCMCKernel) for name in dir(library)
}


def is_documented(name, member):
    """Whether a member of a class belongs into the reference: public, and this package's own."""
    if name.startswith("_") or name in CALLED_BY_LIBRARIES:
        return False
    if name.startswith("set_") and name.endswith("_request"):
        return False  # of scikit-learn's metadata routing
    function = inspect.unwrap(getattr(member, "fget", None) or getattr(member, "func", member))
    return getattr(function, "__module__", "").startswith("pyro_nmm")


def skip_member(app, what, name, member, skip, options):
    """Skip members and data of other libraries."""
    if what != "class" or type(member).__name__ == "_tuplegetter":  # a field of a named tuple
        return None
    if not (callable(member) or hasattr(member, "__get__")):
        return True if name in DATA_OF_LIBRARIES else None
    return None if is_documented(name, member) else True


def write_notebooks(app, error):
    if app.builder.format == "html" and not error:
        notebooks.write(TUTORIALS, Path(app.outdir) / "tutorials")


def link_notebook(app, page, template, context, doctree):
    """A link below the title of every tutorial."""
    if (DOCS / f"{page}.md").parent == TUTORIALS:
        link = f'<a href="{page.rpartition("/")[2]}.ipynb" download>Download as a notebook</a>'
        context["body"] = context["body"].replace(
            "</h1>", f'</h1>\n<p class="notebook">{link}</p>', 1
        )


def formulas_in_lines(app, what, name, member, options, lines):
    """Several formulas in a row of a docstring: one in a line, for phones."""
    text = "\n".join(lines)
    for block in re.findall(r"(?<=\.\. math::\n\n)(?: {4,}.*\n?)+", text):
        rows = re.split(r"\s*\\q?quad\s+", block.strip())
        if len(rows) > 1 and r"\\" not in block:
            aligned = r"\begin{aligned} &" + r" \\ &".join(rows) + r" \end{aligned}"
            indent = block[: len(block) - len(block.lstrip())]
            text = text.replace(block, indent + " ".join(aligned.split()) + "\n", 1)
    lines[:] = text.split("\n")


def setup(app):
    # A bar on a page is a widget, whose scripts are on another host.
    os.environ["TQDM_DISABLE"] = "1"
    app.connect("autodoc-skip-member", skip_member)
    app.connect("html-page-context", link_notebook)
    app.connect("build-finished", write_notebooks)
    app.connect("autodoc-process-docstring", formulas_in_lines)


html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["site.js", "borrowed_label.js"]
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"
html_title = "pyro-nmm"
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True
