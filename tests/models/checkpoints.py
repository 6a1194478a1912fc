"""The tiny checkpoint that the tests of loading share."""

from pathlib import Path

from models.huggingface import HuggingFaceDirectory

GOLDEN = Path(__file__).parent / "golden"


def golden_tensors(name):
    """(the tensors of a golden checkpoint, its configuration)"""
    directory = HuggingFaceDirectory(GOLDEN / name)
    directory.open()
    return Tensors({key: directory.read(key) for key in directory.shapes}), directory.config


class Tensors:
    """A TensorSource in memory."""

    def __init__(self, tensors):
        self.tensors = tensors
        self.shapes = {name: x.shape for name, x in tensors.items()}

    def read(self, name):
        return self.tensors[name]
