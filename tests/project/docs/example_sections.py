"""Adapts the package for the reference, which mkdocstrings builds. Named in mkdocs.yml."""

import re
from typing import Any

import griffe


class ExampleSections(griffe.Extension):
    """Turns "Example:" into "Examples:", the only one that mkdocstrings knows, and hides private base classes."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each thing that is documented."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
        if isinstance(obj, griffe.Class) and obj.parent is not None:
            private = {name: cls.bases for name, cls in obj.parent.classes.items() if name.startswith("_")}
            obj.bases = [public for base in obj.bases for public in private.get(str(base), [base])]
