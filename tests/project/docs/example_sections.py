"""For the reference: docstrings say "Example:" where mkdocstrings knows "Examples:" only. Named in mkdocs.yml."""

import re
from typing import Any

import griffe


class ExampleSections(griffe.Extension):
    """Makes an "Example:" of a docstring the section that it is meant to be."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each thing that is documented."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
