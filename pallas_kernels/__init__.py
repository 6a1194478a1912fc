"""GPU kernels, a folder for each operation, with references in JAX. Imports nothing of ours.

Which GPUs they run on is in `support`. What they do not take they refuse with a NotImplementedError that names it.
"""

from pallas_kernels import read_once, value_names

read_once.install()
value_names.install()
