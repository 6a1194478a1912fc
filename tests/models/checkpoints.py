"""The tiny checkpoint that the tests of loading share."""

from pathlib import Path

GOLDEN = Path(__file__).parent / "golden"


class Tensors:
    """A TensorSource in memory."""

    def __init__(self, tensors):
        self.tensors = tensors
        self.shapes = {name: x.shape for name, x in tensors.items()}

    def read(self, name):
        return self.tensors[name]
