"""How the pages are built, from the root of a checkout: `python -m sphinx -W --keep-going -c docs . build/docs`.

The source is the whole checkout, so that a link between README, docs and other files leads to the same here and on
GitHub. Warnings, which become errors, are among others: a link or an anchor that leads nowhere, and a name in a
docstring that no longer exists.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import gdn

project = "gdn"
author = "the gdn authors"
version = release = gdn.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
include_patterns = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/*.md"]
exclude_patterns = [".venv*", "build"]  # not to be searched
root_doc = "docs/index"
html_theme = "alabaster"
html_theme_options = {"page_width": "1200px", "body_max_width": "none"}  # tables of many columns

# A name in single backticks in a docstring is a reference, which must lead somewhere.
default_role = "py:obj"
nitpicky = True

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # arrays are Any: what they must be is said in words
napoleon_numpy_docstring = False
napoleon_use_param = False  # arguments that share an explanation stay together
napoleon_use_rtype = False
myst_heading_anchors = 3  # links to headings, by the anchors that GitHub gives them
