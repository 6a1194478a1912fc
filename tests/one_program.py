"""Functions as one program each: operations one by one would be as many, which take far longer to compile than to run.

Only where these are not had by many calls alike: a whole model's are, and take less one by one.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax


def in_one(function: Callable, *arrays: Any, **known: Any) -> Any:
    """`function(*arrays, **known)`; what is `known` is so while it is traced, arrays too."""
    return jax.jit(partial(function, **known))(*arrays)
