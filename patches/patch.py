"""What a patch is: a few attributes of upstream classes, replaced while it is applied."""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

import torch
from packaging.specifiers import SpecifierSet
from torch.overrides import TorchFunctionMode


@dataclass
class Patch:
    """One mend for one upstream fault.

    Attributes:
        name: the module's name.
        what: the fault, as a user meets it.
        upstream: a link to a report of it, or to the code.
        versions: for each package concerned, the versions that the patch was tested with.
        delete_when: how to tell that it is no longer needed.
        targets: (module, "Class.method") pairs to replace. Classes that an older version lacks are passed over.
        wrap: takes the upstream method and gives the one to put in its place.
        needs: names of patches that must be applied with this one.
    """

    name: str
    what: str
    upstream: str
    versions: dict[str, str]
    delete_when: str
    targets: tuple[tuple[str, str], ...]
    wrap: Callable
    needs: tuple[str, ...] = ()
    applied: bool = field(default=False, init=False)

    def check_versions(self):
        """Raise NotImplementedError if a package is installed in a version that the patch was not tested with."""
        for package, tested in self.versions.items():
            try:
                found = version(package)
            except PackageNotFoundError:
                found = "no version"
            if found == "no version" or not SpecifierSet(tested).contains(found.split("+")[0], prereleases=True):
                raise NotImplementedError(
                    f"patch {self.name} was tested with {package} {tested}, found {found}: install such a version, "
                    f"or see {self.upstream} whether the fault ({self.what}) is gone and go without the patch"
                )

    def concerns(self, pipe):
        """Whether the pipeline or a component of it has a class that this patch changes."""
        classes = {owner for owner, _ in self._owners()}
        components = [part for part in pipe.components.values() if part is not None]
        parts = [module for part in components for module in (part.modules() if hasattr(part, "modules") else [part])]
        return any(isinstance(part, tuple(classes)) for part in [pipe, *parts])

    def apply(self):
        """Put the replacements in place; does nothing when they are there already."""
        if self.applied:
            return
        self.check_versions()
        for owner, attribute in self._owners():
            original, wraps = _layers.setdefault((owner, attribute), (owner.__dict__[attribute], {}))
            wraps[self.name] = self.wrap
            _rebuild(owner, attribute, original, wraps)
        self.applied = True

    def revert(self):
        """Put upstream's own methods back; does nothing when they are there already."""
        for (owner, attribute), (original, wraps) in list(_layers.items()):
            if wraps.pop(self.name, None) is not None:
                _rebuild(owner, attribute, original, wraps)
        self.applied = False

    def _owners(self):
        for module_name, path in self.targets:
            class_name, attribute = path.split(".")
            owner = getattr(importlib.import_module(module_name), class_name, None)
            if owner is not None and attribute in owner.__dict__:
                yield owner, attribute


# for each replaced attribute: upstream's own, and the wraps around it by patch, so that any of them can go first
_layers: dict = {}


def _rebuild(owner, attribute, original, wraps):
    method = original
    for wrap in wraps.values():
        method = wrap(method)
    setattr(owner, attribute, method)
    if not wraps:
        del _layers[owner, attribute]


def redirecting(function, replacement):
    """Make a `wrap` that sends a torch function elsewhere while a method runs on XLA tensors.

    Nothing global changes: calls from other code, and on other devices, go where they always went.

    Args:
        function: a function that torch lets a mode override, such as `torch.linalg.solve`.
        replacement: called in its place with the same arguments.
    """

    class Redirect(TorchFunctionMode):
        def __torch_function__(self, called, types, args=(), kwargs=None):
            return (replacement if called is function else called)(*args, **(kwargs or {}))

    def wrap(method):
        @functools.wraps(method)
        def wrapper(self, *args, **kwargs):
            if not on_xla(*args, *kwargs.values()):
                return method(self, *args, **kwargs)
            with Redirect():
                return method(self, *args, **kwargs)

        return wrapper

    return wrap


def on_xla(*values):
    """Whether any of the values is a tensor on an XLA device."""
    return any(isinstance(value, torch.Tensor) and value.device.type == "xla" for value in values)
