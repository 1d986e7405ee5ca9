"""What every run needs between its configuration and its first step."""

import importlib
import sys
import types

from jaxthru import moved


class _Callable(types.ModuleType):
    """Also the function that this name was at commit 56c3c12: `jaxthru.build(config, data)`."""

    def __call__(self, *arguments, **settings):
        moved.say("jaxthru.build(...): call jaxthru.build_step(...)")
        return importlib.import_module("jaxthru.build.compiled").build_step(*arguments, **settings)


sys.modules[__name__].__class__ = _Callable
