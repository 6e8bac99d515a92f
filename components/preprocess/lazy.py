"""Numpy (`np`) and Arrow (`pa`, `pc`), loaded on first use: compiling imports modules that use them."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any


class _LazyModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        value = getattr(importlib.import_module(self.__name__), name)
        setattr(self, name, value)  # later uses are as fast as those of the module
        return value


if TYPE_CHECKING:
    import numpy as np
else:
    np = _LazyModule("numpy")
pa: Any = _LazyModule("pyarrow")
pc: Any = _LazyModule("pyarrow.compute")

__all__ = ["np", "pa", "pc"]
