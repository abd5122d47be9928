"""The nodes of the decision tree: what is trained, on a base of how many bits."""

from enum import StrEnum

from planner.setup import TrainSetup


class Node(StrEnum):
    """A class of setups that the tree takes or leaves as a whole, in the order in which it asks for them."""

    FULL = "full"
    LORA = "lora"
    EIGHT_BIT = "qlora-8bit"
    FOUR_BIT = "qlora-4bit"

    @property
    def words(self) -> str:
        return _WORDS[self]

    @property
    def quantized(self) -> bool:
        return self in (Node.EIGHT_BIT, Node.FOUR_BIT)

    @property
    def method(self) -> str:
        return "qlora" if self.quantized else self.value


_WORDS = {
    Node.FULL: "full fine-tuning",
    Node.LORA: "LoRA (16-bit base)",
    Node.EIGHT_BIT: "8-bit QLoRA",
    Node.FOUR_BIT: "4-bit QLoRA",
}


def node_of_setup(setup: TrainSetup) -> Node:
    """The node that a setup belongs to; a mixture's experts in 4 bits are most of its base."""
    if setup.method != "qlora" and not setup.quantize_experts:
        return Node(setup.method)
    return Node.EIGHT_BIT if setup.quantization == "int8" else Node.FOUR_BIT
